"""What was asked for, and who attends to what: documents, windows and layouts become ranges and blocks of scores.

Every rank works this out for all ranks from their lengths alone, so nobody has to ask what to send.
Tokens of an owner that others need are *ranges* of its local memory: (start, length), sorted, neighbours joined.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from weft.ops.sequence.layout import Bounds, Sequence, TokenRun, document_at

UNLIMITED = 1 << 60  # a window's side that nothing limits
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
    """Queries of one document that are computed together: ``start : start + length`` locally, ``offset`` globally."""

    start: int
    length: int
    offset: int
    document: tuple[int, int]


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


@dataclass
class AttentionPlan:
    """Where the tokens of a sequence lie and which of them see each other; the same on every rank."""

    lengths: tuple[int, ...]
    runs: tuple[TokenRun, ...]
    tiles: list[list[QueryTile]]  # by rank
    left: int
    right: int
    _runs: list[list[TokenRun]] = field(default_factory=list)  # by rank
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
                self._visible[reader] = _join(self._visible_keys(tile) for tile in self.tiles[reader])
            found = []
            for run in self._runs_of(owner) if owner != reader else []:
                for low, high in self._visible[reader]:
                    low, high = max(low, run.offset), min(high, run.offset + run.length)
                    if low < high:
                        found.append((run.start + low - run.offset, high - low))
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
            found = [(tile, self._cut(tile, spans)) for tile in self.tiles[rank]] if spans else []
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

    def _runs_of(self, rank: int) -> list[TokenRun]:
        if not self._runs:
            self._runs = [[] for _ in self.lengths]
            for run in self.runs:
                self._runs[run.rank].append(run)
        return self._runs[rank]

    def _visible_keys(self, tile: QueryTile) -> tuple[int, int]:
        low, high = tile.document
        return max(low, tile.offset - self.left), min(high, tile.offset + tile.length + self.right)

    def _cut(self, tile: QueryTile, spans: tuple[KeySpan, ...]) -> list[Block]:
        begin, end = tile.offset, tile.offset + tile.length
        low, high = self._visible_keys(tile)
        all_see = max(low, end - 1 - self.left), min(high, begin + self.right + 1)
        if self.right == 0 and all_see[0] == low:
            regions = [(low, begin, "full"), (begin, end, "causal")]
        elif tile.length > 1 and all_see != (low, high) and all_see[1] - all_see[0] < 2 * tile.length:
            regions = [(low, high, "band")]  # the part without a mask is too short to pay for a kernel of its own
        else:
            regions = [
                (low, all_see[0], "band"), (*all_see, "full"), (all_see[1], high, "band")
            ]  # fmt: skip
        blocks: list[Block] = []
        for first, last, kind in regions:
            for piece in spans:
                start, stop = max(first, piece.offset), min(last, piece.offset + piece.length)
                if start < stop:
                    at, shift = piece.at + start - piece.offset, start - begin
                    _append(blocks, Block(at, stop - start, kind, shift, self.left, self.right))
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


def _join(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The union of [low, high) intervals as sorted intervals that do not touch."""
    joined: list[tuple[int, int]] = []
    for low, high in sorted(intervals):
        if joined and low <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(high, joined[-1][1])
        elif low < high:
            joined.append((low, high))
    return joined


def unite(parts: Iterable[Ranges]) -> Ranges:
    """The union of an owner's ranges."""
    joined = _join((start, start + length) for ranges in parts for start, length in ranges)
    return tuple((low, high - low) for low, high in joined)


def locate(ranges: Ranges, start: int) -> int:
    """Where a token of the owner lies in memory that holds ``ranges`` one after the other."""
    at = 0
    for first, length in ranges:
        if first <= start < first + length:
            return at + start - first
        at += length
    raise AssertionError(f"token {start} is not in {ranges}")


def count(ranges: Ranges) -> int:
    """The tokens of the ranges."""
    return sum(length for _, length in ranges)


@lru_cache(maxsize=16)
def plan_attention(
    runs: tuple[TokenRun, ...], lengths: tuple[int, ...], bounds: Bounds | None, causal: bool, window: tuple[int, int]
) -> AttentionPlan:
    """The plan of ranks that hold ``runs``, ``lengths`` tokens of each, with documents between ``bounds``
    (None: one).
    """
    left, right = (UNLIMITED if side < 0 else side for side in window)
    right = 0 if causal else right
    bounds = bounds or (0, sum(lengths))
    tiles: list[list[QueryTile]] = [[] for _ in lengths]
    for run in runs:
        position, end = run.offset, run.offset + run.length
        while position < end:
            document = document_at(bounds, position)
            stop = min(end, document[1])
            tile = _tile(document[1] - document[0], left, right)
            for offset in range(position, stop, tile):
                start = run.start + offset - run.offset
                tiles[run.rank].append(QueryTile(start, min(tile, stop - offset), offset, document))
            position = stop
    return AttentionPlan(lengths, runs, tiles, left, right)


def _tile(document: int, left: int, right: int) -> int:
    """Queries of a tile: all of them where a window does not bite, few where most scores would be masked."""
    if left >= document - 1 and (right == 0 or right >= document - 1):
        return document
    return min(max(min(left, document) + min(right, document), SMALLEST_TILE), LARGEST_TILE)


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
    method: str
    strides: tuple[int, ...] | None
    backward_strides: tuple[int, ...] | None
    backward: str | None
    grad_dtype: torch.dtype | None
    return_lse: bool
    gradients: tuple[bool, ...]
    local_first: bool = True  # see `KVExchange`
    sinks: bool = False
    value_size: int | None = None  # of a head of v; None: as q's
    softcap: float = 0.0  # 0: scores are not capped

    def plan(self, sequence: Sequence) -> AttentionPlan:
        """Who attends to what, worked out by everybody alone."""
        return plan_attention(sequence.runs, sequence.lengths, sequence.bounds, self.causal, self.window)
