"""`shard` and `unshard`: between the whole and the slices of the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.comm import Axis
from weft.comm.arguments import find_integer_fault, find_tensor_fault, read
from weft.comm.function import RankFunction, eager
from weft.ops.sequence.layout import lay_out, shard_lengths
from weft.ops.sequence.sequence import Sequence, axis_of, read_sequence, resolve


@eager
def shard(
    x: Tensor, dim: int, *, layout: str | None = None, sequence: Sequence | None = None, group: Any = None
) -> Tensor:
    """This rank's slice of ``x``, cut along ``dim``. Every rank passes the whole; nothing crosses ranks.

    ``layout`` is "contiguous" (if left out) or "zigzag". With ``sequence`` the slices have its lengths.
    As of any replicated tensor, a rank's gradient of ``x`` is its own part: zero outside its slice.

    >>> shard(torch.arange(6), 0)                     # a world of one holds all of it
    tensor([0, 1, 2, 3, 4, 5])
    """
    axis = axis_of("shard", group, sequence)
    found = read("shard", axis.rank, lambda: _read("shard", axis.rank, x, dim, layout, sequence, group))
    if isinstance(found, Exception):  # nobody waits for anybody here
        raise found
    dim, layout = found
    lengths = shard_lengths(x.shape[dim], layout, axis.size) if sequence is None else sequence.lengths
    return cut(x, dim, lengths, layout, axis.rank)


def _read(
    operation: str, rank: int, x: Tensor, dim: int, layout: str | None, sequence: Any, group: Any
) -> tuple[int, str] | Exception:
    """(dim, counted from the front; layout), or what is wrong."""
    if fault := find_tensor_fault(operation, "x", x, rank, None, "a dense tensor"):
        return fault
    if fault := find_integer_fault(operation, "dim", dim, rank):
        return fault
    if not -x.ndim <= dim < x.ndim:
        return ValueError(f"{operation}: dim {dim} is not one of x {list(x.shape)} (rank {rank})")
    length = x.shape[dim]
    where = read_sequence(operation, rank, length if operation == "unshard" else None, layout, None, group, sequence)
    if isinstance(where, Exception):
        return where
    if operation == "shard" and sequence is not None and length != sequence.total:
        return ValueError(f"shard: x has {length} tokens along dim {dim}, but sequence {sequence.total} (rank {rank})")
    return int(dim) % x.ndim, where[0]


def cut(x: Tensor, dim: int, lengths: tuple[int, ...], layout: str, rank: int) -> Tensor:
    """The slice of any rank, where the ranks hold these many tokens."""
    runs = [x.narrow(dim, run.offset, run.length) for run in lay_out(lengths, layout) if run.rank == rank]
    return runs[0].contiguous() if len(runs) == 1 else torch.cat(runs, dim)


@eager
def unshard(
    x: Tensor, dim: int, *, layout: str | None = None, sequence: Sequence | None = None, group: Any = None
) -> Tensor:
    """The whole on every rank, from slices as `shard` cuts them, or of any other lengths.

    Lengths along ``dim`` may differ between ranks; they are told in one round of integers, if no ``sequence`` has them.
    Each slice travels to every other rank. The gradient of a slice is the sum, in rank order and at least in fp32, of
    what every rank's loss says about it.

    >>> unshard(torch.arange(6), 0)
    tensor([0, 1, 2, 3, 4, 5])
    """
    axis = axis_of("unshard", group, sequence)
    found = read("unshard", axis.rank, lambda: _read("unshard", axis.rank, x, dim, layout, sequence, group))
    if isinstance(found, Exception):
        axis.refuse("unshard", found, metadata=None if isinstance(sequence, Sequence) else 1)
    return _Unshard.apply(x, *found, axis, sequence, None)


@dataclass(frozen=True)
class _Options:
    """What the ranks must have in common."""

    dim: int
    rest: tuple[int, ...]
    dtype: torch.dtype
    device: str
    layout: str
    lengths: tuple[int, ...] | None
    gradient: bool


class _Unshard(RankFunction):
    """Everybody's slices as the whole. Its gradient is `_SumSlices`, whose gradient is this: right to any order."""

    operation = "unshard"
    any_order = True

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, layout: str, axis: Axis, known: Sequence | None, of: int | None
    ) -> Tensor:
        """``of``: the number of the sum whose gradient this is."""
        rest = tuple(size for index, size in enumerate(x.shape) if index != dim)
        lengths = None if known is None else known.lengths
        options = _Options(dim, rest, x.dtype, x.device.type, layout, lengths, ctx.needs_input_grad[0])
        call = axis.begin("unshard", options, metadata=None if known is not None else (x.shape[dim],), of=of)
        mine = x.detach().movedim(dim, 0).contiguous()
        sequence = known or resolve("unshard", call, axis, layout, None)
        slices = call.all_gather(mine, sequence.lengths).wait()
        ctx.how = options, sequence, call.number
        parts = [slices[run.rank][run.start : run.start + run.length] for run in sequence.runs]
        return torch.cat(parts).movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _SumSlices.apply(grad, *ctx.how), None, None, None, None, None


class _SumSlices(RankFunction):
    """Of the wholes that the ranks have, this rank's slice, summed over the ranks: the gradient of `_Unshard`."""

    operation = "unshard"
    any_order = True

    @staticmethod
    def forward(ctx: Any, whole: Tensor, options: _Options, sequence: Sequence, of: int) -> Tensor:
        call = sequence.axis.begin("unshard.backward", options, of=of)
        ordered = whole.detach().movedim(options.dim, 0)
        outgoing = [
            torch.cat([ordered[run.offset : run.offset + run.length] for run in sequence.runs if run.rank == rank])
            for rank in range(call.size)
        ]
        total = call.sum_to_owners(outgoing).wait()
        ctx.how = options, sequence, call.number
        return total.to(whole.dtype).movedim(0, options.dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        options, sequence, number = ctx.how
        whole = _Unshard.apply(grad, options.dim, options.layout, sequence.axis, sequence, number)
        return whole, None, None, None
