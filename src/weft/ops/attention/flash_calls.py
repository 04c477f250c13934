"""The blocks of a plan as few calls of a flash operator that has windows and takes several sequences at once.

A window is what the operator takes: with n queries and m keys, query i sees key j where -left <= j - i - (m - n) <=
right, counted from the diagonal that ends in the last query and the last key; -1 is no limit. Traps: no side can end
before that diagonal; one that is at least as long as there are keys counts as no limit; and beside a limited left no
limit on the right means m, which is too little where n > m + 1. So areas are cut until they fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from weft.ops.attention.plan import AttentionPlan, Block, KeySpan, QueryTile
from weft.ops.sequence.mask_slices import UNLIMITED


class Area(NamedTuple):
    """Pairs of a query q_start <= i < q_stop and a key k_start <= j < k_stop with low <= j - i <= high.

    i and j are places in the memory of the queries and of the keys.
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    low: int
    high: int

    @property
    def queries(self) -> int:
        return self.q_stop - self.q_start

    @property
    def keys(self) -> int:
        return self.k_stop - self.k_start

    def pairs(self) -> int:
        """Its pairs."""
        return self._up_to(self.high) - self._up_to(self.low - 1) if self.low <= self.high else 0

    def _up_to(self, high: int) -> int:
        """The pairs with j - i <= high: query i has i + high - k_start + 1 of them, at least none and at most all."""

        def total(end: int) -> int:
            inside = min(max(end, 0), self.keys)
            return inside * (inside + 1) // 2 + max(end - self.keys, 0) * self.keys

        last = self.q_stop + high - self.k_start
        return total(last) - total(last - self.queries)

    def lies_in(self, low: int, high: int) -> bool:
        """Whether all its pairs have low <= j - i <= high."""
        if low <= self.low and self.high <= high:
            return True
        return self._replace(low=max(low, self.low), high=min(high, self.high)).pairs() == self.pairs()

    def shows(self, low: int, high: int) -> bool:
        """Whether low and high say the same as its own."""
        return self.lies_in(low, high) and self._replace(low=low, high=high).pairs() == self.pairs()

    def crop(self) -> Area:
        """The same without queries that see nothing and keys that nobody sees."""
        q_start, q_stop = max(self.q_start, self.k_start - self.high), min(self.q_stop, self.k_stop - self.low)
        k_start, k_stop = max(self.k_start, q_start + self.low), min(self.k_stop, q_stop + self.high)
        return Area(q_start, q_stop, k_start, k_stop, self.low, self.high)

    def window(self) -> tuple[int, int]:
        """(left, right) of the operator: those of a cropped area are not negative, and -1 is no limit."""
        end = self.k_stop - self.q_stop  # j - i on its diagonal
        left = -1 if self.low <= self.k_start - self.q_stop + 1 else end - self.low
        right = -1 if self.high >= self.k_stop - 1 - self.q_start else self.high - end
        return left, right

    def shows_window(self, left: int, right: int) -> bool:
        """Whether the operator computes this area with that window."""
        end = self.k_stop - self.q_stop
        low = -UNLIMITED if left < 0 else end - left
        high = end + (right if right >= 0 else UNLIMITED if left < 0 else self.keys)
        return self.shows(low, high)

    def fit(self) -> list[Area]:
        """Areas that the operator computes as they are: by queries that the right side limits, none, the left side."""
        whole = self.crop()
        if whole._has_window():
            return [whole]
        edges = whole.k_stop - 1 - whole.high, whole.k_start - whole.low + 1
        cuts = sorted({whole.q_start, *(edge for edge in edges if whole.q_start < edge < whole.q_stop), whole.q_stop})
        parts = [whole._replace(q_start=a, q_stop=b).crop() for a, b in pairwise(cuts)]
        assert all(part._has_window() for part in parts), whole
        return parts

    def _has_window(self) -> bool:
        left, right = self.window()
        return right < self.keys and self.shows_window(left, right)


@dataclass
class FlashCall:
    """One call: areas one after the other, in the queries' and in the keys' memory, each a sequence of its own."""

    areas: list[Area]
    left: int
    right: int
    first: bool = False  # no call before it has any of its queries

    @property
    def rows(self) -> slice:
        return slice(self.areas[0].q_start, self.areas[-1].q_stop)

    @property
    def keys(self) -> slice:
        return slice(self.areas[0].k_start, self.areas[-1].k_stop)

    @property
    def lengths(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Queries and keys of each sequence."""
        return tuple(area.queries for area in self.areas), tuple(area.keys for area in self.areas)

    def take(self, area: Area) -> bool:
        """Append an area, if one window serves all."""
        if not area.shows_window(self.left, self.right):
            left, right = area.window()
            if not all(one.shows_window(left, right) for one in self.areas):
                return False
            self.left, self.right = left, right
        self.areas.append(area)
        return True


def calls_of(plan: AttentionPlan, rank: int, spans: tuple[KeySpan, ...], several: bool) -> list[FlashCall]:
    """The calls for what the rank's queries have to compute against these keys; worked out once."""
    key = rank, spans, several
    if key not in plan.flash_calls:
        plan.flash_calls[key] = plan_calls(plan.blocks(rank, spans), several)
    return plan.flash_calls[key]


def plan_calls(blocks: Sequence[tuple[QueryTile, Sequence[Block]]], several: bool) -> list[FlashCall]:
    """The calls for all blocks of a step. ``several``: a call may have several sequences, as a batch of 1 has."""
    calls: list[FlashCall] = []
    open_calls: dict[tuple[int, int], FlashCall] = {}  # by where their queries and keys end
    for area in (part for whole in _join_blocks(blocks) for part in whole.fit()):
        call = open_calls.pop((area.q_start, area.k_start), None) if several else None
        if call is None or not call.take(area):
            call = FlashCall([area], *area.window())
            calls.append(call)
        open_calls[area.q_stop, area.k_stop] = call
    covered = bytearray(max((call.rows.stop for call in calls), default=0))
    for call in calls:
        call.first = 1 not in covered[call.rows]
        covered[call.rows] = b"\1" * (call.rows.stop - call.rows.start)
    return calls


def _join_blocks(blocks: Sequence[tuple[QueryTile, Sequence[Block]]]) -> list[Area]:
    """The areas of all blocks; blocks of a tile, and of a tile and the one before, become one where they can be."""
    done: list[Area] = []
    growing: list[Area] = []  # of the tile before
    for tile, pieces in blocks:
        here: list[Area] = []
        for piece in pieces:
            area = _area(tile, piece)
            joined = _join(here[-1], area) if here else None
            here[-1:] = [joined] if joined else [*here[-1:], area]
        before, growing = growing, []
        for area in here:
            joined, number = next(((one, at) for at, x in enumerate(before) if (one := _join(x, area))), (None, 0))
            if joined:
                before.pop(number)
            growing.append(joined or area)
        done += before
    return done + growing


def _join(one: Area, other: Area) -> Area | None:
    """Two areas without a common pair as one, if they are one."""
    rows = min(one.q_start, other.q_start), max(one.q_stop, other.q_stop)
    keys = min(one.k_start, other.k_start), max(one.k_stop, other.k_stop)
    together = one.pairs() + other.pairs()
    for low, high in dict.fromkeys(((one.low, one.high), (other.low, other.high), (-UNLIMITED, UNLIMITED))):
        whole = Area(*rows, *keys, low, high)
        if whole.pairs() == together and one.lies_in(low, high) and other.lies_in(low, high):
            return whole
    return None


def _area(tile: QueryTile, block: Block) -> Area:
    ahead = block.at - tile.start - block.shift
    rows, keys = (tile.start, tile.start + tile.length), (block.at, block.at + block.length)
    area = Area(*rows, *keys, ahead - block.left, ahead + block.right)
    if block.kind == "full" and area.pairs() < area.queries * area.keys:  # its keys are no neighbours in the sequence
        return Area(*rows, *keys, -UNLIMITED, UNLIMITED)
    return area
