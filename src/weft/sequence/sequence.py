"""`sequence`: how a batch's tokens lie on the ranks, found out once for each batch and shared by every layer."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from weft.comm import Axis, Call
from weft.comm.eager import eager
from weft.sequence.layout import TokenRun, find_layout_fault, lay_out, shard_lengths

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
def sequence(length: int, *, layout: str | None = None, cu_seqlens: Any = None, group: Any = None) -> Sequence:
    """How a batch lies on the ranks of ``group``, for ``sequence=`` of every layer, in place of these arguments.

    ``length`` is how many tokens this rank holds (any number, ranks may differ); ``layout`` "contiguous" (if left out)
    or "zigzag"; ``cu_seqlens`` the boundaries ``[N+1]`` of packed documents in the whole sequence, on every rank.

    What crosses ranks: one round of integers, once for each batch. Layers that get it send none.

    >>> sequence(10).lengths
    (10,)
    """
    axis = Axis.of(group)
    bounds, fault = read_bounds("sequence", cu_seqlens, axis.rank)
    layout = "contiguous" if layout is None else layout
    if fault is None and (isinstance(length, bool) or not isinstance(length, int)):
        fault = TypeError(f"sequence: length must be an integer, got {type(length).__name__} (rank {axis.rank})")
    elif fault is None and length < 0:
        fault = ValueError(f"sequence: length must not be negative, got {length} (rank {axis.rank})")
    fault = fault or find_layout_fault("sequence", layout, axis.rank)
    options, tell = (None, (0,)) if fault else (_Options(layout, bounds), (length,))
    call = axis.begin("sequence", options, tell=tell, fault=fault)
    return settle("sequence", call, axis, layout, bounds)


@dataclass(frozen=True)
class _Options:
    """What the ranks must have in common."""

    layout: str
    cu_seqlens: Bounds | None


def settle(operation: str, call: Call, axis: Axis, layout: str, bounds: Bounds | None) -> Sequence:
    """The sequence, from the lengths the ranks told in ``call``; everybody raises where documents do not fit."""
    lengths = tuple(told[0] for told in call.told.wait())
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


def read_bounds(operation: str, cu_seqlens: Any, rank: int) -> tuple[Bounds | None, Exception | None]:
    """The boundaries as integers, and what is wrong with them."""
    if cu_seqlens is None:
        return None, None
    bounds = tuple(torch.as_tensor(cu_seqlens).reshape(-1).tolist())
    rising = len(bounds) > 1 and bounds[0] == 0 and all(a <= b for a, b in pairwise(bounds))
    if rising and all(isinstance(bound, int) for bound in bounds):
        return bounds, None
    return None, ValueError(
        f"{operation}: cu_seqlens must be integers that rise from 0, got {list(bounds[:8])} (rank {rank})"
    )


def document_at(bounds: Bounds, position: int) -> tuple[int, int]:
    """Where the document of a position begins and ends."""
    number = bisect_right(bounds, position) - 1
    return bounds[number], bounds[number + 1]


def read_sequence(
    operation: str, length: int | None, layout: str | None, cu_seqlens: Any, group: Any, given: Sequence | None
) -> tuple[Axis, str, Bounds | None, Exception | None]:
    """(axis, layout, documents, fault) of an operation that takes either ``sequence`` or the three it stands for."""
    if given is None:
        axis = Axis.of(group)
        bounds, fault = read_bounds(operation, cu_seqlens, axis.rank)
        layout = "contiguous" if layout is None else layout
        return axis, layout, bounds, fault or find_layout_fault(operation, layout, axis.rank)
    if not isinstance(given, Sequence):
        axis, kind = Axis.of(group), type(given).__name__
        words = f"{operation}: sequence must be what weft.sequence(...) returns, got {kind} (rank {axis.rank})"
        return axis, "contiguous", None, TypeError(words)
    axis = given.axis
    where = f"(rank {axis.rank})"
    fault = None
    for name, value in (("layout", layout), ("cu_seqlens", cu_seqlens), ("group", group)):
        if value is not None:
            fault = ValueError(f"{operation}: {name} is part of sequence; leave it out {where}")
    if fault is None and length is not None and length != given.length:
        fault = ValueError(
            f"{operation}: this rank holds {length} tokens, but {given.length} in sequence {where}; make a sequence "
            f"for each batch"
        )
    return axis, given.layout, given.bounds, fault
