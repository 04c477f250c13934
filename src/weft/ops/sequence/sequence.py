"""`sequence`: how a batch's tokens lie on the ranks, found out once for each batch and shared by every layer."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from weft.comm import Axis, Call
from weft.comm.arguments import find_integer_fault, read, show, the_choice
from weft.comm.function import eager
from weft.ops.sequence.layout import LAYOUTS, TokenRun, find_layout_fault, lay_out, shard_lengths
from weft.parallel.dtensor import is_dtensor

Bounds = tuple[int, ...]  # of packed documents in the whole sequence: document n is bounds[n] : bounds[n+1]


@dataclass(frozen=True, eq=False)
class Sequence:
    """Where the tokens of one batch lie: made by `weft.sequence`, passed to every layer as ``sequence=``.

    lengths: tokens of each rank of ``axis``. bounds: where packed documents begin and end, None for one document.
    """

    axis: Axis
    layout: str
    lengths: tuple[int, ...]
    bounds: Bounds | None

    @property
    def length(self) -> int:
        """Tokens of this rank."""
        return self.lengths[self.axis.rank]

    @property
    def total(self) -> int:
        """Tokens of the whole sequence."""
        return sum(self.lengths)

    @property
    def runs(self) -> list[TokenRun]:
        """Consecutive tokens on one rank, in the order of the whole sequence."""
        return lay_out(self.lengths, self.layout)

    def positions(self, device: torch.device | str = "cpu") -> Tensor:
        """The position of each of this rank's tokens within its document, ``[length]``: for rotary embeddings.

        >>> sequence(5, cu_seqlens=[0, 2, 5]).positions()
        tensor([0, 1, 0, 1, 2])
        """
        mine = [torch.arange(run.offset, run.offset + run.length) for run in self.runs if run.rank == self.axis.rank]
        places = torch.cat(mine)
        if self.bounds is not None:
            starts = torch.tensor(self.bounds[:-1], dtype=torch.int64)
            places -= starts[torch.searchsorted(starts, places, right=True) - 1]
        return places.to(device)


@eager
def sequence(
    local_length: int | None = None,
    *,
    total: int | None = None,
    layout: str | None = None,
    cu_seqlens: Any = None,
    group: Any = None,
) -> Sequence:
    """How a batch lies on the ranks of ``group``, for ``sequence=`` of every layer, in place of these arguments.

    ``local_length`` is how many tokens this rank holds (any number, ranks may differ). Or ``total``, how many all ranks
    hold together: each then holds what `weft.shard` gives it. ``layout`` "contiguous" (if left out) or "zigzag";
    ``cu_seqlens`` the boundaries ``[N+1]`` of packed documents in the whole sequence, on every rank.

    What crosses ranks: one round of integers, once for each batch. Layers that get it send none.

    >>> sequence(10).lengths, sequence(total=10).lengths
    ((10,), (10,))
    """
    axis = Axis.of(group)
    made = read("sequence", axis.rank, lambda: _read(axis, local_length, total, layout, cu_seqlens))
    if isinstance(made, Exception):
        axis.refuse("sequence", made, metadata=1)
    options, length = made
    call = axis.begin("sequence", options, metadata=(length,))
    return resolve("sequence", call, axis, options.layout, options.cu_seqlens)


def _read(
    axis: Axis, local_length: int | None, total: int | None, layout: str | None, cu_seqlens: Any
) -> tuple[_Options, int] | Exception:
    """What the ranks must have in common, and this rank's length; or what is wrong."""
    name, rank = "sequence", axis.rank
    where = read_where(name, layout, cu_seqlens, rank)
    if isinstance(where, Exception):
        return where
    if (local_length is None) == (total is None):
        return ValueError(
            f"{name}: give local_length, the tokens of this rank, or total, those of all ranks, and not both "
            f"(rank {rank})"
        )
    word, given = ("local_length", local_length) if total is None else ("total", total)
    if fault := find_integer_fault(name, word, given, rank, least=0):
        return fault
    if total is None:
        return _Options(*where, None), int(given)  # type: ignore[arg-type]
    return _Options(*where, int(total)), shard_lengths(int(total), where[0], axis.size)[rank]


@dataclass(frozen=True)
class _Options:
    """What the ranks must have in common."""

    layout: str
    cu_seqlens: Bounds | None
    total: int | None


def resolve(operation: str, call: Call, axis: Axis, layout: str, bounds: Bounds | None) -> Sequence:
    """The sequence, from the lengths the ranks told in ``call``; everybody raises where documents do not fit."""
    lengths = tuple(told[0] for told in call.metadata.wait())
    if bounds is not None and sum(lengths) != bounds[-1]:
        raise ValueError(
            f"{operation}: cu_seqlens end at {bounds[-1]}, but the ranks hold {list(lengths)}, {sum(lengths)} tokens "
            f"in all; they must be the boundaries in the whole sequence"
        )
    axis.counter.cache["sequence", layout] = lengths
    return Sequence(axis, layout, lengths, bounds)


def guess(axis: Axis, length: int, layout: str, bounds: Bounds | None) -> Sequence | None:
    """How the tokens probably lie, before the ranks have told: as the last time, or as `weft.shard` would cut them.

    For local work that may begin at once and is done again if the guess was wrong; nothing is sent because of it.
    """
    total = None if bounds is None else bounds[-1]
    candidates = [axis.counter.cache.get(("sequence", layout))]
    candidates.append(shard_lengths(total, layout, axis.size) if total is not None else (length,) * axis.size)
    for lengths in candidates:
        if lengths is not None and lengths[axis.rank] == length and (total is None or sum(lengths) == total):
            return Sequence(axis, layout, lengths, bounds)
    return None


def read_bounds(operation: str, cu_seqlens: Any, rank: int) -> Bounds | Exception | None:
    """The boundaries as integers, or what is wrong with them."""
    if cu_seqlens is None:
        return None
    if is_dtensor(cu_seqlens):
        return TypeError(f"{operation}: cu_seqlens is a DTensor; pass the whole, on every rank (rank {rank})")
    given = read(operation, rank, lambda: torch.as_tensor(cu_seqlens))
    if isinstance(given, Exception) or given.is_meta or given.dtype.is_floating_point or given.dtype == torch.bool:
        return TypeError(f"{operation}: cu_seqlens must be integers, got {show(cu_seqlens)} (rank {rank})")
    bounds = tuple(given.reshape(-1).tolist())
    if len(bounds) > 1 and bounds[0] == 0 and all(a <= b for a, b in pairwise(bounds)):
        return bounds
    return ValueError(
        f"{operation}: cu_seqlens must be integers that rise from 0, got {list(bounds[:8])} (rank {rank})"
    )


def read_where(operation: str, layout: str | None, cu_seqlens: Any, rank: int) -> tuple[str, Bounds | None] | Exception:
    """(layout, documents), or what is wrong with them."""
    bounds = read_bounds(operation, cu_seqlens, rank)
    if isinstance(bounds, Exception):
        return bounds
    if layout is None:
        return "contiguous", bounds
    return find_layout_fault(operation, layout, rank) or (the_choice(layout, LAYOUTS), bounds)


def document_at(bounds: Bounds, position: int) -> tuple[int, int]:
    """Where the document of a position begins and ends."""
    number = bisect_right(bounds, position) - 1
    return bounds[number], bounds[number + 1]


def axis_of(operation: str, group: Any, given: Any) -> Axis:
    """The axis of an operation that takes either ``sequence`` or a ``group``."""
    return given.axis if isinstance(given, Sequence) else Axis.of(group)


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
