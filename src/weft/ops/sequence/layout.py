"""How a sequence lies on the ranks of an axis.

A *run* is a stretch of consecutive tokens on one rank. ``contiguous``: rank r holds the r-th of P parts, one run.
``zigzag``: rank r holds parts r and 2P-1-r of 2P, two runs one after the other in local memory (on the last
rank they meet and are one), which balances causal attention. Parts are as equal as can be, earlier ones
longer by a token; so of T zigzag tokens the first run has T - T//2 whatever T is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from weft.comm.arguments import find_choice_fault

LAYOUTS = ("contiguous", "zigzag")


@dataclass(frozen=True)
class TokenRun:
    """Tokens ``start : start + length`` of rank ``rank``'s slice, at ``offset`` in the whole sequence."""

    rank: int
    start: int
    length: int
    offset: int


def find_layout_fault(operation: str, layout: object, rank: int) -> Exception | None:
    """The error for a layout nobody knows."""
    return find_choice_fault(operation, "layout", layout, rank, LAYOUTS)


def ranks_of_runs(layout: str, size: int) -> list[int]:
    """The rank of each run, in the order of the sequence."""
    ranks = list(range(size))
    return ranks if layout == "contiguous" else ranks + ranks[-2::-1]


def run_lengths(length: int, layout: str, rank: int, size: int) -> list[int]:
    """How a rank's ``length`` tokens are cut into its runs."""
    if layout == "contiguous" or rank == size - 1:
        return [length]
    return [length - length // 2, length // 2]


def shard_lengths(total: int, layout: str, size: int) -> tuple[int, ...]:
    """The tokens of each rank when `weft.shard` cuts ``total``."""
    if layout == "contiguous":
        return tuple(_part(total, size, rank) for rank in range(size))
    return tuple(_part(total, 2 * size, rank) + _part(total, 2 * size, 2 * size - 1 - rank) for rank in range(size))


def _part(total: int, parts: int, index: int) -> int:
    return total // parts + (index < total % parts)


def lay_out(lengths: Sequence[int], layout: str) -> list[TokenRun]:
    """The runs of all ranks in the order of the sequence, for ranks that hold these many tokens."""
    return list(_lay_out(tuple(lengths), layout))


@lru_cache(maxsize=64)
def _lay_out(lengths: tuple[int, ...], layout: str) -> tuple[TokenRun, ...]:
    size = len(lengths)
    cuts = [run_lengths(length, layout, rank, size) for rank, length in enumerate(lengths)]
    seen = [0] * size
    runs: list[TokenRun] = []
    offset = 0
    for rank in ranks_of_runs(layout, size):
        number, seen[rank] = seen[rank], seen[rank] + 1
        start, length = sum(cuts[rank][:number]), cuts[rank][number]
        runs.append(TokenRun(rank, start, length, offset))
        offset += length
    return tuple(runs)
