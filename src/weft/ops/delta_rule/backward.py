"""The backward of `weft.ops.delta_rule.chunk`, in the same phases. With dS' the gradient of what leaves a chunk:

dN = scale tril(q k^T)^T do + (k e^{G_C - G}) dS'
dS = e^{G_C} dS' + scale (q e^G)^T do - W^T dN
Y = (I + A)^-T dN      dA = -tril(Y N^T, -1)      dv = beta Y      d(beta k e^G) = -Y S^T
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.ops.delta_rule.chunk import ChunkStates, Inputs, TileFactors
from weft.ops.scan.grid import Grid, Tile


class ChunkBackward:
    """Backward of one run of a rank, from its inputs, the states that entered its segments and the gradient of o.

    ``transition`` and ``left`` are M and `ChunkForward.left` where a state came from another run. ``maps`` is then
    (M^T; left^T do), what the gradient of the leaving state becomes on its way to the entering one: it is ready before
    any other work.
    """

    def __init__(
        self, inputs: Inputs, scale: float, lengths: list[int], chunk_size: int, entering: Tensor | None, do: Tensor,
        left: Tensor | None, transition: Tensor | None,
    ) -> None:  # fmt: skip
        self._grid = grid = Grid(inputs.q, inputs.v, lengths, chunk_size)
        self._inputs, self._scale, self._entering, self._do = inputs, scale, entering, grid.lay(do)
        self.maps: tuple[Tensor | None, Tensor] = None, grid.join_states(grid.zero_states())
        if left is not None and transition is not None:
            self.maps = transition.mT, left.permute(0, 2, 3, 1) @ do.to(grid.dtype).transpose(1, 2)

    def intra(self) -> None:
        """All that needs no gradient of the leaving states: the forward again, and what do alone gives."""
        grid, laid = self._grid, self._inputs.lay(self._grid)
        start = grid.split_states(self._entering)
        chain = ChunkStates(grid, grid.zero_states() if start is None else start)
        self._parts: list[TileBackward] = []
        for tile in grid.tiles:
            factors = TileFactors(grid, tile, laid)
            q, do = grid.copy(laid.q, tile), grid.copy(self._do, tile)
            self._parts.append(TileBackward(factors, q, do, *chain.advance(factors), self._scale))

    def finish(self, grad_leaving: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor]:
        """dq, dk, dv, dbeta, dg (None without decay) and the gradient of the entering states."""
        grid, given = self._grid, self._inputs
        arrived = grid.split_states(grad_leaving)
        chain = GradientStates(grid, grid.zero_states() if arrived is None else arrived)
        heads, logs = grid.value_heads, 0 if given.g is None else 1 if given.g.dim() == 3 else grid.key_dim
        shared, values = grid.empty_tokens(grid.heads, 2 * grid.key_dim), grid.empty_tokens(heads, grid.value_dim)
        rates = grid.empty_tokens(heads, 1 + logs)
        for part in reversed(self._parts):
            dq, dk, dv, rate = part.gradients(*chain.go_back(part))
            tile = part.factors.tile
            grid.put(shared, torch.cat([dq, dk], dim=-1), tile, add=False)
            grid.put(values, dv, tile, add=False)
            grid.put(rates, rate, tile, add=False)
        self._parts = []
        dq, dk = grid.restore(shared, given.q.dtype).split(grid.key_dim, dim=-1)
        rate = grid.restore(rates, grid.dtype)
        dg = None if given.g is None else rate[..., 1:].reshape(given.g.shape).to(given.g.dtype)
        dv, dbeta = grid.restore(values, given.v.dtype), rate[..., 0].to(given.beta.dtype)
        return dq, dk, dv, dbeta, dg, grid.join_states(chain.entering)


class TileBackward:
    """A tile of chunks in the backward: what was computed again, and dN and dS as far as do alone makes them."""

    def __init__(
        self, factors: TileFactors, q: Tensor, do: Tensor, states: Tensor, values: Tensor, scale: float
    ) -> None:
        self.factors, self._q, self._states, self._values = factors, q, states, values
        self._do = do * scale
        self._queries = factors.decay.from_start(q)
        self._pairs = factors.decay.pairs(q, factors.k)
        self.grad_values = self._pairs.mT @ self._do  # dN so far
        self.grad_states = self._queries.mT @ self._do  # dS so far

    def gradients(self, leaving: Tensor, grad_values: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """dq, dk, dv and [dbeta | dg] of the tile, [n, C, D]; ``leaving`` is dS' of its chunks, ``grad_values`` dN."""
        own, decay, states, values = self.factors, self.factors.decay, self._states, self._values
        dq, dk = decay.pairs_backward(self._q, own.k, self._pairs, self._do @ values.mT)
        dq = dq + decay.from_start_backward(self._queries, self._do @ states.mT)
        dk = dk + decay.to_end_backward(own.to_end, values @ leaving.mT)
        decay.whole_backward(states, leaving)
        y = own.inverse.mT @ grad_values
        from_start = (y @ states.mT).neg_()
        below = (y @ values.mT).neg_().tril_(-1)
        dbeta = (y * own.v).sum(-1) + (from_start * own.from_start).sum(-1) + (below * own.pairs).sum(-1)
        dk += decay.from_start_backward(own.from_start, own.beta * from_start)
        for part in decay.pairs_backward(own.k, own.k, own.pairs, own.beta * below):
            dk += part
        rates = dbeta.unsqueeze(-1)
        return dq, dk, own.beta * y, rates if decay.grad is None else torch.cat([rates, decay.grad], dim=-1)


class GradientStates:
    """The recurrence over chunks from the last to the first: dS' and dN, tile by tile.

    ``leaving`` [N, B, HV, K, V] are the gradients of the states that leave the segments.
    """

    def __init__(self, grid: Grid, leaving: Tensor) -> None:
        self._grid, self._leaving, self.entering = grid, leaving, leaving.clone()
        self._current = leaving.new_empty(leaving.shape[1:])

    def go_back(self, part: TileBackward) -> tuple[Tensor, Tensor]:
        """(dS' of the tile's chunks [n, K, V], dN [n, C, V]). Tiles come in reverse order."""
        grid, factors = self._grid, part.factors
        tile: Tile = factors.tile
        leaving, grad_values = [], []
        for number, m in reversed(list(enumerate(range(tile.m.start, tile.m.stop)))):
            s = grid.owner[m]
            first, last = grid.spans[s][0], grid.spans[s][1] - 1
            current = self._current[tile.b]
            if m == last:
                current.copy_(self._leaving[s, tile.b])
            grad = current.flatten(0, 1).clone()
            keys, w = factors.chunk(factors.to_end, number), factors.chunk(factors.w, number)
            grad_value = torch.baddbmm(factors.chunk(part.grad_values, number), keys, grad)
            before = torch.baddbmm(factors.chunk(part.grad_states, number), w.mT, grad_value, alpha=-1)
            decay = factors.decay.whole
            before = before + grad if decay is None else before.addcmul_(grad, factors.chunk(decay, number))
            current.copy_(before.view_as(current))
            if m == first:
                self.entering[s, tile.b] = current
            leaving.append(grad)
            grad_values.append(grad_value)
        return torch.cat(leaving[::-1]), torch.cat(grad_values[::-1])
