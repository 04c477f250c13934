"""What was asked for, and who attends to what: masks and layouts become ranges and blocks of scores.

Every rank works this out for all ranks from their lengths alone, so nobody has to ask what to send.
Tokens of an owner that others need are *ranges* of its local memory: (start, length), sorted, neighbours joined.
A mask is slices (`MaskSlice`): documents, windows and what a `Mask` says alike. Kernels see blocks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch

from weft.ops.attention.blocks import Block, HeldKeys, KeySpan, QueryTile, cut_blocks
from weft.ops.sequence.layout import Bounds, Sequence, TokenRun
from weft.ops.sequence.mask import Mask
from weft.ops.sequence.mask_slices import UNLIMITED, MaskSlice, alongside, join

LARGEST_TILE, SMALLEST_TILE = 512, 64  # queries at a time under a window: their band is what gets computed

Range = tuple[int, int]  # (start, length) in an owner's local memory
Ranges = tuple[Range, ...]


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
    _runs: list[list[TokenRun]] = field(default_factory=list)  # by rank
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
            for run in self._runs_of(owner) if owner != reader else []:
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
            for run in self._runs_of(owner):
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

    def order_keys(self, rank: int, spans: tuple[KeySpan, ...]) -> tuple[KeySpan, ...]:
        """``spans`` one after the other in sequence order if the rank then has fewer blocks, else as given."""
        ordered, at = [], 0
        for span in sorted(spans, key=lambda span: span.offset):
            ordered.append(KeySpan(at, span.length, span.offset))
            at += span.length
        here, there = (
            sum(len(blocks) for _, blocks in self.blocks(rank, each)) for each in (spans, tuple(ordered))
        )  # fmt: skip
        return tuple(ordered) if there < here else spans

    def pairs(self, rank: int) -> int:
        """Scores the rank's queries have to compute, against all keys: the measure of balance."""
        whole = (KeySpan(0, sum(self.lengths), 0),)
        return sum(
            tile.length * block.length // (2 if block.kind == "causal" else 1)
            for tile, blocks in self.blocks(rank, whole)
            for block in blocks
        )

    def _runs_of(self, rank: int) -> list[TokenRun]:
        if not self._runs:
            self._runs = [[] for _ in self.lengths]
            for run in self.runs:
                self._runs[run.rank].append(run)
        return self._runs[rank]

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


def unite(parts: Iterable[Ranges]) -> Ranges:
    """The union of an owner's ranges."""
    joined = join((start, start + length) for ranges in parts for start, length in ranges)
    return tuple((low, high - low) for low, high in joined)


def locate(wanted: Ranges, present: Ranges) -> list[Range]:
    """Where ``wanted`` lies in memory that holds ``present``, which has all of it, one after the other."""
    found: list[Range] = []
    number = at = 0
    for start, length in wanted:
        while sum(present[number]) <= start:
            at += present[number][1]
            number += 1
        assert present[number][0] <= start and start + length <= sum(present[number]), f"{wanted} is not in {present}"
        found.append((at + start - present[number][0], length))
    return found


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
    spans = [(run.offset, run.offset + run.length) for run in runs]
    for run, span, near in zip(runs, spans, alongside(spans, slices), strict=True):
        shown = [(one, one.of_queries(*span)) for one in near]
        parts[run.rank] += [SlicePart(run, seen, steps[one]) for one, seen in shown if not seen.is_empty]
    return AttentionPlan(lengths, runs, parts)


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


def find_mask_fault(mask: Mask | None, lengths: tuple[int, ...], where: str = "") -> Exception | None:
    """The error for a mask of another sequence."""
    if mask is None or mask.total == sum(lengths):
        return None
    return ValueError(
        f"attention: mask is of {mask.total} tokens, but the ranks hold {list(lengths)}, {sum(lengths)} in all; it "
        f"must be of the whole sequence{where}"
    )


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
