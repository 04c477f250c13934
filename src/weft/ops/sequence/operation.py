"""`sequence`, and `shard` and `unshard` between the whole and the slices of the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.comm import Axis
from weft.comm.arguments import find_integer_fault, find_tensor_fault, kind_of, read
from weft.comm.function import RankFunction, eager
from weft.ops.sequence.deal import Bounds
from weft.ops.sequence.layout import Sequence, axis_of, read_on_axis, read_sequence, read_where, resolve, shard_runs
from weft.ops.sequence.mask import Mask
from weft.ops.sequence.runs import Runs, lengths_of


@eager
def sequence(
    local_length: int | None = None,
    *,
    total: int | None = None,
    layout: str | None = None,
    cu_seqlens: Any = None,
    chunks_per_rank: int | None = None,
    mask: Mask | None = None,
    group: Any = None,
) -> Sequence:
    """How a batch lies on the ranks of ``group``, for ``sequence=`` of every layer, in place of these arguments.

    ``local_length`` is how many tokens this rank holds (any number, ranks may differ). Or ``total``, how many all ranks
    hold together: each then holds what `weft.shard` gives it. ``layout`` "contiguous" (if left out), "zigzag" or
    "balanced"; ``cu_seqlens`` the boundaries ``[N+1]`` of packed documents in the whole sequence, on every rank.

    With "balanced" the sequence is cut into chunks, dealt so that every rank has as many and the same attention work,
    to 2 %, in this batch: that of causal attention within the documents, or that of ``mask``. Ranks must hold what
    they are dealt: make the sequence by ``total`` and cut with ``weft.shard(x, dim, sequence=...)``. A rank gets
    ``chunks_per_rank``; left out, 8 to 64 of them, so that dealing takes milliseconds. It is up to eight times as many
    where one chunk would be too much work, and fewer where they would be very short. Most of a rank's chunks are
    neighbours in the sequence.

    What crosses ranks: one round of integers, once for each batch. Layers that get it send none.

    >>> sequence(10).lengths, sequence(total=10).lengths
    ((10,), (10,))
    """
    axis, (options, length) = read_on_axis(
        "sequence", group, None,
        lambda axis: _read_lengths(axis, local_length, total, layout, cu_seqlens, chunks_per_rank, mask),
    )  # fmt: skip
    call = axis.begin("sequence", options, metadata=(length,))
    return resolve(
        "sequence", call, axis, options.layout, options.cu_seqlens, options.chunks_per_rank, options.mask
    )  # fmt: skip


def _read_lengths(
    axis: Axis, local_length: int | None, total: int | None, layout: str | None, cu_seqlens: Any,
    chunks_per_rank: int | None, mask: Mask | None,
) -> tuple[_SequenceOptions, int] | Exception:  # fmt: skip
    """What the ranks must have in common, and this rank's length; or what is wrong."""
    name, rank = "sequence", axis.rank
    where = read_where(name, layout, cu_seqlens, rank)
    if isinstance(where, Exception):
        return where
    if fault := _find_deal_fault(rank, where[0], chunks_per_rank, mask):
        return fault
    dealt = None if chunks_per_rank is None else int(chunks_per_rank), mask
    if (local_length is None) == (total is None):
        return ValueError(
            "sequence: give local_length, the tokens of this rank, or total, those of all ranks, and not both "
            f"(rank {rank})"
        )
    word, given = ("local_length", local_length) if total is None else ("total", total)
    if fault := find_integer_fault(name, word, given, rank, least=0):
        return fault
    if total is None:
        return _SequenceOptions(*where, None, *dealt), int(given)  # type: ignore[arg-type]
    whole = int(total)
    if where[1] is not None and where[1][-1] != whole:
        return ValueError(f"{name}: cu_seqlens end at {where[1][-1]}, but total is {whole} (rank {rank})")
    if mask is not None and mask.total != whole:
        return ValueError(f"{name}: mask is of {mask.total} tokens, but total is {whole} (rank {rank})")
    runs = shard_runs(whole, where[0], axis.size, where[1], *dealt)
    return _SequenceOptions(*where, whole, *dealt), lengths_of(runs, axis.size)[rank]


def _find_deal_fault(rank: int, layout: str, chunks_per_rank: object, mask: object) -> Exception | None:
    for word, given in (("chunks_per_rank", chunks_per_rank), ("mask", mask)):
        if given is not None and layout != "balanced":
            return ValueError(f"sequence: {word} is of layout 'balanced', but this one is {layout!r} (rank {rank})")
    if chunks_per_rank is not None and (
        fault := find_integer_fault("sequence", "chunks_per_rank", chunks_per_rank, rank, least=1)
    ):
        return fault
    if mask is not None and not isinstance(mask, Mask):
        return TypeError(f"sequence: mask must be a weft.Mask, got {kind_of(mask)} (rank {rank})")
    return None


@dataclass(frozen=True)
class _SequenceOptions:
    """What the ranks must have in common."""

    layout: str
    cu_seqlens: Bounds | None
    total: int | None
    chunks_per_rank: int | None
    mask: Mask | None


@eager
def shard(
    x: Tensor, dim: int, *, layout: str | None = None, cu_seqlens: Any = None, sequence: Sequence | None = None,
    group: Any = None,
) -> Tensor:  # fmt: skip
    """This rank's slice of ``x``, cut along ``dim``. Every rank passes the whole; nothing crosses ranks.

    ``layout`` is "contiguous" (if left out), "zigzag", or "balanced", which is dealt by the boundaries ``cu_seqlens``
    of packed documents (see `weft.sequence`). With ``sequence`` the slices are those that it describes. As of any
    replicated tensor, a rank's gradient of ``x`` is its own part: zero outside its slice.

    >>> shard(torch.arange(6), 0)                     # a world of one holds all of it
    tensor([0, 1, 2, 3, 4, 5])
    """
    axis = axis_of(group, sequence)
    found = read("shard", axis.rank, lambda: _read_dim("shard", axis.rank, x, dim, layout, cu_seqlens, sequence, group))
    if isinstance(found, Exception):  # nobody waits for anybody here
        raise found
    dim, layout, bounds = found
    runs = shard_runs(x.shape[dim], layout, axis.size, bounds) if sequence is None else sequence.runs
    return cut(x, dim, runs, axis.rank)


def _read_dim(
    operation: str, rank: int, x: Tensor, dim: int, layout: str | None, cu_seqlens: Any, sequence: Any, group: Any
) -> tuple[int, str, Bounds | None] | Exception:
    """(dim, counted from the front; layout; documents), or what is wrong."""
    if fault := find_tensor_fault(operation, "x", x, rank, None, "a dense tensor"):
        return fault
    if fault := find_integer_fault(operation, "dim", dim, rank):
        return fault
    if not -x.ndim <= dim < x.ndim:
        return ValueError(f"{operation}: dim {dim} is not one of x {list(x.shape)} (rank {rank})")
    length = x.shape[dim]
    mine = length if operation == "unshard" else None
    where = read_sequence(operation, rank, mine, layout, cu_seqlens, group, sequence)
    if isinstance(where, Exception):
        return where
    words = f"x has {length} tokens along dim {dim}"
    if operation == "shard" and sequence is not None and length != sequence.total:
        return ValueError(f"shard: {words}, but sequence {sequence.total} (rank {rank})")
    if operation == "shard" and where[1] is not None and where[1][-1] != length:
        return ValueError(f"shard: {words}, but cu_seqlens end at {where[1][-1]} (rank {rank})")
    return int(dim) % x.ndim, *where


def cut(x: Tensor, dim: int, runs: Runs, rank: int) -> Tensor:
    """The slice of any rank."""
    parts = [x.narrow(dim, run.offset, run.length) for run in runs if run.rank == rank]
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim)


@eager
def unshard(
    x: Tensor, dim: int, *, layout: str | None = None, cu_seqlens: Any = None, sequence: Sequence | None = None,
    group: Any = None,
) -> Tensor:  # fmt: skip
    """The whole on every rank, from slices as `shard` cuts them, or of any other lengths (not in layout "balanced").

    Lengths along ``dim`` may differ between ranks; one round of integers gathers them, if no ``sequence`` has them.
    Each slice travels to every other rank. The gradient of a slice is the sum, in rank order and at least in fp32, of
    what every rank's loss says about it.

    >>> unshard(torch.arange(6), 0)
    tensor([0, 1, 2, 3, 4, 5])
    """
    axis, found = read_on_axis(
        "unshard", group, sequence,
        lambda axis: _read_dim("unshard", axis.rank, x, dim, layout, cu_seqlens, sequence, group),
    )  # fmt: skip
    return _Unshard.apply(x, *found, axis, sequence, None)


@dataclass(frozen=True)
class _UnshardOptions:
    """What the ranks must have in common."""

    dim: int
    rest: tuple[int, ...]
    dtype: torch.dtype
    device: str
    layout: str
    cu_seqlens: Bounds | None
    lengths: tuple[int, ...] | None
    gradient: bool


class _Unshard(RankFunction):
    """Everybody's slices as the whole. Its gradient is `_SumSlices`, whose gradient is this: right to any order."""

    operation = "unshard"
    any_order = True

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, layout: str, bounds: Bounds | None, axis: Axis, known: Sequence | None,
        of: int | None,
    ) -> Tensor:  # fmt: skip
        """``of``: the number of the sum whose gradient this is."""
        rest = tuple(size for index, size in enumerate(x.shape) if index != dim)
        lengths = None if known is None else known.compared
        options = _UnshardOptions(dim, rest, x.dtype, x.device.type, layout, bounds, lengths, ctx.needs_input_grad[0])
        call = axis.begin("unshard", options, metadata=None if known is not None else (x.shape[dim],), of=of)
        mine = x.detach().movedim(dim, 0).contiguous()
        sequence = known or resolve("unshard", call, axis, layout, bounds)
        slices = call.all_gather(mine, sequence.lengths).wait()
        ctx.how = options, sequence, call.number
        parts = [slices[run.rank][run.start : run.start + run.length] for run in sequence.runs]
        return torch.cat(parts).movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _SumSlices.apply(grad, *ctx.how), None, None, None, None, None, None


class _SumSlices(RankFunction):
    """Of the wholes that the ranks have, this rank's slice, summed over the ranks: the gradient of `_Unshard`."""

    operation = "unshard"
    any_order = True

    @staticmethod
    def forward(ctx: Any, whole: Tensor, options: _UnshardOptions, sequence: Sequence, of: int) -> Tensor:
        call = sequence.axis.begin("unshard.backward", options, of=of)
        ordered, runs = whole.detach().movedim(options.dim, 0), sequence.runs
        outgoing = [
            torch.cat([ordered[run.offset : run.offset + run.length] for run in runs if run.rank == rank])
            for rank in range(call.size)
        ]
        total = call.sum_to_owners(outgoing).wait()
        ctx.how = options, sequence, call.number
        return total.to(whole.dtype).movedim(0, options.dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        options, sequence, number = ctx.how
        whole = _Unshard.apply(grad, options.dim, options.layout, options.cu_seqlens, sequence.axis, sequence, number)
        return whole, None, None, None
