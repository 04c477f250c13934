"""Pieces that tests of several operations share."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from worlds import virtual_world

import weft


def errors_of(program: Callable[[weft.Axis], object], size: int = 3) -> list[str]:
    """What a virtual world's ranks raised as ValueError, one message for each rank that did."""

    def run(axis: weft.Axis) -> str | None:
        try:
            program(axis)
        except ValueError as error:
            return str(error)
        return None

    return [words for words in virtual_world(size).run(run).results if words is not None]


def two_by_two(axis: weft.Axis, order: str) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """(data group, sequence group) of this rank in a 2 x 2 mesh of ranks 0..3, ``order`` "data first" or not.

    All ranks of the pool must call it; those outside get (None, None).
    """
    ranks = torch.arange(4).view(2, 2)
    ranks = ranks if order == "data first" else ranks.T.contiguous()
    found: list[dist.ProcessGroup | None] = [None, None]
    for index, rows in enumerate((ranks.T, ranks)):
        for row in rows.tolist():
            group = dist.new_group(row)
            if axis.rank in row:
                found[index] = group
    return found[0], found[1]
