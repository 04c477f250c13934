"""The runs of a layout. A *run* is a stretch of consecutive tokens on one rank.

| layout       | rank r holds                                                                | runs of a rank |
|--------------|-----------------------------------------------------------------------------|----------------|
| `contiguous` | the r-th of P parts                                                         | one            |
| `zigzag`     | parts r and 2P-1-r of 2P, which balances the work of one causal document    | two            |
| `balanced`   | the chunks that `deal_chunks` gives it, which balances that of any documents | a few         |

A rank's runs lie one after the other in its memory, in the order of the sequence; those that meet are one. Parts are as
equal as can be, earlier ones longer by a token; so of T zigzag tokens the first run has T - T//2 whatever T is.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from weft.ops.sequence.deal import Bounds, CountedMask, Deal, deal_chunks

ANY_LENGTHS = ("contiguous", "zigzag")  # ranks may hold any number of tokens, and their own number says their runs
LAYOUTS = (*ANY_LENGTHS, "balanced")


class TokenRun(NamedTuple):
    """Tokens ``start : start + length`` of rank ``rank``'s slice, at ``offset`` in the whole sequence."""

    rank: int
    start: int
    length: int
    offset: int


Runs = tuple[TokenRun, ...]  # of all ranks, in the order of the sequence


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


@lru_cache(maxsize=64)
def deal_runs(
    total: int, size: int, chunks_per_rank: int | None, documents: tuple[Bounds, ...], mask: CountedMask | None
) -> Runs:
    """The runs of the chunks that `deal_chunks` deals."""
    return join_chunks(deal_chunks(total, size, chunks_per_rank, documents, mask), size)


def join_chunks(deal: Deal, size: int) -> Runs:
    """The runs of dealt chunks: those of a rank that meet are one."""
    held = [0] * size
    runs: list[TokenRun] = []
    for rank, offset, stop in zip(deal.ranks, deal.cuts, deal.cuts[1:], strict=False):
        length = stop - offset
        if runs and runs[-1].rank == rank:
            runs[-1] = runs[-1]._replace(length=runs[-1].length + length)
        else:
            runs.append(TokenRun(rank, held[rank], length, offset))
        held[rank] += length
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


def lengths_of(runs: Runs, size: int) -> tuple[int, ...]:
    """The tokens of each rank."""
    lengths = [0] * size
    for run in runs:
        lengths[run.rank] += run.length
    return tuple(lengths)


def shard_lengths(total: int, layout: str, size: int, bounds: Bounds | None = None) -> tuple[int, ...]:
    """The tokens of each rank when `weft.shard` cuts ``total``."""
    return lengths_of(shard_runs(total, layout, size, bounds), size)
