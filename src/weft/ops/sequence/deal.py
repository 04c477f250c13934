"""Chunks of a sequence dealt to ranks, so that all have as many and, as nearly as can be, the same attention work.

The work of a chunk is the pairs of queries in it and keys that they see. Ways to deal, those by which fewer keys travel
first: `_in_order`, as contiguous; `_fold`, a stretch of heavy chunks and a stretch of light ones for each rank;
`_level`, the heaviest chunk left to the rank that needs work most. After each, chunks of the busiest rank are swapped
for lighter ones, and the first deal that is balanced is it. Nothing is random or timed: every rank finds the same.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, pairwise
from math import isqrt
from typing import Protocol

Bounds = tuple[int, ...]  # of packed documents in the whole sequence: document n is bounds[n] : bounds[n+1]
CHUNKS_PER_RANK = 8  # where nobody says how many
TIMES = (1, 2, 4, 8)  # as many chunks, where one would be too much work
GOOD, FAIR = 1.01, 1.02  # the busiest rank's work over the mean: a deal to keep; one that more chunks need not better
SWAPS, PARTNERS = 1, 8  # at most so many swaps for each rank, and ranks that are asked for one
TIDY = 32  # ranks after which what has been dealt is taken off the order


class CountedMask(Hashable, Protocol):
    """Who sees whom in a sequence of ``total`` tokens, as far as it is counted here."""

    @property
    def total(self) -> int: ...

    def count(self, cuts: Sequence[int], /) -> list[int]:
        """The pairs that the queries between consecutive cuts see."""
        ...


@dataclass(frozen=True)
class Deal:
    """Chunk n, tokens ``cuts[n] : cuts[n+1]``, is on rank ``ranks[n]``; the busiest rank has ``busiest`` mean works."""

    cuts: tuple[int, ...]
    ranks: tuple[int, ...]
    busiest: float


@lru_cache(maxsize=64)
def deal_chunks(
    total: int, size: int, chunks_per_rank: int, documents: tuple[Bounds, ...], mask: CountedMask | None
) -> Deal:
    """``total`` tokens on ``size`` ranks, each with ``chunks_per_rank`` chunks whose lengths differ by at most a token.

    More chunks (`TIMES`) where one has so much work that the busiest rank would not be `FAIR`; fewer where they would
    be shorter than their number, so that the ranks' lengths differ by at most a chunk. ``documents``: boundaries for
    each row of a batch, none for one document. Without a ``mask`` tokens see those before them in their document.
    """
    limit = isqrt(total // size) if size > 1 else 1
    counts = sorted({max(1, min(chunks_per_rank * times, limit)) for times in TIMES})
    best: Deal | None = None
    for count in counts:
        each, longer = divmod(total, size * count)
        cuts = tuple(each * number + min(number, longer) for number in range(size * count + 1))
        works = count_pairs(cuts, documents or ((0, total),)) if mask is None else mask.count(cuts)
        heaviest = max(works) + sum(sorted(works)[: count - 1])  # the least that somebody has
        if heaviest * size > FAIR * sum(works) and count < counts[-1]:
            continue
        deal = _deal_works(cuts, works, size)
        if best is None or deal.busiest < best.busiest:
            best = deal
        if best.busiest <= FAIR:
            break
    assert best is not None, "the last count is always dealt"
    return best


def count_pairs(cuts: Sequence[int], documents: tuple[Bounds, ...]) -> list[int]:
    """The pairs between consecutive cuts where tokens see those before them in their document, summed over rows."""
    works = [0] * (len(cuts) - 1)
    for bounds in documents:
        document = 0
        for number, (at, stop) in enumerate(pairwise(cuts)):
            while at < stop:
                while bounds[document + 1] <= at:
                    document += 1
                begin, end = bounds[document], min(stop, bounds[document + 1])
                works[number] += (end - at) * (at + end + 1 - 2 * begin) // 2
                at = end
    return works


def _deal_works(cuts: tuple[int, ...], works: list[int], size: int) -> Deal:
    """The first `GOOD` deal, or the best."""
    total = sum(works)
    best: Deal | None = None
    for deal in (_in_order, _fold_coarsely, _fold_finely, _level):
        ranks = deal(works, size)
        busiest = _swap(works, ranks, size) * size / total if total else 1.0
        if best is None or busiest < best.busiest:
            best = Deal(cuts, tuple(ranks), busiest)
        if busiest <= GOOD:
            break
    assert best is not None
    return best


def _in_order(works: list[int], size: int) -> list[int]:
    """Rank after rank gets the next chunks."""
    count = len(works) // size
    return [chunk // count for chunk in range(len(works))]


def _fold_coarsely(works: list[int], size: int) -> list[int]:
    """Chunks whose works are within a power of two are alike, and stay in the order of the sequence."""
    return _fold(works, size, lambda work: work.bit_length())


def _fold_finely(works: list[int], size: int) -> list[int]:
    """The same with twice as many kinds."""
    return _fold(works, size, lambda work: (work * work).bit_length())


def _fold(works: list[int], size: int, kind: Callable[[int], int]) -> list[int]:
    """Rank after rank gets chunks from the heavy end, others from the light end, and one that makes up the mean."""
    count, rest = len(works) // size, sum(works)
    order = sorted(range(len(works)), key=lambda chunk: (-kind(works[chunk]), -chunk))
    left = sorted((work, chunk) for chunk, work in enumerate(works))
    ranks = [-1] * len(works)
    for rank in range(size):
        order = [chunk for chunk in order if ranks[chunk] < 0] if rank % TIDY == 0 else order
        heavy = (chunk for chunk in order if ranks[chunk] < 0)
        light = list(islice((chunk for chunk in reversed(order) if ranks[chunk] < 0), count))[::-1]
        mean, work = rest // (size - rank), sum(works[chunk] for chunk in light)
        hand = light
        for number in range(count):
            chunk = next(heavy)
            if work + works[chunk] - works[light[number]] > mean:
                others = {*hand[:number], *hand[number + 1 :]}
                fitting = _nearest(left, mean - work + works[light[number]], others)
                hand[number], work = fitting, work + works[fitting] - works[light[number]]
                break
            work += works[chunk] - works[light[number]]
            hand[number] = chunk
        rest -= sum(works[chunk] for chunk in hand)
        for chunk in hand:
            ranks[chunk] = rank
            del left[bisect_left(left, (works[chunk], chunk))]
    return ranks


def _nearest(left: list[tuple[int, int]], wanted: int, others: set[int]) -> int:
    """Of what is left, and not among ``others``, the chunk whose work is nearest to what is wanted."""
    at = bisect_left(left, (wanted, 0))
    above = next((one for one in islice(left, at, None) if one[1] not in others), None)
    below = next((left[k] for k in range(at - 1, -1, -1) if left[k][1] not in others), None)
    if above is None or (below is not None and wanted - below[0] <= above[0] - wanted):
        assert below is not None
        return below[1]
    return above[1]


def _level(works: list[int], size: int) -> list[int]:
    """The heaviest chunk left goes to the rank that lacks most work for each chunk it still gets."""
    count, total = len(works) // size, sum(works)
    ranks, slots = [0] * len(works), [count] * size
    lacking = [total] * size  # times the number of ranks
    heap = [(-total / count, rank) for rank in range(size)]
    for chunk in sorted(range(len(works)), key=lambda chunk: (-works[chunk], chunk)):
        _, rank = heapq.heappop(heap)
        ranks[chunk] = rank
        lacking[rank] -= works[chunk] * size
        slots[rank] -= 1
        if slots[rank]:
            heapq.heappush(heap, (-lacking[rank] / slots[rank], rank))
    return ranks


def _swap(works: list[int], ranks: list[int], size: int) -> int:
    """Swap chunks of the busiest rank with lighter ones, until it is `GOOD` or nothing helps; the work that it has."""
    loads = [0] * size
    hands: list[list[int]] = [[] for _ in range(size)]
    for chunk, rank in enumerate(ranks):
        loads[rank] += works[chunk]
        hands[rank].append(chunk)
    least = [(load, rank) for rank, load in enumerate(loads)]
    most = [(-load, rank) for load, rank in least]
    heapq.heapify(least)
    heapq.heapify(most)
    enough = GOOD * sum(loads) / size
    for _ in range(SWAPS * size):
        while -most[0][0] != loads[most[0][1]]:  # what it had before a swap
            heapq.heappop(most)
        busy = most[0][1]
        if loads[busy] <= enough:
            break
        asked: list[tuple[int, int]] = []
        swap = None
        while swap is None and least and len(asked) < PARTNERS:
            load, idle = heapq.heappop(least)
            if load == loads[idle]:
                asked.append((load, idle))
                swap = _best_swap(works, hands[busy], hands[idle], loads[busy] - load)
        for one in asked:
            heapq.heappush(least, one)
        if swap is None:
            break
        mine, other = swap
        change = works[mine] - works[other]
        ranks[mine], ranks[other] = idle, busy
        for rank, given, got, more in ((busy, mine, other, -change), (idle, other, mine, change)):
            hands[rank][hands[rank].index(given)] = got
            loads[rank] += more
            heapq.heappush(least, (loads[rank], rank))
            heapq.heappush(most, (-loads[rank], rank))
    return max(loads)


def _best_swap(works: list[int], busy: list[int], idle: list[int], gap: int) -> tuple[int, int] | None:
    """The chunks of two ranks whose swap leaves the smallest difference of ``gap``; None if a tenth of it stays."""
    least, found = gap - gap // 10, None
    for mine in busy:
        for other in idle:
            stays = abs(gap - 2 * (works[mine] - works[other]))
            if stays < least:
                least, found = stays, (mine, other)
    return found
