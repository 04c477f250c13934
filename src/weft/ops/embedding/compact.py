"""Sorted unique numbers and sums over duplicates: what every exchange of rows begins with."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

_BLOCK = 1 << 19  # elements of a wide block


@dataclass(frozen=True)
class Compact:
    """The different ones of some numbers ``[T]``, and where each of them stood.

    unique: ``[U]``, rising. inverse: ``[T]``, places in ``unique``. order: ``[T]``, positions by number, then by
    position. starts: ``[U]``, where the positions of each number begin in ``order``.
    """

    unique: Tensor
    inverse: Tensor
    order: Tensor
    starts: Tensor


def compact(numbers: Tensor) -> Compact:
    """By a stable sort and a comparison of neighbours.

    >>> found = compact(torch.tensor([7, 3, 7]))
    >>> found.unique.tolist(), found.inverse.tolist(), found.order.tolist(), found.starts.tolist()
    ([3, 7], [1, 0, 1], [1, 0, 2], [0, 1])
    """
    ordered, order = torch.sort(numbers, stable=True)
    is_first = torch.ones_like(ordered, dtype=torch.bool)
    torch.ne(ordered[1:], ordered[:-1], out=is_first[1:])
    starts = is_first.nonzero().view(-1)
    inverse = torch.empty_like(order)
    inverse[order] = is_first.cumsum(0) - 1
    return Compact(ordered[starts], inverse, order, starts)


def segment_sum(rows: Tensor, found: Compact, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Rows ``[T, d]`` of equal numbers summed, in the order of position: ``[U, d]`` in ``dtype``, in ``out`` if given.

    Sums are made at least in fp32 and rounded once, to ``dtype``; always in the same order, so always the same bits.
    """
    if rows.dtype == dtype and out is None:  # a bag's sum over bf16 or fp16 rows is made in fp32 and rounded at its end
        if len(found.order) == len(found.starts):  # no duplicates
            return rows.index_select(0, found.order)
        return embedding_bag(found.order, rows, found.starts, mode="sum")
    sums = rows.new_empty(len(found.starts), rows.shape[1], dtype=dtype) if out is None else out
    step = max(1, _BLOCK // max(1, rows.shape[1]))
    cuts = [*found.starts[::step].tolist(), len(found.order)]
    for block, (start, end) in enumerate(pairwise(cuts)):  # block by block: wide copies of all rows would be large
        part = slice(block * step, (block + 1) * step)
        some = rows.index_select(0, found.order[start:end])
        if len(some) == len(sums[part]):
            sums[part] = some
        else:
            every = torch.arange(end - start, device=rows.device)
            sums[part] = embedding_bag(every, some.to(dtype), found.starts[part] - start, mode="sum")
    return sums
