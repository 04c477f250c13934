"""Local chunked linear attention in phases: S_t = exp(g_t) S_{t-1} + k_t^T v_t, o_t = scale q_t S_t.

The state that enters a rank arrives late, by a scan over the ranks. So each direction has three phases: the constructor
reduces every segment to the affine map the scan needs (`maps`), `intra` does all that needs no entering state while the
scan travels, and `finish` takes what arrived. Phases run in this order, each once.

Shapes: q, k [B, T, H, K]; v, o [B, T, HV, V] with HV a multiple of H; g None | [H or HV] | [B, T, H or HV] |
[B, T, H or HV, K], log decays, never positive, -inf allowed. `lengths` cuts T into N segments with states of their own
(N > 1 needs B = 1); states are [B*N, HV, K, V] in fp32, fp64 for fp64 inputs. A state given as None is zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.ops.linear_attention.gate import Gate, Gradients, ScalarGate
from weft.ops.linear_attention.gate_vector import VectorGate
from weft.ops.scan import Affine
from weft.ops.scan.grid import Grid


def _gate(grid: Grid, q: Tensor, k: Tensor, g: Tensor | None, scale: float) -> Gate:
    if g is not None and g.dim() == 4:
        return VectorGate(grid, q, k, g, scale)
    return ScalarGate(grid, q, k, g, scale)


class ChunkForward:
    """Forward of one rank. Keeps the inputs, the states between chunks and, after `intra`, the output so far.

    ``maps`` is (log decay [B*N, HV] or [B*N, HV, K] for vector gates, None without decay; leaving state from a zero
    start [B*N, HV, K, V]).
    """

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, scale: float, lengths: list[int], chunk_size: int
    ) -> None:
        self._dtype = v.dtype
        self._grid = Grid(q, v, lengths, chunk_size)
        self._gate = _gate(self._grid, q, k, g, scale)
        self._v = self._grid.lay(v)
        self._states = self._grid.empty_states()
        leaving, decay = self._grid.zero_states(), self._gate.chunk_decay()
        for tile in self._grid.tiles:
            v_tile = self._grid.take("v", self._v, tile)
            torch.bmm(self._gate.keys(tile).mT, v_tile, out=self._grid.at(self._states, tile, 1))
            self._grid.scan(self._states, decay, None, leaving, tile)
        self.maps = self._gate.log_decay(), self._grid.join_states(leaving)

    def intra(self) -> None:
        """The part of o that stays within chunks."""
        grid = self._grid
        self._o = grid.empty_tokens(grid.value_heads, grid.value_dim)
        for tile in grid.tiles:
            scores, v = self._gate.scores(tile), grid.take("v", self._v, tile)
            grid.put(self._o, torch.bmm(scores, v, out=grid.buffer("dense_v", *v.shape)), tile, add=False)

    def finish(self, entering: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add what the entering states and earlier chunks give: o [B, T, HV, V] and leaving states [B*N, HV, K, V]."""
        grid, gate = self._grid, self._gate
        start, decay = grid.split_states(entering), gate.to_border()
        for tile in grid.tiles:
            grid.add_late(self._states, decay, start, tile)
            q = gate.queries(tile)
            o = grid.buffer("dense_v", q.shape[0], q.shape[1], grid.value_dim)
            torch.baddbmm(o, q, grid.at(self._states, tile), beta=0, alpha=gate.scale, out=o)
            grid.put(self._o, o, tile, add=True)
        grid.give_back(self._states)
        return grid.restore(self._o, self._dtype), Affine.of(self.maps[1], self.maps[0]).apply(entering)


class ChunkBackward:
    """Backward of one rank, from the inputs, the states that entered its segments and the gradient of o.

    ``maps`` is (the log decay of `ChunkForward.maps`; gradient of the entering states if that of the leaving ones is
    zero, [B*N, HV, K, V]). Keeps the states between chunks, their gradients and the gradients so far.
    """

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, scale: float, lengths: list[int], chunk_size: int,
        entering: Tensor | None, do: Tensor,
    ) -> None:  # fmt: skip
        self._dtypes = q.dtype, k.dtype, v.dtype
        self._grid = grid = Grid(q, v, lengths, chunk_size)
        self._gate = gate = _gate(grid, q, k, g, scale)
        self._v, self._do = grid.lay(v), grid.lay(do)
        self._grad_states = grid.empty_states()
        grad_entering, decay = grid.zero_states(), gate.chunk_decay()
        for tile in reversed(grid.tiles):
            do_tile = grid.take("v", self._do, tile)
            sums = grid.at(self._grad_states, tile)
            torch.baddbmm(sums, gate.queries(tile).mT, do_tile, beta=0, alpha=scale, out=sums)
            grid.scan(self._grad_states, decay, None, grad_entering, tile, reverse=True)
        self.maps = gate.log_decay(), grid.join_states(grad_entering)
        self._entering = entering

    def intra(self) -> None:
        """All that needs no gradient of the leaving states: dq, the within-chunk part of dk, dv, and of dg.

        The states between chunks are computed again for it, and kept for `finish`.
        """
        grid, gate = self._grid, self._gate
        self._states = grid.empty_states()
        self._grads = Gradients(
            grid.empty_tokens(grid.heads, grid.key_dim),
            grid.empty_tokens(grid.heads, grid.key_dim),
            grid.empty_tokens(grid.value_heads, grid.value_dim),
        )
        start, decay = grid.split_states(self._entering), gate.chunk_decay()
        for tile in grid.tiles:
            v, do = grid.take("v", self._v, tile), grid.take("do", self._do, tile)
            torch.bmm(gate.keys(tile).mT, v, out=grid.at(self._states, tile, 1))
            grid.scan(self._states, decay, start, None, tile)
            gate.intra_backward(tile, v, do, grid.at(self._states, tile), self._grads)

    def finish(self, grad_leaving: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
        """Add what the states' gradients give: dq, dk, dv, dg (None without decay), the entering states' gradient."""
        grid, gate, grads = self._grid, self._gate, self._grads
        arrived, decay = grid.split_states(grad_leaving), gate.to_border(reverse=True)
        for tile in grid.tiles:
            grid.add_late(self._grad_states, decay, arrived, tile, shift=1)
            state, grad = grid.at(self._states, tile), grid.at(self._grad_states, tile, 1)
            gate.inter_backward(tile, self._v, state, grad, grads)
        grid.give_back(self._states)
        grid.give_back(self._grad_states)
        dq, dk, dv = (
            grid.restore(grad, dtype) for grad, dtype in zip((grads.q, grads.k, grads.v), self._dtypes, strict=True)
        )
        return dq, dk, dv, gate.gate_grad(), Affine.of(self.maps[1], self.maps[0]).apply(grad_leaving)
