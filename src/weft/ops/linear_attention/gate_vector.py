"""Gates with one decay per key dimension, [B, T, H or HV, K].

Between two tokens the decay differs per key dimension, so scores are no product of two matrices with one decay on top.
The chunk is halved instead, again and again: for the pairs (i in the second half, j in the first) of a block the decay
factors at the middle into a factor on q_i and a factor on k_j, neither above one, and the pairs are one product.
Going from blocks of h to blocks of 2h tokens multiplies q of the second half by the decay of the first half, and k of
the first half by the decay of the second: only products of decays, so nothing cancels and nothing overflows, and after
the last level q and k are those that meet the states between chunks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.ops.linear_attention.gate import LOG2E, Gate, Gradients
from weft.ops.scan.grid import LOG_FLOOR, Grid, Tile, halves, level_blocks, level_sizes, times, times_transposed


class VectorGate(Gate):
    """A gate per token, head and key dimension. Keeps g on the grid and its chunk totals; all else exists per tile."""

    per_key = True

    def __init__(self, grid: Grid, q: Tensor, k: Tensor, g: Tensor, scale: float) -> None:
        self._dtype, self._g = g.dtype, grid.lay(g)
        self._dg: Tensor | None = None
        shape = grid.chunks, grid.batch, grid.value_heads, grid.key_dim
        total = torch.zeros(shape, dtype=torch.float64, device=q.device)
        super().__init__(grid, q, k, scale, total)
        for tile in grid.tiles:
            grid.at(total, tile).copy_(self._log(tile).sum(1))
        self.total = self._total = total

    def _log(self, tile: Tile) -> Tensor:
        """g of a tile in log2, bounded below, [n, C, K]."""
        return self.grid.take("g", self._g, tile).clamp_(min=LOG_FLOOR).mul_(LOG2E)

    def _decay(self, tile: Tile) -> Tensor:
        return self._log(tile).exp2_()

    def queries(self, tile: Tile) -> Tensor:
        decay = self._decay(tile)
        return _decay_half(self.grid.take("q", self.q, tile).mul_(decay), decay, 1)

    def keys(self, tile: Tile) -> Tensor:
        return _decay_half(self.grid.take("k", self.k, tile), self._decay(tile), 0)

    def _scores(self, tile: Tile) -> tuple[Tensor, list[Level], Tensor]:
        """The scores, what they were made of, and the decays exp(g) of the tile."""
        grid = self.grid
        q, k, decay = grid.take("q", self.q, tile), grid.take("k", self.k, tile), self._decay(tile)
        scores = grid.buffer("scores", q.shape[0], grid.chunk, grid.chunk).zero_()
        scores.diagonal(dim1=1, dim2=2).copy_(torch.mul(q, k, out=grid.buffer("dense_k", *q.shape)).sum(-1))
        levels = _levels(q.mul_(decay), k, decay)
        for level in levels:
            level_blocks(scores, level.size).copy_(times_transposed(level.q, level.k))
        return scores.mul_(self.scale), levels, decay

    def scores(self, tile: Tile) -> Tensor:
        return self._scores(tile)[0]

    def intra_backward(self, tile: Tile, v: Tensor, do: Tensor, state: Tensor, grads: Gradients) -> None:
        grid = self.grid
        scores, levels, decay = self._scores(tile)
        dense = grid.buffer("dense_v", *v.shape)
        grid.put(grads.v, torch.bmm(scores.mT, do, out=dense), tile, add=False)
        grad = torch.baddbmm(scores, do, v.mT, beta=0, alpha=self.scale, out=scores)
        # Above the last level, q decayed from the start of the chunk meets the state.
        dq = grid.buffer("dense_k", *decay.shape)
        torch.baddbmm(dq, do, state.mT, beta=0, alpha=self.scale, out=dq)
        dk, dlog = _levels_backward(levels, grad, dq)
        q, k = grid.take("q", self.q, tile), grid.take("k", self.k, tile)
        dq.mul_(decay)
        grid.put(self._gate_grad_tokens(), dlog.addcmul_(dq, q), tile, add=False)
        diagonal = grad.diagonal(dim1=1, dim2=2).unsqueeze(-1)
        grid.put(grads.q, dq.addcmul_(diagonal, k), tile, add=False)
        grid.put(grads.k, dk.addcmul_(diagonal, q), tile, add=False)

    def inter_backward(self, tile: Tile, v: Tensor, state: Tensor, grad: Tensor, grads: Gradients) -> None:
        grid = self.grid
        decay = self._decay(tile)
        reach = _decay_half(torch.ones_like(decay), decay, 0)
        keys = grid.take("k", self.k, tile).mul_(reach)
        dense = grid.buffer("dense_v", *keys.shape[:2], grid.value_dim)
        grid.put(grads.v, torch.bmm(keys, grad, out=dense), tile, add=True)
        dk = torch.bmm(grid.take("v", v, tile), grad.mT, out=grid.buffer("dense_k", *keys.shape))
        # What token j gives to the state counts for all logs after its own; the rest of the state for all logs.
        given = keys.mul_(dk)
        grid.put(grads.k, dk.mul_(reach), tile, add=True)
        whole = torch.mul(state, grad, out=grid.buffer("state", *state.shape)).sum(-1)
        whole.mul_(grid.at(self._total, tile).exp2())
        after = grid.zeros(grid.chunk, grid.chunk).fill_(1.0).tril(-1).expand(keys.shape[0], -1, -1)
        grid.put(self._gate_grad_tokens(), torch.baddbmm(whole.unsqueeze(1), after, given), tile, add=True)

    def _gate_grad_tokens(self) -> Tensor:
        if self._dg is None:
            self._dg = self.grid.empty_tokens(self._g.shape[2], self.grid.key_dim)
        return self._dg

    def gate_grad(self) -> Tensor | None:
        # Where exp(g) is zero every term of this is exactly zero, also for g = -inf.
        return self.grid.restore(self._gate_grad_tokens(), self._dtype)


class Level:
    """Blocks of 2 * size tokens: q of their second halves and k of their first, decayed to the middle.

    ``q`` and ``k`` are [n, blocks, size, K], ``first`` and ``second`` are the decays of the halves, [n, blocks, 1, K].
    """

    def __init__(self, size: int, q: Tensor, k: Tensor, decay: Tensor) -> None:
        self.size = size
        self.q, self.k = halves(q, size)[1].clone(), halves(k, size)[0].clone()
        parts = decay.unflatten(1, (-1, 2, 1))
        self.first, self.second = parts[:, :, 0], parts[:, :, 1]


def _decay_half(x: Tensor, decay: Tensor, half: int) -> Tensor:
    """x [n, C, K] times the decays before it in the chunk (``half`` 1), or after it (``half`` 0); in place.

    On every level one half of each block is multiplied by the decay of the other. q has its own decay already.
    """
    for size in level_sizes(x.shape[1]):
        parts = decay.unflatten(1, (-1, 2, 1))
        halves(x, size)[half].mul_(parts[:, :, 1 - half])
        decay = parts[:, :, 0, 0] * parts[:, :, 1, 0]
    return x


def _levels(q: Tensor, k: Tensor, decay: Tensor) -> list[Level]:
    """All levels from blocks of 2 tokens to the chunk; q [n, C, K], times its own decay, and k are overwritten."""
    levels: list[Level] = []
    for size in level_sizes(q.shape[1]):
        level = Level(size, q, k, decay)
        levels.append(level)
        halves(q, size)[1].mul_(level.first)
        halves(k, size)[0].mul_(level.second)
        decay = (level.first * level.second).squeeze(2)
    return levels


def _levels_backward(levels: list[Level], grad: Tensor, dq: Tensor) -> tuple[Tensor, Tensor]:
    """The levels in reverse, given the gradient of the scores [n, C, C].

    ``dq`` [n, C, K] is the gradient of q after the last level and becomes, in place, that of q times its own decay.
    Returns the gradients of k and of the logs (of a log by its own token's q excepted), [n, C, K]. The decay of a half
    receives what the q or k it multiplied in the other half, times its gradient, sums to.
    """
    dk = torch.zeros_like(dq)
    dlog = dq.new_zeros(dq.shape[0], 1, dq.shape[2])
    for level in reversed(levels):
        dq_half, dk_half = halves(dq, level.size)[1], halves(dk, level.size)[0]
        dq_half.mul_(level.first)
        dlog_first = dlog + (dq_half * level.q).sum(2)
        if level is not levels[-1]:  # no k has been through the last level yet
            dk_half.mul_(level.second)
            dlog = dlog + (dk_half * level.k).sum(2)
        dlog = torch.stack([dlog_first, dlog], 2).flatten(1, 2)
        block = level_blocks(grad, level.size)
        dq_half.add_(times(block, level.k))
        dk_half.add_(times(block.mT, level.q))
    return dk, dlog
