"""Blocks of scores: what a tile of queries computes against keys that lie somewhere in memory."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from weft.ops.sequence.mask_slices import MaskSlice


@dataclass(frozen=True)
class KeySpan:
    """Keys ``at : at + length`` of some memory are the tokens at ``offset`` of the whole sequence."""

    at: int
    length: int
    offset: int


@dataclass(frozen=True)
class QueryTile:
    """Queries of a slice that are computed together: ``start : start + length`` locally, ``offset`` globally."""

    start: int
    seen: MaskSlice  # by these queries
    first: bool  # no tile before it has any of these queries

    @property
    def length(self) -> int:
        return self.seen.q_stop - self.seen.q_start

    @property
    def offset(self) -> int:
        return self.seen.q_start


@dataclass(frozen=True)
class Block:
    """Keys ``at : at + length`` against a tile of queries. ``kind``: full, causal (a square on the diagonal) or band.

    In a band, query i sees key j where -left <= shift + j - i <= right.
    """

    at: int
    length: int
    kind: str
    shift: int
    left: int
    right: int


class HeldKeys:
    """Spans of keys in some memory, which do not overlap, found by their places in the sequence."""

    def __init__(self, spans: tuple[KeySpan, ...]) -> None:
        self._spans = spans
        self._order = sorted(range(len(spans)), key=lambda number: spans[number].offset)
        self._offsets = [spans[number].offset for number in self._order]

    def between(self, low: int, high: int) -> Iterator[tuple[KeySpan, int, int]]:
        """The spans with tokens of ``low : high``, in the order of the memory, and which tokens those are."""
        first, last = bisect_right(self._offsets, low) - 1, bisect_left(self._offsets, high)
        for number in sorted(self._order[max(first, 0) : last]):
            span = self._spans[number]
            start, stop = max(low, span.offset), min(high, span.offset + span.length)
            if start < stop:
                yield span, start, stop


def cut_blocks(seen: MaskSlice, held: HeldKeys) -> list[Block]:
    """What the queries of a tile have to compute against these keys."""
    begin, end, low, high = seen[:4]
    all_see = max(low, end - 1 + seen.low), min(high, begin + seen.high + 1)
    if seen.high == 0 and all_see[0] == low:
        regions = [(low, begin, "full"), (begin, end, "causal")]  # the plan has cut it where its keys end
    elif end - begin > 1 and all_see != (low, high) and all_see[1] - all_see[0] < 2 * (end - begin):
        regions = [(low, high, "band")]  # the part without a mask is too short to pay for a kernel of its own
    else:
        regions = [
            (low, all_see[0], "band"), (*all_see, "full"), (all_see[1], high, "band")
        ]  # fmt: skip
    blocks: list[Block] = []
    for first, last, kind in regions:
        for span, start, stop in held.between(first, last):
            at, shift = span.at + start - span.offset, start - begin
            _append(blocks, Block(at, stop - start, kind, shift, -seen.low, seen.high))
    return blocks


def _append(blocks: list[Block], new: Block) -> None:
    """Add a block, as part of the last one where their keys are neighbours (in a band: in the sequence too)."""
    last = blocks[-1] if blocks else None
    if (
        last is not None
        and last.kind == new.kind
        and last.at + last.length == new.at
        and (new.kind == "full" or (new.kind == "band" and last.shift + last.length == new.shift))
    ):
        blocks[-1] = Block(last.at, last.length + new.length, last.kind, last.shift, last.left, last.right)
    else:
        blocks.append(new)
