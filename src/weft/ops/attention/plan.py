"""What was asked for, and who attends to what: masks and layouts become ranges and blocks of scores.

Every rank works this out for all ranks from their lengths alone, so nobody has to ask what to send.
Tokens of an owner that others need are *ranges* of its local memory: (start, length), sorted, neighbours joined.
A mask is slices (`MaskSlice`): documents, windows and what a `Mask` says alike. Kernels see blocks: what a tile of
queries computes against keys that lie somewhere in memory.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch

from weft.ops.sequence.layout import Bounds, Sequence, TokenRun
from weft.ops.sequence.mask import Mask
from weft.ops.sequence.mask_slices import UNLIMITED, MaskSlice, alongside, join

LARGEST_TILE, SMALLEST_TILE = 512, 64  # queries at a time under a window: their band is what gets computed

Range = tuple[int, int]  # (start, length) in an owner's local memory
Ranges = tuple[Range, ...]


@dataclass(frozen=True)
class KeySpan:
    """Keys ``at : at + length`` of some memory are the tokens at ``offset`` of the whole sequence."""

    at: int
    length: int
    offset: int


@dataclass(frozen=True)
class QueryTile:
    """Queries of a slice that are computed together: ``start : start + length`` locally."""

    start: int
    seen: MaskSlice  # by these queries
    first: bool  # no tile before it has any of these queries

    @property
    def length(self) -> int:
        return self.seen.q_stop - self.seen.q_start


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


@dataclass(frozen=True)
class SlicePart:
    """What a slice shows to the queries of a run, which are computed ``step`` at a time."""

    run: TokenRun
    seen: MaskSlice
    step: int


@dataclass
class AttentionPlan:
    """Where the tokens of a sequence lie and which of them see each other; the same on every rank."""

    lengths: tuple[int, ...]
    runs: tuple[TokenRun, ...]
    parts: list[list[SlicePart]]  # by rank
    runs_of: list[list[TokenRun]]  # by rank
    _tiles: dict[int, list[QueryTile]] = field(default_factory=dict)
    _blocks: dict[tuple[int, tuple[KeySpan, ...]], list[tuple[QueryTile, list[Block]]]] = field(default_factory=dict)
    _ranges: dict[tuple[int, int], Ranges] = field(default_factory=dict)
    _visible: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    flash_calls: dict[tuple[int, tuple[KeySpan, ...], bool], Any] = field(default_factory=dict)  # see `flash_calls`

    @property
    def size(self) -> int:
        return len(self.lengths)

    def visible_to(self, owner: int, reader: int) -> Ranges:
        """The owner's tokens that the reader's queries see: what travels, and whose gradients come back."""
        key = owner, reader
        if key not in self._ranges:
            if reader not in self._visible:
                self._visible[reader] = join((part.seen.k_start, part.seen.k_stop) for part in self.parts[reader])
            visible, found = self._visible[reader], []
            for run in self.runs_of[owner] if owner != reader else []:
                end = run.offset + run.length
                number = bisect_right(visible, run.offset, key=lambda span: span[1])
                while number < len(visible) and visible[number][0] < end:
                    low, high = max(visible[number][0], run.offset), min(visible[number][1], end)
                    found.append((run.start + low - run.offset, high - low))
                    number += 1
            self._ranges[key] = unite([tuple(found)])
        return self._ranges[key]

    def place(self, owner: int, ranges: Ranges, at: int = 0) -> list[KeySpan]:
        """The owner's ranges, one after the other from ``at`` on, with their places in the whole sequence."""
        spans = []
        for start, length in ranges:
            for run in self.runs_of[owner]:
                low, high = max(start, run.start), min(start + length, run.start + run.length)
                if low < high:
                    spans.append(KeySpan(at + low - start, high - low, run.offset + low - run.start))
            at += length
        return spans

    def blocks(self, rank: int, spans: tuple[KeySpan, ...]) -> list[tuple[QueryTile, list[Block]]]:
        """What the rank's queries have to compute against these keys."""
        key = rank, spans
        if key not in self._blocks:
            held = HeldKeys(spans)
            found = [(tile, cut_blocks(tile.seen, held)) for tile in self._tiles_of(rank)] if spans else []
            self._blocks[key] = [(tile, blocks) for tile, blocks in found if blocks]
        return self._blocks[key]

    def pairs(self, rank: int) -> int:
        """Scores the rank's queries have to compute, against all keys: the measure of balance."""
        whole = (KeySpan(0, sum(self.lengths), 0),)
        return sum(
            tile.length * block.length // (2 if block.kind == "causal" else 1)
            for tile, blocks in self.blocks(rank, whole)
            for block in blocks
        )

    def _tiles_of(self, rank: int) -> list[QueryTile]:
        if rank not in self._tiles:
            tiles: list[QueryTile] = []
            done: dict[TokenRun, int] = {}  # of each run: the query up to which some have a tile
            for part in self.parts[rank]:
                begin, end = part.seen.q_start, part.seen.q_stop
                for offset in range(begin, end, part.step):
                    seen = part.seen.of_queries(offset, offset + part.step)
                    start = part.run.start + offset - part.run.offset
                    tiles.append(QueryTile(start, seen, offset >= done.get(part.run, 0)))
                done[part.run] = max(end, done.get(part.run, 0))
            self._tiles[rank] = tiles
        return self._tiles[rank]


def cut_blocks(seen: MaskSlice, held: HeldKeys) -> list[Block]:
    """What the queries of a tile have to compute against these keys."""
    begin, end, low, high = seen[:4]
    all_see = max(low, end - 1 + seen.low), min(high, begin + seen.high + 1)
    if seen.high == 0 and all_see[0] == low:
        regions = [(low, begin, "full"), (begin, end, "causal")]  # the plan has cut it where its keys end
    elif end - begin > 1 and all_see != (low, high) and all_see[1] - all_see[0] < 2 * (end - begin):
        regions = [(low, high, "band")]  # the part without a mask is too short to pay for a kernel of its own
    else:
        regions = [(low, all_see[0], "band"), (*all_see, "full"), (all_see[1], high, "band")]
    blocks: list[Block] = []
    for first, last, kind in regions:
        for span, start, stop in held.between(first, last):
            at, shift = span.at + start - span.offset, start - begin
            _append(blocks, Block(at, stop - start, kind, shift, -seen.low, seen.high))
    return blocks


def _append(blocks: list[Block], new: Block) -> None:
    """Add a block, as part of the last one where their keys are neighbours (in a band: in the sequence too)."""
    last = blocks[-1] if blocks else new  # which is no neighbour of itself
    meets = last.kind == new.kind and last.at + last.length == new.at
    if meets and (new.kind == "full" or (new.kind == "band" and last.shift + last.length == new.shift)):
        blocks[-1] = replace(last, length=last.length + new.length)
    else:
        blocks.append(new)


def unite(parts: Iterable[Ranges]) -> Ranges:
    """The union of an owner's ranges."""
    joined = join((start, start + length) for ranges in parts for start, length in ranges)
    return tuple((low, high - low) for low, high in joined)


def count(ranges: Ranges) -> int:
    """The tokens of the ranges."""
    return sum(length for _, length in ranges)


@lru_cache(maxsize=16)
def plan_attention(
    runs: tuple[TokenRun, ...],
    lengths: tuple[int, ...],
    bounds: Bounds | None,
    causal: bool,
    window: tuple[int, int],
    mask: Mask | None = None,
) -> AttentionPlan:
    """The plan of ranks that hold ``runs``, ``lengths`` tokens of each, with documents between ``bounds``
    (None: one), through ``window``; of what those show, what ``mask`` shows too.
    """
    left, right = (UNLIMITED if side < 0 else side for side in window)
    right = 0 if causal else right
    documents = list(pairwise(bounds or (0, sum(lengths))))
    if mask is None:
        slices = [MaskSlice(a, b, a, b, -left, right) for a, b in documents if a < b]
    else:
        if len(documents) > 1:
            mask &= Mask.full(bounds)
        slices = sorted(piece for one in mask.within(left, right).slices for piece in _split(one))
    steps = {one: _step(one) for one in slices}
    parts: list[list[SlicePart]] = [[] for _ in lengths]
    runs_of: list[list[TokenRun]] = [[] for _ in lengths]
    spans = [(run.offset, run.offset + run.length) for run in runs]
    for run, span, near in zip(runs, spans, alongside(spans, slices), strict=True):
        runs_of[run.rank].append(run)
        shown = [(one, one.of_queries(*span)) for one in near]
        parts[run.rank] += [SlicePart(run, seen, steps[one]) for one, seen in shown if not seen.is_empty]
    return AttentionPlan(lengths, runs, parts, runs_of)


def _split(one: MaskSlice) -> Iterator[MaskSlice]:
    """A causal slice in two: the queries that are among its keys, and those after them, which see all of it."""
    if one.high or one.k_stop == one.q_stop:
        yield one
        return
    if not (square := one.of_queries(one.q_start, one.k_stop)).is_empty:
        yield square
    yield one.of_queries(one.k_stop, one.q_stop)._replace(high=UNLIMITED)


def _step(one: MaskSlice) -> int:
    """Queries of a tile: all of them where no diagonal bites, few where most scores would be masked."""
    queries = one.q_stop - one.q_start
    if one.low <= one.k_start - one.q_stop + 1 and (one.high == 0 or one.high >= one.k_stop - 1 - one.q_start):
        return queries
    width = min(one.high, one.k_stop - one.q_start) - max(one.low, one.k_start - one.q_stop)
    return min(max(width, SMALLEST_TILE), LARGEST_TILE)


@dataclass(frozen=True)
class Options:
    """What was asked for: all that the ranks must have in common, everything but their lengths."""

    q: tuple[int, ...]
    kv_heads: int
    dtype: torch.dtype
    device: str  # its type
    causal: bool
    scale: float
    window: tuple[int, int]
    cu_seqlens: Bounds | None
    layout: str
    lengths: tuple[int, ...] | None  # of a sequence that was made before
    method: str | tuple[str, str]
    strides: tuple[int, ...] | None
    backward_strides: tuple[int, ...] | None
    backward: str | None
    grad_dtype: torch.dtype | None
    return_lse: bool
    gradients: tuple[bool, ...]
    local_first: bool = True  # see `KVExchange`
    mask: Mask | None = None
    inner: int = 0  # ranks that exchange heads, if not all do: of a method on two levels
    sinks: bool = False
    value_size: int | None = None  # of a head of v; None: as q's
    softcap: float = 0.0  # 0: scores are not capped

    def plan(self, sequence: Sequence) -> AttentionPlan:
        """Who attends to what, worked out by everybody alone."""
        return self.plan_runs(sequence.runs, sequence.lengths)

    def plan_runs(self, runs: tuple[TokenRun, ...], lengths: tuple[int, ...]) -> AttentionPlan:
        """The same for tokens that lie as these runs say."""
        return plan_attention(runs, lengths, self.cu_seqlens, self.causal, self.window, self.mask)
