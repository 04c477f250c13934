"""The halo of a convolution: the tokens before a segment, from the ranks that hold them, and their gradients back.

A *window* is the k-1 rows before a position of a document. A segment (the tokens of a document in one run) needs the
window before its first token, and a final state is the window at the end of a document, on every rank. Rows before the
document's beginning are those of its initial state, or zero.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from weft.comm import Call, Pending
from weft.ops.sequence.deal import Bounds
from weft.ops.sequence.runs import Runs


@dataclass(frozen=True)
class Window:
    """The rows before token ``offset`` of ``document``. Of a segment of ``length`` tokens at ``start`` in local memory;
    a final state has none.
    """

    document: int
    offset: int
    start: int = 0
    length: int = 0


@dataclass(frozen=True)
class Piece:
    """Tokens ``start : start + length`` of ``rank``, as rows ``at : at + length`` of window number ``window``."""

    rank: int
    start: int
    length: int
    window: int
    at: int


@dataclass(frozen=True)
class HaloPlan:
    """Windows of this rank and what they are made of, by source; and the pieces that it sends, by destination."""

    windows: tuple[Window, ...]
    coming: tuple[tuple[Piece, ...], ...]
    going: tuple[tuple[Piece, ...], ...]

    @property
    def segments(self) -> list[Window]:
        """The windows of this rank's segments; they come before those of final states."""
        return [window for window in self.windows if window.length]


@lru_cache(maxsize=64)
def plan_halo(runs: Runs, size: int, bounds: Bounds | None, rows: int, rank: int, finals: bool) -> HaloPlan:
    """The halo of ``rows`` tokens. Every rank plans for all, so that both ends of a message know what is in it."""
    bounds = (0, runs[-1].offset + runs[-1].length) if bounds is None else bounds
    windows: list[list[Window]] = [[] for _ in range(size)]
    for run in runs:
        first = max(bisect_right(bounds, run.offset) - 1, 0)
        for document in range(first, len(bounds) - 1):
            begin, end = max(bounds[document], run.offset), min(bounds[document + 1], run.offset + run.length)
            if bounds[document] >= run.offset + run.length:
                break
            if begin < end:
                start = run.start + begin - run.offset
                windows[run.rank].append(Window(document, begin - bounds[document], start, end - begin))
    if finals:
        ends = [Window(document, end - begin) for document, (begin, end) in enumerate(pairwise(bounds))]
        for some in windows:
            some += ends
    pieces = [[piece for number, window in enumerate(some) for piece in _pieces(runs, bounds, number, window, rows)]
              for some in windows]  # fmt: skip
    ranks = range(size)
    coming = tuple(tuple(piece for piece in pieces[rank] if piece.rank == source) for source in ranks)
    going = tuple(tuple(piece for piece in pieces[to] if piece.rank == rank) for to in ranks)
    return HaloPlan(tuple(windows[rank]), coming, going)


def _pieces(runs: Runs, bounds: Bounds, number: int, window: Window, rows: int) -> list[Piece]:
    """The tokens that a window holds, in order."""
    begin = bounds[window.document]
    stop = begin + window.offset
    low = max(begin, stop - rows)
    found = []
    for run in runs[max(bisect_right(runs, low, key=lambda run: run.offset) - 1, 0) :]:
        if run.offset >= stop:
            break
        a, b = max(low, run.offset), min(stop, run.offset + run.length)
        if a < b:
            found.append(Piece(run.rank, run.start + a - run.offset, b - a, number, a - stop + rows))
    return found


def fetch(
    call: Call, plan: HaloPlan, x: Tensor, initial: Tensor | None, rows: int, wide: torch.dtype
) -> Pending[Tensor]:
    """The windows of this rank, [W, B, rows, D]. x: [B, T, D]; initial: [N, B, rows, D]."""
    batch, _, dim = x.shape
    halo = torch.zeros(len(plan.windows), batch, rows, dim, dtype=wide, device=x.device)
    for number, window in enumerate(plan.windows):
        if initial is not None and window.offset < rows:
            halo[number, :, : rows - window.offset] = initial[window.document, :, window.offset :]
    for piece in plan.coming[call.rank]:
        halo[piece.window, :, piece.at : piece.at + piece.length] = x[:, piece.start : piece.start + piece.length]
    messages = {peer: x.new_empty(batch, _count(plan.coming[peer]), dim) for peer in call.others if plan.coming[peer]}
    sends = [
        (peer, torch.cat([x[:, piece.start : piece.start + piece.length] for piece in plan.going[peer]], dim=1))
        for peer in call.others
        if plan.going[peer]
    ]
    pending = call.exchange(sends, list(messages.items()))

    def finish() -> Tensor:
        pending.wait()
        for peer, message in messages.items():
            parts = message.split([piece.length for piece in plan.coming[peer]], dim=1)
            for piece, part in zip(plan.coming[peer], parts, strict=True):
                halo[piece.window, :, piece.at : piece.at + piece.length] = part
        return halo

    return Pending(finish)


def give_back(call: Call, plan: HaloPlan, grads: Tensor) -> Pending[list[tuple[Piece, Tensor]]]:
    """Gradients of this rank's tokens in all ranks' windows, by rank; ``grads`` are those of its own windows."""
    _, batch, _, dim = grads.shape

    def of(piece: Piece) -> Tensor:
        return grads[piece.window, :, piece.at : piece.at + piece.length]

    messages = {peer: grads.new_empty(batch, _count(plan.going[peer]), dim) for peer in call.others if plan.going[peer]}
    sends = [
        (peer, torch.cat([of(piece) for piece in plan.coming[peer]], dim=1))
        for peer in call.others
        if plan.coming[peer]
    ]
    pending = call.exchange(sends, list(messages.items()))

    def finish() -> list[tuple[Piece, Tensor]]:
        pending.wait()
        found = []
        for peer, pieces in enumerate(plan.going):
            if peer == call.rank:
                found += [(piece, of(piece)) for piece in pieces]
            elif pieces:
                parts = messages[peer].split([piece.length for piece in pieces], dim=1)
                found += list(zip(pieces, parts, strict=True))
        return found

    return Pending(finish)


def _count(pieces: tuple[Piece, ...]) -> int:
    return sum(piece.length for piece in pieces)
