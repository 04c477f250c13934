"""Chunks of a sequence dealt to ranks, so that all have as many and, as nearly as can be, the same attention work.

The work of a chunk is the pairs of queries in it and keys that they see. Ways to deal, those by which fewer keys travel
first:

- `_in_order`: as contiguous.
- `_by_stretch`: a long document to as few ranks as its work needs, in equal parts, and short ones to fill them up.
- `_halve`, if none is long: a stretch for one half of the ranks and what is around it for the other, and so on with
  each half. Of all stretches with half of the tokens one has half of the work, up to a chunk, so a rank needs about
  two runs.
- `_level`: the heaviest chunk left to the rank that needs work most.

Chunks of the busiest rank are then swapped for lighter ones, and the first deal that is balanced is it; chunks are cut
further before they are levelled. Nothing is random or timed: every rank finds the same.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, compress, islice, pairwise
from math import isqrt
from operator import not_
from typing import Protocol

Bounds = tuple[int, ...]  # of packed documents in the whole sequence: document n is bounds[n] : bounds[n+1]
FEWEST_CHUNKS, MOST_CHUNKS, CHUNKS = 8, 64, 4096  # of a rank, if nobody says how many; about so many of all ranks
TIMES = (1, 2, 4, 8)  # as many chunks, where fewer cannot be dealt evenly
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

    More chunks (`TIMES`) where so many cannot be dealt `BALANCED`; fewer where they would be shorter than their number,
    so that the ranks' lengths differ by at most a chunk. ``documents``: boundaries for each row of a batch, none for
    one document. Without a ``mask`` tokens see those before them in their document.
    """
    wanted = chunks_per_rank or min(max(CHUNKS // size, FEWEST_CHUNKS), MOST_CHUNKS)
    limit = isqrt(total // size) if size > 1 else 1
    counts = sorted({max(1, min(wanted * times, limit)) for times in TIMES})
    best: Deal | None = None
    for deal in _deals(total, size, counts, documents, mask):
        if best is None or deal.busiest < best.busiest:
            best = deal
        if best.busiest <= BALANCED:
            break
    assert best is not None
    return best


def _deals(
    total: int, size: int, counts: list[int], documents: tuple[Bounds, ...], mask: CountedMask | None
) -> Iterator[Deal]:
    """Deals of ``counts`` chunks for each rank, those by which fewer keys travel first."""
    cut: list[tuple[tuple[int, ...], list[int]]] = []
    for count in counts:
        each, longer = divmod(total, size * count)
        cuts = tuple(each * number + min(number, longer) for number in range(size * count + 1))
        works = count_pairs(cuts, documents or ((0, total),)) if mask is None else mask.count(cuts)
        heaviest = max(works) + sum(sorted(works)[: count - 1])  # the least that somebody has
        if heaviest * size > BALANCED * sum(works) and count < counts[-1]:
            continue
        cut.append((cuts, works))
        yield _score(cuts, works, _in_order(works, size), size)
        long, short = _find_stretches(works, size, each * each * max(1, len(documents)))
        yield _evened(cuts, works, _by_stretch(works, size, long, short) if long else _halve(works, size), size)
    for cuts, works in cut:
        yield _evened(cuts, works, _level(works, size), size)


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


def _evened(cuts: tuple[int, ...], works: list[int], ranks: list[int], size: int) -> Deal:
    """The deal after some swaps."""
    _swap(works, ranks, size)
    return _score(cuts, works, ranks, size)


def _score(cuts: tuple[int, ...], works: list[int], ranks: list[int], size: int) -> Deal:
    """The deal as it is."""
    loads = [0] * size
    for rank, work in zip(ranks, works, strict=True):
        loads[rank] += work
    return Deal(cuts, tuple(ranks), max(loads) * size / sum(works) if any(works) else 1.0)


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


def _by_stretch(works: list[int], size: int, long: list[list[int]], short: list[int]) -> list[int]:
    """Rank after rank gets chunks from the beginning of an order, others from its end, and one that makes up the mean.

    First in it are the long documents, those of the most work for a chunk first, so that each lies on few ranks; chunks
    of one from its ends inwards, so that these ranks have equal parts of it. Then come the short ones as they lie.
    """
    count, rest = len(works) // size, sum(works)
    long = sorted(long, key=lambda stretch: -sum(works[chunk] for chunk in stretch) / len(stretch))
    order, group_of = [], [0] * len(works)
    left: list[list[tuple[int, int]]] = []
    for number, group in enumerate([*map(_inwards, long), short]):
        order += group
        left.append(sorted((works[chunk], chunk) for chunk in group))
        for chunk in group:
            group_of[chunk] = number
    ranks = [-1] * len(works)
    for rank in range(size):
        order = [chunk for chunk in order if ranks[chunk] < 0] if rank % TIDY == 0 else order
        ahead = (chunk for chunk in order if ranks[chunk] < 0)
        hand = list(islice((chunk for chunk in reversed(order) if ranks[chunk] < 0), count))[::-1]
        mean, work = rest // (size - rank), sum(works[chunk] for chunk in hand)
        for number, chunk in enumerate(islice(ahead, count if rank < size - 1 else 0)):
            if work + works[chunk] - works[hand[number]] > mean:
                others = {*hand[:number], *hand[number + 1 :]}
                wanted = mean - work + works[hand[number]]
                fitting = _nearest(left[group_of[chunk]], wanted, others)
                if fitting is not None and abs(works[fitting] - wanted) < abs(works[hand[number]] - wanted):
                    hand[number] = fitting
                break
            work += works[chunk] - works[hand[number]]
            hand[number] = chunk
        rest -= sum(works[chunk] for chunk in hand)
        for chunk in hand:
            ranks[chunk] = rank
            of_group = left[group_of[chunk]]
            del of_group[bisect_left(of_group, (works[chunk], chunk))]
    return ranks


def _find_stretches(works: list[int], size: int, alone: int) -> tuple[list[list[int]], list[int]]:
    """Long documents, of more than half of a rank's work, as their chunks; and all other chunks.

    A document is found by its rising work, up to the chunk it ends in. That one sees keys of chunks before it: it has
    more than ``alone`` pairs, which is what a chunk that sees only itself has.
    """
    stretches: list[list[int]] = [[]]
    ended = False
    for chunk, work in enumerate(works):
        falls = chunk > 0 and work < works[chunk - 1]
        if ended or (falls and work <= alone):
            stretches.append([])
        ended = falls and not ended and work > alone
        stretches[-1].append(chunk)
    half = sum(works) / (2 * size)
    is_long = [sum(works[chunk] for chunk in stretch) > half for stretch in stretches]
    return list(compress(stretches, is_long)), list(chain(*(compress(stretches, map(not_, is_long)))))


def _inwards(stretch: list[int]) -> list[int]:
    """The last, the first, the last but one, the second, and so on."""
    pairs = zip(reversed(stretch), stretch, strict=True)
    return list(islice(chain.from_iterable(pairs), len(stretch)))


def _nearest(left: list[tuple[int, int]], wanted: int, others: set[int]) -> int | None:
    """Of what is left, and not among ``others``, the chunk whose work is nearest to what is wanted."""
    at = bisect_left(left, (wanted, 0))
    above = next((one for one in islice(left, at, None) if one[1] not in others), None)
    below = next((left[k] for k in range(at - 1, -1, -1) if left[k][1] not in others), None)
    if above is None or (below is not None and wanted - below[0] <= above[0] - wanted):
        return below and below[1]
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


def _swap(works: list[int], ranks: list[int], size: int) -> None:
    """Swap chunks of the busiest rank with lighter ones until it is `BALANCED` or nothing helps."""
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


def _best_swap(works: list[int], busy: list[int], idle: list[int], gap: int) -> tuple[int, int] | None:
    """The chunks of two ranks whose swap leaves the smallest difference of ``gap``; None if a tenth of it stays."""
    least, found = gap - gap // 10, None
    for mine in busy:
        for other in idle:
            stays = abs(gap - 2 * (works[mine] - works[other]))
            if stays < least:
                least, found = stays, (mine, other)
    return found
