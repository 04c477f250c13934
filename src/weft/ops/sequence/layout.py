"""How the tokens of a batch lie on the ranks of an axis, and how operations read that from their arguments.

A *run* is a stretch of consecutive tokens on one rank.

| layout       | rank r holds                                                                | runs of a rank |
|--------------|-----------------------------------------------------------------------------|----------------|
| `contiguous` | the r-th of P parts                                                         | one            |
| `zigzag`     | parts r and 2P-1-r of 2P, which balances the work of one causal document    | two            |
| `balanced`   | the chunks that `deal_chunks` gives it, which balances that of any documents | a few         |

A rank's runs lie one after the other in its memory, in the order of the sequence; those that meet are one. Parts are as
equal as can be, earlier ones longer by a token; so of T zigzag tokens the first run has T - T//2 whatever T is.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor

from weft.comm import Axis, Call
from weft.comm.arguments import find_choice_fault, find_tensor_fault, read, read_bounds, the_choice
from weft.comm.device import copy_to_device
from weft.comm.opaque import Opaque
from weft.ops.sequence.deal import Bounds, CountedMask
from weft.ops.sequence.runs import Runs, TokenRun, deal_runs, lengths_of

T = TypeVar("T")
ANY_LENGTHS = ("contiguous", "zigzag")  # ranks may hold any number of tokens, and their own number says their runs
LAYOUTS = (*ANY_LENGTHS, "balanced")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)  # of the tensors that operations take


def find_layout_fault(operation: str, layout: object, rank: int) -> Exception | None:
    """The error for a layout nobody knows."""
    return find_choice_fault(operation, "layout", layout, rank, LAYOUTS)


def ranks_of_runs(layout: str, size: int) -> list[int]:
    """The rank of each run of a layout of `ANY_LENGTHS`, in the order of the sequence."""
    ranks = list(range(size))
    return ranks if layout == "contiguous" else ranks + ranks[-2::-1]


def run_lengths(length: int, layout: str, rank: int, size: int) -> list[int]:
    """How a rank's ``length`` tokens are cut into its runs, in a layout of `ANY_LENGTHS`."""
    if layout == "contiguous" or rank == size - 1:
        return [length]
    return [length - length // 2, length // 2]


@lru_cache(maxsize=64)
def lay_out(lengths: tuple[int, ...], layout: str) -> Runs:
    """The runs of ranks that hold these many tokens, in a layout of `ANY_LENGTHS`."""
    size = len(lengths)
    left = [run_lengths(length, layout, rank, size) for rank, length in enumerate(lengths)]
    held = [0] * size
    runs: list[TokenRun] = []
    offset = 0
    for rank in ranks_of_runs(layout, size):
        length = left[rank].pop(0)
        runs.append(TokenRun(rank, held[rank], length, offset))
        held[rank] += length
        offset += length
    return tuple(runs)


def shard_runs(
    total: int, layout: str, size: int, bounds: Bounds | None = None,
    chunks_per_rank: int | None = None, mask: CountedMask | None = None,
) -> Runs:  # fmt: skip
    """The runs when `weft.shard` cuts ``total`` tokens; what follows ``size`` is of layout "balanced"."""
    if layout == "balanced":
        return deal_runs(total, size, chunks_per_rank, () if bounds is None else (bounds,), mask)

    def part(parts: int, index: int) -> int:
        return total // parts + (index < total % parts)

    if layout == "contiguous":
        return lay_out(tuple(part(size, rank) for rank in range(size)), layout)
    return lay_out(tuple(part(2 * size, r) + part(2 * size, 2 * size - 1 - r) for r in range(size)), layout)


def shard_lengths(total: int, layout: str, size: int, bounds: Bounds | None = None) -> tuple[int, ...]:
    """The tokens of each rank when `weft.shard` cuts ``total``."""
    return lengths_of(shard_runs(total, layout, size, bounds), size)


@dataclass(frozen=True, eq=False)
class Sequence(Opaque):
    """How the tokens of one batch lie on ranks: made by `weft.sequence`, passed to every layer as ``sequence=``.

    | attribute | what it holds                                                                             |
    |-----------|-------------------------------------------------------------------------------------------|
    | `axis`    | the ranks that share the sequence, seen from this one                                     |
    | `layout`  | "contiguous", "zigzag" or "balanced"                                                      |
    | `lengths` | tokens of each rank; `length` are those of this rank, `total` those of all                |
    | `bounds`  | where packed documents begin and end in the whole sequence; None if it is one document    |
    | `runs`    | the stretches of tokens of all ranks, in the order of the sequence                        |

    `positions` are those of this rank's tokens within their documents. It holds integers, no tensors, and does not
    change: for a batch of other lengths or documents make another one.
    """

    axis: Axis
    layout: str
    lengths: tuple[int, ...]
    bounds: Bounds | None
    dealt: tuple[TokenRun, ...] | None = None  # the runs of layout "balanced"; those of others follow from lengths

    @property
    def runs(self) -> tuple[TokenRun, ...]:
        """Those of all ranks, in the order of the sequence."""
        return lay_out(self.lengths, self.layout) if self.dealt is None else self.dealt

    @cached_property
    def compared(self) -> tuple[int, ...]:
        """What ranks compare of it: lengths and, since other deals have the same, a checksum of dealt runs."""
        if self.dealt is None:
            return self.lengths
        return *self.lengths, zlib.crc32(array("q", chain.from_iterable(self.dealt)).tobytes())

    @property
    def length(self) -> int:
        """Tokens of this rank."""
        return self.lengths[self.axis.rank]

    @property
    def total(self) -> int:
        """Tokens of the whole sequence."""
        return sum(self.lengths)

    def positions(self, device: torch.device | str = "cpu") -> Tensor:
        """The position of each of this rank's tokens within its document, ``[length]``: for rotary embeddings.

        They are made on the CPU and copied to ``device``, which the host does not wait for.

        >>> from weft import sequence
        >>> sequence(5, cu_seqlens=[0, 2, 5]).positions()
        tensor([0, 1, 0, 1, 2])
        """
        runs = [run for run in self.runs if run.rank == self.axis.rank]
        places = torch.cat([torch.arange(run.offset, run.offset + run.length) for run in runs])
        if self.bounds is not None:
            starts = torch.tensor(self.bounds[:-1], dtype=torch.int64)
            places -= starts[torch.searchsorted(starts, places, right=True) - 1]
        return copy_to_device(places, torch.device(device))


def resolve(
    operation: str, call: Call, axis: Axis, layout: str, bounds: Bounds | None,
    chunks_per_rank: int | None = None, mask: CountedMask | None = None,
) -> Sequence:  # fmt: skip
    """The sequence, from the lengths gathered in ``call``; everybody raises where documents or chunks do not fit."""
    lengths = tuple(numbers[0] for numbers in call.metadata.wait())
    total = sum(lengths)
    if bounds is not None and total != bounds[-1]:
        raise ValueError(
            f"{operation}: cu_seqlens end at {bounds[-1]}, but the ranks hold {list(lengths)}, {total} tokens "
            f"in all; they must be the boundaries in the whole sequence"
        )
    if mask is not None and total != mask.total:
        raise ValueError(
            f"{operation}: mask is of {mask.total} tokens, but the ranks hold {list(lengths)}, {total} in all"
        )
    dealt = None
    if layout not in ANY_LENGTHS:
        dealt = shard_runs(total, layout, axis.size, bounds, chunks_per_rank, mask)
        wanted = lengths_of(dealt, axis.size)
        if lengths != wanted:
            raise ValueError(
                f"{operation}: the ranks hold {list(lengths)} tokens, but layout {layout!r} deals them {list(wanted)}; "
                f"cut with weft.shard and the same cu_seqlens, or pass the sequence with which they were cut"
            )
    axis.counter.cache["sequence", layout] = lengths
    return Sequence(axis, layout, lengths, bounds, dealt)


def predict(axis: Axis, length: int, layout: str, bounds: Bounds | None) -> Sequence | None:
    """How the tokens probably lie, before lengths are gathered: as the last time, or as `weft.shard` would cut them.

    For local work that may begin at once and is done again if the prediction was wrong; nothing is sent because of it.
    """
    total = None if bounds is None else bounds[-1]
    candidates = [axis.counter.cache.get(("sequence", layout))]
    candidates.append((length,) * axis.size if total is None else shard_lengths(total, layout, axis.size, bounds))
    for lengths in candidates:
        if lengths is None or lengths[axis.rank] != length or (total is not None and sum(lengths) != total):
            continue
        dealt = None if layout in ANY_LENGTHS else shard_runs(sum(lengths), layout, axis.size, bounds)
        if dealt is None or lengths_of(dealt, axis.size) == lengths:
            return Sequence(axis, layout, lengths, bounds, dealt)
    return None


def count_documents(batch: int, cu_seqlens: Any, given: Any) -> int:
    """How many there are, as the arguments say, before anything was read: ``batch`` where none are packed."""
    bounds = given.bounds if isinstance(given, Sequence) else cu_seqlens
    if bounds is None:
        return batch
    return (bounds.numel() if isinstance(bounds, Tensor) else len(bounds)) - 1


# Reading arguments: faults are returned, see `weft.comm.arguments`.


def axis_of(group: Any, given: Any) -> Axis:
    """The axis of an operation that takes either ``sequence`` or a ``group``."""
    return given.axis if isinstance(given, Sequence) else Axis.of(group)


def read_on_axis(operation: str, group: Any, given: Any, reading: Callable[[Axis], T | Exception]) -> tuple[Axis, T]:
    """That axis, and what ``reading`` makes of the arguments. A fault is raised on all ranks."""
    axis = axis_of(group, given)
    found = read(operation, axis.rank, lambda: reading(axis))
    if isinstance(found, Exception):
        axis.refuse(operation, found, metadata=None if isinstance(given, Sequence) else 1)
    return axis, found


def read_where(operation: str, layout: str | None, cu_seqlens: Any, rank: int) -> tuple[str, Bounds | None] | Exception:
    """(layout, documents), or what is wrong with them."""
    bounds = read_bounds(operation, cu_seqlens, rank)
    if isinstance(bounds, Exception):
        return bounds
    if layout is None:
        return "contiguous", bounds
    return find_layout_fault(operation, layout, rank) or (the_choice(layout, LAYOUTS), bounds)


def read_sequence(
    operation: str, rank: int, length: int | None, layout: str | None, cu_seqlens: Any, group: Any, given: Any
) -> tuple[str, Bounds | None] | Exception:
    """(layout, documents) of an operation that takes either ``sequence`` or the three it stands for; or a fault."""
    if given is None:
        return read_where(operation, layout, cu_seqlens, rank)
    if not isinstance(given, Sequence):
        kind = type(given).__name__
        return TypeError(f"{operation}: sequence must be what weft.sequence(...) returns, got {kind} (rank {rank})")
    for name, value in (("layout", layout), ("cu_seqlens", cu_seqlens), ("group", group)):
        if value is not None:
            return ValueError(f"{operation}: {name} is part of sequence; leave it out (rank {rank})")
    if length is not None and length != given.length:
        return ValueError(
            f"{operation}: this rank holds {length} tokens, but {given.length} in sequence (rank {rank}); make a "
            f"sequence for each batch"
        )
    return given.layout, given.bounds


def read_tokens(
    operation: str, rank: int, q: Any, k: Any, v: Any, letter: str, kinds: str,
    layout: str | None, cu_seqlens: Any, group: Any, given: Any,
) -> tuple[str, Bounds | None] | Exception:  # fmt: skip
    """(layout, documents) of an operation on ``q``, ``k`` and ``v`` ``[B, tokens, heads, dim]``; or a fault.

    What every attention demands: one kind, dtype and device, one batch and length, and for packed documents a batch
    of 1. ``letter`` and ``kinds``: how the operation names its tokens and the tensors it takes.
    """
    if fault := find_tensor_fault(operation, "q", q, rank, DTYPES, kinds):
        return fault
    length = q.shape[1] if q.ndim == 4 else None
    found = read_sequence(operation, rank, length, layout, cu_seqlens, group, given)
    if isinstance(found, Exception):
        return found
    where, tensors = f"(rank {rank})", {"q": q, "k": k, "v": v}
    for name, tensor in tensors.items():
        if fault := find_tensor_fault(operation, name, tensor, rank, DTYPES, kinds):
            return fault
        if tensor.ndim != 4:
            shown = list(tensor.shape)
            return ValueError(f"{operation}: {name} must be [B, {letter}, heads, dim], got {shown} {where}")
    for name, tensor in tensors.items():
        if tensor.device != q.device:
            return ValueError(f"{operation}: {name} is on {tensor.device}, q on {q.device} {where}")
    if k.dtype != q.dtype or v.dtype != q.dtype:
        return ValueError(f"{operation}: q, k and v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype} {where}")
    for name, tensor in tensors.items():
        if tensor.shape[:2] != q.shape[:2]:
            return ValueError(
                f"{operation}: {name} {list(tensor.shape)} must have the batch and length of q {list(q.shape)} {where}"
            )
    if found[1] is not None and q.shape[0] != 1:
        return ValueError(f"{operation}: packed sequences (cu_seqlens) need a batch of 1, got {q.shape[0]} {where}")
    return found
