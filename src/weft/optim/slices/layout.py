"""Parameters in buckets, and buckets in flat slices of equal size, one for each rank, whatever the shapes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.comm import Axis
from weft.comm.call import exchange_coalesced

Range = tuple[int, int]  # of a flattened tensor: start, stop


@dataclass(frozen=True)
class SliceOptions:
    """What the ranks must have in common when they trade ranges."""

    tensors: int


def fill_buckets(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Indices of neighbours whose sizes are together at most ``most``; what is larger stands alone.

    >>> fill_buckets([3, 3, 9, 1], 6)
    [[0, 1], [2], [3]]
    """
    buckets: list[list[int]] = []
    room = 0
    for index, size in enumerate(sizes):
        if not buckets or size > room:
            buckets.append([])
            room = most
        buckets[-1].append(index)
        room -= size
    return buckets


def cut_bucket(lengths: Sequence[int], ranks: int) -> list[list[Range]]:
    """For each tensor of a bucket, of ``lengths`` elements, the range that each rank owns.

    The tensors stand one after the other, and rank r owns the r-th slice of all of them.

    >>> cut_bucket([5, 3], 2)
    [[(0, 4), (4, 5)], [(0, 0), (0, 3)]]
    """
    each = -(-sum(lengths) // ranks)
    ranges, start = [], 0
    for length in lengths:
        bounds = [min(max(0, rank * each - start), length) for rank in range(ranks + 1)]
        ranges.append(list(itertools.pairwise(bounds)))
        start += length
    return ranges


def row_ranges(shape: torch.Size | tuple[int, ...], ranks: int) -> list[Range]:
    """The range of each rank when rows are cut as torch cuts them: ceil(rows / ranks) as far as they go."""
    rows, length = (shape[0], torch.Size(shape[1:]).numel()) if shape else (1, 1)
    each = -(-rows // ranks)
    bounds = [min(rank * each, rows) * length for rank in range(ranks + 1)]
    return list(itertools.pairwise(bounds))


def trade(
    axis: Axis, name: str, mine: Sequence[Tensor], before: Sequence[list[Range]], after: Sequence[list[Range]]
) -> list[Tensor]:
    """Of each tensor the range ``after[rank]`` of this rank, made of what the ranks hold: rank r has ``before[r]``.

    ``mine`` are this rank's ranges, flat. What is needed travels, in one exchange.
    """
    call = axis.begin(name, SliceOptions(len(mine)))
    sends: dict[int, list[Tensor]] = {rank: [] for rank in call.others}
    receives: dict[int, list[Tensor]] = {rank: [] for rank in call.others}
    found = []
    for tensor, held, wanted in zip(mine, before, after, strict=True):
        start, stop = wanted[axis.rank]
        own = held[axis.rank][0]
        out = tensor.new_empty(stop - start)
        for rank in range(axis.size):
            low, high = _overlap(held[rank], wanted[axis.rank])
            if rank == axis.rank:
                out[low - start : high - start] = tensor[low - own : high - own]
            elif low < high:
                receives[rank].append(out[low - start : high - start])
            low, high = _overlap(held[axis.rank], wanted[rank])
            if rank != axis.rank and low < high:
                sends[rank].append(tensor[low - own : high - own])
        found.append(out)
    parcels = ([(rank, some) for rank, some in side.items() if some] for side in (sends, receives))
    exchange_coalesced(call, *parcels).wait()
    return found


def _overlap(one: Range, other: Range) -> Range:
    low = max(one[0], other[0])
    return low, max(low, min(one[1], other[1]))


def flat_of(tensor: Tensor | None) -> Tensor:
    """All elements in a row: in the same memory if that is contiguous."""
    assert tensor is not None
    return tensor.detach().reshape(-1)


def write_range(parameter: Tensor, where: Range, values: Tensor) -> None:
    """Put values into a range of a flattened parameter, however it lies in memory."""
    flat = flat_of(parameter)
    flat[slice(*where)] = values
    if not parameter.is_contiguous():
        parameter.copy_(flat.view(parameter.shape))
