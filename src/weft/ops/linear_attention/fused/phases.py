"""`ChunkForward` and `ChunkBackward` with Triton kernels: the same phases, arguments and results.

| phase           | kernels                               | reads                         | writes              |
|-----------------|---------------------------------------|-------------------------------|---------------------|
| forward         | chunk_states, scan_pieces             | k, v, g                       | states, `maps`      |
| forward.intra   | output_intra                          | q, k, v, g                    | partial o           |
| forward.finish  | scan_pieces, output_inter             | q, g, states, partial o       | o                   |
| backward        | chunk_states, scan_pieces             | q, do, g                      | dstates, `maps`     |
| backward.intra  | chunk_states, scan_pieces,            | q, k, v, g, do                | states, dq,         |
|                 | query_grads, key_grads, output_intra  |                               | partial dk, dv, dg  |
| backward.finish | scan_pieces, key_finish, output_inter | k, v, g, states, dstates,     | dk, dv, dg          |
|                 |                                       | partial dk, dv, dg            |                     |

Inputs are read where they lie, packed or strided. States, partial results and gate gradients are fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.ops.fused.operators import operators
from weft.ops.fused.tiling import Pieces, cut, gate_kind
from weft.ops.fused.tokens import Tokens, gate_grad, readable, sum_group
from weft.ops.scan.grid import Grid


@dataclass
class _States:
    """The states at the chunks of a call in one direction, from zero at each piece, and what the pieces add up to.

    ``states`` [M, B, HV, K, V], ``logs`` [M, B, HV, (K)]; ``sums`` and ``sum_logs`` the same for pieces. `scan` gives
    ``arriving`` [P, B, HV, K, V], what arrives at the pieces.
    """

    grid: Grid
    pieces: Pieces
    reverse: bool
    states: Tensor
    logs: Tensor | None
    sums: Tensor
    sum_logs: Tensor | None
    arriving: Tensor

    @classmethod
    def of(
        cls, grid: Grid, pieces: Pieces, x: Tensor, y: Tensor, g: Tensor | None, scale: float, reverse: bool
    ) -> _States:
        """Launch the kernel: x = k, y = v, or with ``reverse`` x = q, y = do."""
        inner = grid.batch, grid.value_heads
        log = () if g is None or g.dim() < 4 else (grid.key_dim,)

        def buffer(count: int, *shape: int) -> Tensor:
            return x.new_empty(count, *inner, *shape, dtype=torch.float32)

        states, sums, arriving = (
            buffer(count, grid.key_dim, grid.value_dim) for count in (pieces.chunks, pieces.count, pieces.count)
        )
        logs, sum_logs = (None if g is None else buffer(count, *log) for count in (pieces.chunks, pieces.count))
        if pieces.chunks:
            tables = [pieces.start, pieces.length, pieces.first, pieces.last]
            operators().chunk_states(x, y, g, tables, states, logs, sums, sum_logs, scale, grid.chunk, reverse)
        return cls(grid, pieces, reverse, states, logs, sums, sum_logs, arriving)

    def scan(self, boundary: Tensor | None) -> tuple[Tensor | None, Tensor]:
        """Let ``boundary`` [B*N, HV, K, V] (None: zero) go through the segments: log decay, and what comes out."""
        grid, segments = self.grid, len(self.grid.lengths)
        final = self.sums.new_empty(grid.batch * segments, *self.sums.shape[2:])
        log = None if self.sum_logs is None else self.sums.new_empty(grid.batch * segments, *self.sum_logs.shape[2:])
        if boundary is not None:
            boundary = boundary.detach().float().contiguous()
        if segments:
            tables = [self.pieces.segment_first, self.pieces.segment_last]
            operators().scan_pieces(self.sums, self.sum_logs, boundary, tables, self.arriving, final, log, self.reverse)
        return log, final


def _read(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, scale: float, lengths: list[int], chunk_size: int
) -> Tokens:
    grid = Grid(q, v, lengths, chunk_size)
    return Tokens(q, k, v, g, scale, grid, cut(grid, gate_kind(g), q.dtype))


class FusedForward:
    """`ChunkForward` with Triton kernels."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, scale: float, lengths: list[int], chunk_size: int
    ) -> None:
        self._in = _read(q, k, v, g, scale, lengths, chunk_size)
        self._states = _States.of(self._in.grid, self._in.pieces, self._in.k, self._in.v, self._in.g, 1.0, False)
        self.maps = self._states.scan(None)

    def intra(self) -> None:
        """The part of o that stays within chunks."""
        x = self._in
        self._partial = x.empty(x.grid.value_dim)
        if x.pieces.chunks:
            operators().output_intra(x.q, x.k, x.v, x.g, x.tables[:2], self._partial, x.scale, x.grid.chunk, False)

    def finish(self, entering: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add what the entering states and earlier chunks give: o [B, T, HV, V] and leaving states [B*N, HV, K, V]."""
        x, s = self._in, self._states
        leaving = self.maps[1].clone() if entering is None else s.scan(entering)[1]
        o = x.empty(x.grid.value_dim, x.v.dtype)
        if x.pieces.chunks:
            operators().output_inter(
                x.q, x.g, x.tables, s.states, s.logs, s.arriving, self._partial, o, x.scale, x.grid.chunk, False
            )
        return o, leaving


class FusedBackward:
    """`ChunkBackward` with Triton kernels."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, scale: float, lengths: list[int], chunk_size: int,
        entering: Tensor | None, do: Tensor,
    ) -> None:  # fmt: skip
        self._in = x = _read(q, k, v, g, scale, lengths, chunk_size)
        self._do = readable(do)
        self._grads = _States.of(x.grid, x.pieces, x.q, self._do, x.g, scale, True)
        self.maps = self._grads.scan(None)
        self._entering = entering

    def intra(self) -> None:
        """All that needs no gradient of the leaving states: dq, the within-chunk part of dk, dv, and of dg.

        The states between chunks are computed again for it, and kept for `finish` where there is a decay.
        """
        x = self._in
        self._states = s = _States.of(x.grid, x.pieces, x.k, x.v, x.g, 1.0, False)
        s.scan(self._entering)
        self._dq = x.empty(x.grid.key_dim, x.q.dtype if x.grid.group == 1 else torch.float32)
        self._dk, self._dv = x.empty(x.grid.key_dim), x.empty(x.grid.value_dim)
        self._row, self._col = x.empty_gate_parts(), x.empty_gate_parts()
        if x.pieces.chunks:
            run, chunk = operators(), x.grid.chunk
            run.query_grads(
                x.q, x.k, x.v, x.g, self._do, x.tables, s.states, s.logs, s.arriving, self._dq, self._row, x.scale,
                chunk, False,
            )  # fmt: skip
            run.key_grads(x.q, x.k, x.v, x.g, self._do, x.tables[:2], self._dk, self._col, x.scale, chunk, False)
            run.output_intra(x.q, x.k, self._do, x.g, x.tables[:2], self._dv, x.scale, chunk, True)

    def finish(self, grad_leaving: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
        """Add what the states' gradients give: dq, dk, dv, dg (None without decay), the entering states' gradient."""
        x, s, grads = self._in, self._states, self._grads
        entering = self.maps[1].clone() if grad_leaving is None else grads.scan(grad_leaving)[1]
        dk, dv = x.empty(x.grid.key_dim, self._dq.dtype), x.empty(x.grid.value_dim, x.v.dtype)
        dg = x.empty_gate_grad()
        if x.pieces.chunks:
            kept = (None, None, None) if x.g is None else (s.states, s.logs, s.arriving)
            came = grads.states, grads.logs, grads.arriving
            operators().key_finish(
                x.k, x.v, x.g, x.tables, *kept, *came, self._dk, self._row, self._col, dk, dg, x.grid.chunk
            )
            operators().output_inter(x.k, x.g, x.tables, *came, self._dv, dv, 1.0, x.grid.chunk, True)
        dq, dk = (sum_group(d, x.grid.heads).to(like.dtype) for d, like in ((self._dq, x.q), (dk, x.k)))
        return dq, dk, dv, None if dg is None else gate_grad(dg, x.g), entering
