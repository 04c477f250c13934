"""Runs: stretches of consecutive tokens on one rank; and those of dealt chunks."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from weft.ops.sequence.deal import Bounds, CountedMask, Deal, deal_chunks


class TokenRun(NamedTuple):
    """Tokens ``start : start + length`` of rank ``rank``'s slice, at ``offset`` in the whole sequence."""

    rank: int
    start: int
    length: int
    offset: int


Runs = tuple[TokenRun, ...]  # of all ranks, in the order of the sequence


@lru_cache(maxsize=64)
def deal_runs(
    total: int, size: int, chunks_per_rank: int | None, documents: tuple[Bounds, ...], mask: CountedMask | None
) -> Runs:
    """The runs of the chunks that `deal_chunks` deals."""
    return join_chunks(deal_chunks(total, size, chunks_per_rank, documents, mask), size)


def join_chunks(deal: Deal, size: int) -> Runs:
    """The runs of dealt chunks."""
    return join_pieces(zip(deal.ranks, (stop - start for start, stop in pairwise(deal.cuts)), strict=True), size)


def join_pieces(pieces: Iterable[tuple[int, int]], size: int) -> Runs:
    """The runs of (rank, length), in the order of the sequence: those of a rank that meet are one."""
    held, offset = [0] * size, 0
    runs: list[TokenRun] = []
    for rank, length in pieces:
        if runs and runs[-1].rank == rank:
            runs[-1] = runs[-1]._replace(length=runs[-1].length + length)
        else:
            runs.append(TokenRun(rank, held[rank], length, offset))
        held[rank] += length
        offset += length
    return tuple(runs)


def lengths_of(runs: Runs, size: int) -> tuple[int, ...]:
    """The tokens of each rank."""
    lengths = [0] * size
    for run in runs:
        lengths[run.rank] += run.length
    return tuple(lengths)
