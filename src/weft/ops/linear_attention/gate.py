"""What a decay contributes to the chunked kernels: the interface, and the decays that are one number per head.

A gate owns q, k and g on the grid and answers for one tile at a time. Decays enter only as powers of two of sums of
non-positive logs: nothing divides by a decay, and exp2 has no slow path for the arguments that underflow.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.ops.scan.grid import LOG_FLOOR, Grid, Tile, level_blocks, level_sizes

LOG2E = math.log2(math.e)
# Blocks of the decay matrix up to this many tokens are exponentials of differences, larger ones outer products.
DIRECT = 16


@dataclass
class Gradients:
    """Gradients on the grid, [M, B, heads, C, D] in the arithmetic's dtype: written by intra, added to by finish."""

    q: Tensor
    k: Tensor
    v: Tensor


class Gate(ABC):
    """The decay of one call. ``total`` [M, B, HV, K or 1] is the log2 decay of whole chunks in fp64, None without."""

    per_key = False  # whether each key dimension has a decay of its own

    def __init__(self, grid: Grid, q: Tensor, k: Tensor, scale: float, total: Tensor | None) -> None:
        self.grid, self.scale = grid, scale
        self.q, self.k = grid.lay(q), grid.lay(k)
        self.total = total

    @abstractmethod
    def queries(self, tile: Tile) -> Tensor:
        """q_i decayed from the start of its chunk, [n, C, K]."""

    @abstractmethod
    def keys(self, tile: Tile) -> Tensor:
        """k_j decayed to the end of its chunk, [n, C, K]."""

    @abstractmethod
    def scores(self, tile: Tile) -> Tensor:
        """scale * q_i k_j^T decayed from j to i, lower triangle, [n, C, C]."""

    @abstractmethod
    def intra_backward(self, tile: Tile, v: Tensor, do: Tensor, state: Tensor, grads: Gradients) -> None:
        """Write dq of a tile and the within-chunk part of dk and dv.

        v, do [n, C, V] are dense; ``state`` [n, K, V] enters the chunks.
        """

    @abstractmethod
    def inter_backward(self, tile: Tile, v: Tensor, state: Tensor, grad: Tensor, grads: Gradients) -> None:
        """Add to dk and dv what comes from later chunks: ``grad`` [n, K, V] of the states leaving the chunks.

        v [M, B, HV, C, V] is on the grid; ``state`` [n, K, V] enters the chunks.
        """

    @abstractmethod
    def gate_grad(self) -> Tensor | None:
        """The gradient of g, complete once all tiles have been through both backward steps."""

    # Decays between chunks, from ``total``.

    def _factor(self, log: Tensor) -> Tensor:
        return log.exp2().to(self.grid.dtype).unsqueeze(-1)

    def chunk_decay(self) -> Tensor | None:
        """Decay of whole chunks, [M, B, HV, K or 1, 1]."""
        return None if self.total is None else self._factor(self.total)

    def to_border(self, reverse: bool = False) -> Tensor | None:
        """Decay from the segment's start to the chunk's, or ``reverse`` between their ends, [M, B, HV, K or 1, 1]."""
        if self.total is None:
            return None
        log = torch.zeros_like(self.total)
        for first, last in self.grid.spans:
            if reverse:
                log[first : max(first, last - 1)] = self.total[first + 1 : last].flip(0).cumsum(0).flip(0)
            else:
                torch.cumsum(self.total[first : max(first, last - 1)], 0, out=log[first + 1 : last])
        return self._factor(log)

    def log_decay(self) -> Tensor | None:
        """Natural log decay of whole segments in the arithmetic's dtype: [B*N, HV, K], or [B*N, HV] of one per head."""
        if self.total is None:
            return None
        logs = self.total.new_zeros(len(self.grid.spans), *self.total.shape[1:])
        for s, (first, last) in enumerate(self.grid.spans):
            logs[s] = self.total[first:last].sum(0)
        joined = self.grid.join_states((logs / LOG2E).to(self.grid.dtype))
        return joined if self.per_key else joined.squeeze(-1)


class ScalarGate(Gate):
    """No decay, a constant per head ([H] or [HV]) or a gate per token and head ([B, T, H] or [B, T, HV]).

    Keeps fp64 tables of one number per token and head; the C x C decay matrix exists per tile (per head if constant).
    """

    def __init__(self, grid: Grid, q: Tensor, k: Tensor, g: Tensor | None, scale: float) -> None:
        self._g = None if g is None else g.detach()
        # The decay matrix where all chunks share it, [C, C] or [HV, C, C], else a buffer for that of a tile.
        self._matrix = torch.ones(grid.chunk, grid.chunk, dtype=grid.dtype, device=q.device).tril()
        self._levels: list[tuple[Tensor, Tensor]] = []
        total = None
        if self._g is not None:
            self._log = self._cumulate(grid, self._g)
            total = self._log[..., -1:]
            self._from_start = self._log.exp2().to(grid.dtype).unsqueeze(-1)
            self._to_end = (total - self._log).exp2().to(grid.dtype).unsqueeze(-1)
            if self._g.dim() == 1:
                steps = torch.arange(grid.chunk, device=q.device, dtype=torch.float64)
                apart = (steps[:, None] - steps[None, :]).clamp(min=0)
                self._matrix = (apart * self._head_log(grid, self._g)[:, None, None]).exp2().to(grid.dtype).tril()
            else:
                sizes = [size for size in level_sizes(grid.chunk) if size >= DIRECT]
                self._levels = [self._middle_decays(size, grid.dtype) for size in sizes]
                count = max((tile.shape[0] * tile.shape[1] for tile in grid.tiles), default=0) * grid.value_heads
                self._matrix = self._matrix.repeat(count, 1, 1)
                self._blocks = [level_blocks(self._matrix, size) for size in sizes]
                size = min(DIRECT, grid.chunk)
                square = self._matrix.unflatten(1, (-1, size)).unflatten(3, (-1, size))
                self._diagonal = square.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)  # [n, blocks, size, size]
                self._causal = torch.full((size, size), -math.inf, dtype=grid.dtype, device=q.device).triu(1)
            # Gradient of the gate as tables: what token i receives for all logs up to its own (row), what token j
            # gives to all logs after its own (col), and what passes through the whole chunk.
            self._row = torch.zeros_like(self._log)
            self._col = torch.zeros_like(self._log)
            self._whole = torch.zeros_like(total)
        super().__init__(grid, q, k, scale, total)

    @staticmethod
    def _head_log(grid: Grid, g: Tensor) -> Tensor:
        """g [..., H or HV] in log2, fp64, bounded below, one entry per value head."""
        log = g.to(torch.float64).clamp(min=LOG_FLOOR) * LOG2E
        return log.repeat_interleave(grid.value_heads // g.shape[-1], -1)

    def _cumulate(self, grid: Grid, g: Tensor) -> Tensor:
        """Sum of the logs of a chunk up to and with token i, [M, B, HV, C]."""
        log = self._head_log(grid, g).expand(grid.batch, grid.tokens, -1)
        return grid.lay(log.unsqueeze(-1)).squeeze(-1).contiguous().cumsum(-1)

    def queries(self, tile: Tile) -> Tensor:
        if self._g is None:
            return self.grid.take("q", self.q, tile)
        return self.grid.take_times("q", self.q, self.grid.at(self._from_start, tile), tile)

    def keys(self, tile: Tile) -> Tensor:
        if self._g is None:
            return self.grid.take("k", self.k, tile)
        return self.grid.take_times("k", self.k, self.grid.at(self._to_end, tile), tile)

    def _middle_decays(self, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Decays from the middle of blocks of 2 * size tokens, and to it: [M, B, HV, blocks, size, 1], [..., 1, size].

        Of the logs only differences count: after a strong gate these are small, the logs are not, hence fp64.
        """
        halves = self._log.unflatten(-1, (-1, 2, size))
        middle = halves[..., 0, -1:]
        since, until = (halves[..., 1, :] - middle).exp2(), (middle - halves[..., 0, :]).exp2()
        return since.to(dtype).unsqueeze(-1), until.to(dtype).unsqueeze(-2)

    def _decay_matrix(self, tile: Tile) -> Tensor:
        """Decay from j to i with zeros above the diagonal, to multiply [..., HV, C, C] with.

        The pairs over the middle of a block are an outer product, and every pair is over the middle of one block; only
        small blocks on the diagonal are not cut further.
        """
        if self._g is None or self._g.dim() == 1:
            return self._matrix
        for blocks, (since, until) in zip(self._blocks, self._levels, strict=True):
            since, until = self.grid.at(since, tile), self.grid.at(until, tile)
            torch.mul(since, until, out=blocks[: since.shape[0]])
        size, count = self._causal.shape[0], tile.shape[0] * tile.shape[1]
        log = self.grid.at(self._log, tile).unflatten(1, (-1, size))
        apart = self.grid.buffer("apart", *log.shape, size)
        torch.sub(log.unsqueeze(-1), log.unsqueeze(-2), out=apart)  # in fp64, rounded on the way out
        torch.exp2(apart.add_(self._causal), out=self._diagonal[: log.shape[0]])
        return self._matrix.unflatten(0, (-1, self.grid.value_heads))[:count]

    def _scores(self, q: Tensor, k: Tensor, decay: Tensor) -> Tensor:
        product = self.grid.buffer("scores", q.shape[0], q.shape[1], q.shape[1])
        torch.baddbmm(product, q, k.mT, beta=0, alpha=self.scale, out=product)
        product.unflatten(0, (-1, self.grid.value_heads)).mul_(decay)
        return product

    def scores(self, tile: Tile) -> Tensor:
        q, k = self.grid.take("q", self.q, tile), self.grid.take("k", self.k, tile)
        return self._scores(q, k, self._decay_matrix(tile))

    def intra_backward(self, tile: Tile, v: Tensor, do: Tensor, state: Tensor, grads: Gradients) -> None:
        grid = self.grid
        q, k = grid.take("q", self.q, tile), grid.take("k", self.k, tile)
        decay = self._decay_matrix(tile)
        scores = self._scores(q, k, decay)
        dense = grid.buffer("dense_v", *v.shape)
        grid.put(grads.v, torch.bmm(scores.mT, do, out=dense), tile, add=False)
        grad = torch.bmm(do, v.mT, out=grid.buffer("grad", *scores.shape))
        dq = grid.buffer("dense_k", *q.shape)
        torch.baddbmm(dq, do, state.mT, beta=0, alpha=self.scale, out=dq)
        if self._g is not None:
            # d loss / d(log_i - log_j). The diagonal does not decay; left in, it would only cancel, and with strong
            # gates it is all there is to lose accuracy to.
            weight = scores.mul_(grad)
            weight.diagonal(dim1=1, dim2=2).zero_()
            row = weight.sum(2).sub_(weight.sum(1))
            dq.mul_(grid.at(self._from_start, tile))
            row.add_(torch.mul(dq, q, out=grid.buffer("dense_v", *q.shape)).sum(-1))
            grid.at(self._row, tile).copy_(row)
        grad.unflatten(0, (-1, grid.value_heads)).mul_(decay)
        grid.put(grads.q, dq.baddbmm_(grad, k, alpha=self.scale), tile, add=False)
        torch.baddbmm(dq, grad.mT, q, beta=0, alpha=self.scale, out=dq)
        grid.put(grads.k, dq, tile, add=False)

    def inter_backward(self, tile: Tile, v: Tensor, state: Tensor, grad: Tensor, grads: Gradients) -> None:
        grid = self.grid
        decayed = self.keys(tile)
        dense = grid.buffer("dense_v", *decayed.shape[:2], grid.value_dim)
        grid.put(grads.v, torch.bmm(decayed, grad, out=dense), tile, add=True)
        dense = torch.bmm(grid.take("v", v, tile), grad.mT, out=grid.buffer("dense_k", *decayed.shape))
        if self._g is not None:
            grid.at(self._col, tile).copy_(decayed.mul_(dense).sum(-1))
            dense.mul_(grid.at(self._to_end, tile))
            both = torch.mul(state, grad, out=grid.buffer("state", *state.shape))
            grid.at(self._whole, tile).copy_(both.flatten(1).sum(-1, keepdim=True))
        grid.put(grads.k, dense, tile, add=True)

    def gate_grad(self) -> Tensor | None:
        g = self._g
        if g is None:
            return None
        grid = self.grid
        assert self.total is not None
        grad = self._row.flip(-1).cumsum(-1).flip(-1) + self._whole * self.total.exp2()
        grad[..., 1:] += self._col[..., :-1].cumsum(-1)
        per_token = grid.restore(grad.unsqueeze(-1), torch.float64)  # [B, T, HV, 1]
        per_token = per_token.unflatten(2, (g.shape[-1], grid.value_heads // g.shape[-1])).sum((-1, -2))
        dg = per_token.sum((0, 1)) if g.dim() == 1 else per_token
        # Below the floor the decay is zero whatever g is; this also gives -inf its exact gradient.
        return dg.masked_fill(g < LOG_FLOOR, 0.0).to(g.dtype)
