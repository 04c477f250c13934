"""A slice of a mask: queries that see keys between two diagonals; and what is asked of many slices at once.

Nothing here looks at single tokens: a slice of a million queries costs as much as one of two.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

UNLIMITED = 1 << 60  # a diagonal that nothing limits

Span = tuple[int, int]  # [start, stop) of the whole sequence


class MaskSlice(NamedTuple):
    """Query i of ``q_start : q_stop`` sees key j of ``k_start : k_stop`` where low <= j - i <= high.

    Positions are those of the whole sequence, whatever rank they lie on.

    >>> MaskSlice.causal(queries=(4, 8), keys=(0, 8))
    MaskSlice(q_start=4, q_stop=8, k_start=0, k_stop=8, low=-1152921504606846976, high=0)
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    low: int = -UNLIMITED
    high: int = UNLIMITED

    @staticmethod
    def full(queries: Span, keys: Span) -> MaskSlice:
        """Every query sees every key."""
        return MaskSlice(*queries, *keys)

    @staticmethod
    def causal(queries: Span, keys: Span) -> MaskSlice:
        """A query sees the keys up to its own position."""
        return MaskSlice(*queries, *keys, high=0)

    @staticmethod
    def inverse_causal(queries: Span, keys: Span) -> MaskSlice:
        """A query sees the keys from its own position on."""
        return MaskSlice(*queries, *keys, low=0)

    @staticmethod
    def band(queries: Span, keys: Span, left: int, right: int) -> MaskSlice:
        """A query sees the keys from ``left`` before its own position to ``right`` after it."""
        return MaskSlice(*queries, *keys, -left, right)

    @property
    def is_empty(self) -> bool:
        """Whether nobody sees anything; of a slice that is `trimmed`."""
        return self.q_start >= self.q_stop

    def trimmed(self) -> MaskSlice:
        """Without the queries that see nothing, and without the keys that nobody sees."""
        if self.k_start >= self.k_stop or self.low > self.high:
            return NOTHING
        return self.of_queries(self.k_start - self.high, self.k_stop - self.low)

    def loosened(self) -> MaskSlice:
        """Without limits that limit nobody: slices that show the same are then the same."""
        low = -UNLIMITED if self.low <= self.k_start - self.q_stop + 1 else self.low
        high = UNLIMITED if self.high >= self.k_stop - 1 - self.q_start else self.high
        return MaskSlice(*self[:4], low, high)

    def meet(self, other: MaskSlice) -> MaskSlice:
        """What both show."""
        return MaskSlice(
            max(self.q_start, other.q_start), min(self.q_stop, other.q_stop),
            max(self.k_start, other.k_start), min(self.k_stop, other.k_stop),
            max(self.low, other.low), min(self.high, other.high),
        ).trimmed()  # fmt: skip

    def of_queries(self, start: int, stop: int) -> MaskSlice:
        """What it shows to the queries ``start : stop``, which must see some of it: all those of a `trimmed` slice."""
        q_start, q_stop, k_start, k_stop, low, high = self
        q_start, q_stop = max(q_start, start), min(q_stop, stop)
        if q_start >= q_stop:
            return NOTHING
        return MaskSlice(q_start, q_stop, max(k_start, q_start + low), min(k_stop, q_stop + high), low, high)

    def first_key(self, query: int) -> int:
        """The first key that a query of it sees; of a slice that is `trimmed`."""
        return max(self.k_start, query + self.low)


NOTHING = MaskSlice(0, 0, 0, 0)


def alongside(spans: Iterable[Span], slices: Sequence[MaskSlice]) -> Iterator[list[MaskSlice]]:
    """For each span, by rising start: the slices, sorted too, whose queries may be in it."""
    active: list[MaskSlice] = []
    taken = 0
    for start, stop in spans:
        while taken < len(slices) and slices[taken].q_start < stop:
            active.append(slices[taken])
            taken += 1
        active = [one for one in active if one.q_stop > start]
        yield active


def find_overlap(slices: Sequence[MaskSlice]) -> tuple[MaskSlice, MaskSlice] | None:
    """Two slices that show the same key to the same query, of `trimmed` ones, sorted.

    A sweep over the queries. The keys that a slice shows are an interval whose ends move on by one or by nothing from
    a query to the next; so disjoint intervals keep their order, and the first to overlap are neighbours in it.
    """
    active: list[MaskSlice] = []  # by their keys
    by_stop = sorted(slices, key=lambda one: one.q_stop)
    ended = 0
    for new in (*slices, None):
        while ended < len(slices) and (new is None or by_stop[ended].q_stop <= new.q_start):
            at = _place(active, by_stop[ended], by_stop[ended].q_stop - 1)
            del active[at]
            ended += 1
            if 0 < at < len(active) and not active[at - 1].meet(active[at]).is_empty:
                return active[at - 1], active[at]
        if new is not None:
            at = _place(active, new, new.q_start)
            for near in active[max(at - 1, 0) : at + 1]:
                if not near.meet(new).is_empty:
                    return near, new
            active.insert(at, new)
    return None


def _place(active: Sequence[MaskSlice], one: MaskSlice, query: int) -> int:
    """Where a slice stands among others by the keys that a query sees."""
    return bisect_left(active, one.first_key(query), key=lambda other: other.first_key(query))


def count_pairs(slices: Iterable[MaskSlice], cuts: Sequence[int]) -> list[int]:
    """Pairs that the queries between consecutive cuts see, of `trimmed` slices.

    How many keys query i sees is a sum of pieces slope * i + constant; it is summed up between the places where
    pieces begin and end.
    """
    changes: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0])  # of slope and constant, by place

    def add(start: int, stop: int, slope: int, constant: int) -> None:
        if start < stop:
            for place, sign in ((start, 1), (stop, -1)):
                changes[place][0] += sign * slope
                changes[place][1] += sign * constant

    for one in slices:
        turn = min(max(one.k_stop - one.high, one.q_start), one.q_stop)  # from here on the last key stays the same
        add(one.q_start, turn, 1, one.high)
        add(turn, one.q_stop, 0, one.k_stop - 1)
        turn = min(max(one.k_start - one.low, one.q_start), one.q_stop)  # up to here the first key stays the same
        add(one.q_start, turn, 0, 1 - one.k_start)
        add(turn, one.q_stop, -1, 1 - one.low)
    places = sorted(changes)
    slopes = list(accumulate(changes[place][0] for place in places))
    constants = list(accumulate(changes[place][1] for place in places))

    def piece(number: int, stop: int) -> int:
        start = places[number]
        return slopes[number] * ((start + stop - 1) * (stop - start) // 2) + constants[number] * (stop - start)

    before = [0, *accumulate(piece(number, stop) for number, stop in enumerate(places[1:]))]

    def seen_before(cut: int) -> int:
        number = bisect_right(places, cut) - 1
        return 0 if number < 0 else before[number] + piece(number, cut)

    seen = [seen_before(cut) for cut in cuts]
    return [after - first for first, after in pairwise(seen)]


def tree_slices(parents: Sequence[int], bounds: Sequence[int]) -> list[MaskSlice]:
    """One slice for each node and each stretch of its descendants: in depth-first order one for each node.

    A node that follows its parent at once and has no siblings is joined to it.
    """
    children = [0] * len(parents)
    for parent in parents:
        if parent >= 0:
            children[parent] += 1
    heads: list[int] = []  # of each node: the first of those it is joined to
    stops: dict[int, int] = {}  # of each head
    for node, parent in enumerate(parents):
        heads.append(heads[parent] if parent >= 0 and parent == node - 1 and children[parent] == 1 else node)
        stops[heads[node]] = bounds[node + 1]
    below: dict[int, list[Span]] = {head: [(bounds[head], stop)] for head, stop in stops.items()}
    found = []
    for head, stop in reversed(stops.items()):
        stretches = join(below.pop(head))
        found += [MaskSlice.causal(stretch, (bounds[head], stop)) for stretch in stretches]
        if parents[head] >= 0:
            below[heads[parents[head]]] += stretches
    return found


def join(spans: Iterable[Span]) -> list[Span]:
    """The union of [start, stop) spans, as sorted ones that do not touch."""
    joined: list[Span] = []
    for start, stop in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        elif start < stop:
            joined.append((start, stop))
    return joined
