"""Chunks of a sequence dealt to ranks, so that all have as many and, as nearly as can be, the same attention work.

The work of a chunk is the pairs of queries in it and keys that they see. Ways to deal, those of few runs, by which
fewer keys travel, first:

- `_in_order`: as contiguous.
- `_halve`: a stretch for one half of the ranks and what is around it for the other, and so on with each half. Of all
  stretches with half of the tokens one has half of the work, up to a chunk, so a rank needs about two runs.
- `_fold`: for each rank a stretch of heavy chunks, a stretch of light ones and one that makes up the mean.
- `_level`: the heaviest chunk left to the rank that needs work most.

After each, chunks of the busiest rank are swapped for lighter ones, and the first deal that is balanced is it. Nothing
is random or timed: every rank finds the same.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, pairwise
from math import isqrt
from typing import Protocol

Bounds = tuple[int, ...]  # of packed documents in the whole sequence: document n is bounds[n] : bounds[n+1]
FEWEST_CHUNKS, MOST_CHUNKS, CHUNKS = 8, 64, 4096  # of a rank, if nobody says how many; about so many of all ranks
TIMES = (1, 2, 4, 8)  # as many chunks, where one would be too much work
BALANCED = 1.015  # the busiest rank's work over the mean
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
    total: int, size: int, chunks_per_rank: int | None, documents: tuple[Bounds, ...], mask: CountedMask | None
) -> Deal:
    """``total`` tokens on ``size`` ranks, each with ``chunks_per_rank`` chunks whose lengths differ by at most a token.

    More chunks (`TIMES`) where one has so much work that no deal could be `BALANCED`; fewer where they would be shorter
    than their number, so that the ranks' lengths differ by at most a chunk. ``documents``: boundaries for each row of
    a batch, none for one document. Without a ``mask`` tokens see those before them in their document.
    """
    wanted = chunks_per_rank or min(max(CHUNKS // size, FEWEST_CHUNKS), MOST_CHUNKS)
    limit = isqrt(total // size) if size > 1 else 1
    counts = sorted({max(1, min(wanted * times, limit)) for times in TIMES})
    best: Deal | None = None
    for count in counts:
        each, longer = divmod(total, size * count)
        cuts = tuple(each * number + min(number, longer) for number in range(size * count + 1))
        works = count_pairs(cuts, documents or ((0, total),)) if mask is None else mask.count(cuts)
        heaviest = max(works) + sum(sorted(works)[: count - 1])  # the least that somebody has
        if heaviest * size > BALANCED * sum(works) and count < counts[-1]:
            continue
        deal = _deal_works(cuts, works, size)
        if best is None or deal.busiest < best.busiest:
            best = deal
        if best.busiest <= BALANCED:
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
    """The first `BALANCED` deal, or the best."""
    total = sum(works)
    best: Deal | None = None
    for deal in (_in_order, _halve, _fold, _level):
        ranks = deal(works, size)
        busiest = _swap(works, ranks, size) * size / total if total else 1.0
        if best is None or busiest < best.busiest:
            best = Deal(cuts, tuple(ranks), busiest)
        if busiest <= BALANCED:
            break
    assert best is not None
    return best


def _in_order(works: list[int], size: int) -> list[int]:
    """Rank after rank gets the next chunks."""
    count = len(works) // size
    return [chunk // count for chunk in range(len(works))]


def _halve(works: list[int], size: int) -> list[int]:
    """The stretch whose work is nearest to its share goes to one half of the ranks, the rest to the other."""
    count, ranks = len(works) // size, [0] * len(works)
    parts = [(list(range(len(works))), 0, size)]  # chunks, and the ranks that get them: the first, how many
    while parts:
        chunks, first, number = parts.pop()
        if number == 1:
            for chunk in chunks:
                ranks[chunk] = first
            continue
        half = number // 2
        width, wanted = half * count, sum(works[chunk] for chunk in chunks) * half
        ring = chunks + chunks[:width]
        work = sum(works[chunk] for chunk in ring[:width])
        nearest, start = abs(work * number - wanted), 0
        for at in range(1, len(chunks)):
            work += works[ring[at + width - 1]] - works[ring[at - 1]]
            if abs(work * number - wanted) < nearest:
                nearest, start = abs(work * number - wanted), at
        before, after = max(start + width - len(chunks), 0), start + width
        parts.append((chunks[:before] + chunks[start:after], first, half))
        parts.append((chunks[before:start] + chunks[after:], first + half, number - half))
    return ranks


def _fold(works: list[int], size: int) -> list[int]:
    """Rank after rank gets chunks from the heavy end, others from the light end, and one that makes up the mean.

    Works within a power of two are alike, so that neighbours stay together.
    """
    count, rest = len(works) // size, sum(works)
    order = sorted(range(len(works)), key=lambda chunk: (-works[chunk].bit_length(), -chunk))
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
    """Swap chunks of the busiest rank with lighter ones until it is `BALANCED` or nothing helps; what it has then."""
    loads = [0] * size
    hands: list[list[int]] = [[] for _ in range(size)]
    for chunk, rank in enumerate(ranks):
        loads[rank] += works[chunk]
        hands[rank].append(chunk)
    least = [(load, rank) for rank, load in enumerate(loads)]
    most = [(-load, rank) for load, rank in least]
    heapq.heapify(least)
    heapq.heapify(most)
    enough = BALANCED * sum(loads) / size
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
