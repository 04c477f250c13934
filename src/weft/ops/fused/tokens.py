"""A call's inputs as the kernels take them, its buffers, and gradients as the caller wants them."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.ops.fused.tiling import Pieces, gate_kind, tile
from weft.ops.scan.grid import LOG_FLOOR, Grid


def readable(x: Tensor) -> Tensor:
    """x itself if its last dimension lies together, as the kernels want it."""
    x = x.detach()
    return x if x.dim() == 1 or x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


class Tokens:
    """The inputs of one call, where its chunks and ``pieces`` lie, and buffers of its shapes."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, scale: float, grid: Grid, pieces: Pieces
    ) -> None:
        self.q, self.k, self.v, self.scale = readable(q), readable(k), readable(v), scale
        self.g = None if g is None else g.detach().contiguous() if g.dim() == 3 else readable(g)
        self.grid, self.pieces = grid, pieces
        self.tables = [self.pieces.start, self.pieces.length, self.pieces.piece]

    def empty(self, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A buffer for [B, T, HV, dim]."""
        return self.q.new_empty(self.grid.batch, self.grid.tokens, self.grid.value_heads, dim, dtype=dtype)

    def empty_states(self, count: int, *shape: int) -> Tensor:
        """A buffer for [count, B, HV, ...]: of chunks or pieces."""
        return self.q.new_empty(count, self.grid.batch, self.grid.value_heads, *shape, dtype=torch.float32)

    def empty_gate_parts(self, further: int = 0) -> Tensor | None:
        """A buffer for what tokens give to the gates: [B, T, HV, K], or [parts and ``further``, B, T, HV]."""
        if self.g is None or self.g.dim() == 4:
            return self.empty_gate_grad()
        keys, values = self.grid.key_dim, self.grid.value_dim
        block = tile("query_grads", self.grid.chunk, keys, values, gate_kind(self.g), self.q.dtype).keys
        shape = self.grid.batch, self.grid.tokens, self.grid.value_heads
        return self.q.new_empty(-(-keys // block) + further, *shape, dtype=torch.float32)

    def empty_gate_grad(self) -> Tensor | None:
        """A buffer for the gradient of the gates, [B, T, HV] or [B, T, HV, K]."""
        if self.g is None:
            return None
        return self.empty(self.grid.key_dim) if self.g.dim() == 4 else self.empty(1).squeeze(-1)


def sum_group(grad: Tensor, heads: int) -> Tensor:
    """[B, T, HV, D] -> [B, T, heads, D], summed over the value heads that share a head."""
    return grad if grad.shape[2] == heads else grad.unflatten(2, (heads, -1)).sum(3)


def gate_grad(dg: Tensor, g: Tensor | None) -> Tensor:
    """The gradient of g from that of every token and value head, [B, T, HV] or [B, T, HV, K]."""
    assert g is not None
    if g.dim() == 4:
        dg = sum_group(dg, g.shape[2])
    else:
        dg = sum_group(dg.unsqueeze(-1), g.shape[-1]).squeeze(-1)
        dg = dg.sum((0, 1), dtype=torch.float64) if g.dim() == 1 else dg
    # Below the floor the decay is zero whatever g is; this also gives -inf its exact gradient.
    return dg.masked_fill(g < LOG_FLOOR, 0.0).to(g.dtype)
