"""The backward of `weft.ops.delta_rule.chunk`, in the same phases. With dS' the gradient of what leaves a chunk:

dN = scale tril(q k^T)^T do + (k e^{G_C - G}) dS'
dS = e^{G_C} dS' + scale (q e^G)^T do - W^T dN
Y = (I + A)^-T dN      dA = -tril(Y N^T, -1)      dv = beta Y      d(beta k e^G) = -Y S^T
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.ops.delta_rule.chunk import ChunkStates, Inputs, TileTokens
from weft.ops.delta_rule.decay import sum_of_products
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
        """All that needs no gradient of the leaving states: the forward again, dq, and what do alone gives."""
        grid, given = self._grid, self._inputs
        self._laid = laid = given.lay(grid)
        start = grid.split_states(self._entering)
        self._chain = chain = ChunkStates(grid, grid.zero_states() if start is None else start)
        self._back = back = GradientStates(grid)
        self._w, self._pairs = grid.empty_table(grid.chunk, grid.key_dim), grid.empty_table(grid.chunk, grid.chunk)
        self._inverses: list[Tensor] = []
        self._dq, self._dk = (grid.empty_tokens(grid.heads, grid.key_dim) for _ in range(2))
        self._dg = None if laid.g is None else grid.empty_tokens(grid.value_heads, laid.g.shape[-1])
        one = grid.identity(grid.chunk)
        for tile in grid.tiles:
            tokens, v = TileTokens(grid, tile, laid, "kq"), grid.take("v", laid.v, tile)
            decay, w, values = tokens.decay, grid.at(self._w, tile), grid.at(chain.values, tile)
            scores, tokens.pairs["k"] = tokens.pairs["q"], grid.at(self._pairs, tile)
            tokens.meet(keep=True)
            self._inverses.append(tokens.solve(v, one, w, values))
            chain.advance(tile, w, decay.to_end(), decay.whole)
            do, queries = grid.take("do", self._do, tile).mul_(self._scale), decay.from_start(-1)
            torch.bmm(scores.mT, do, out=grid.at(back.values, tile))
            torch.bmm(queries.mT, do, out=grid.at(back.states, tile))
            grad = torch.bmm(do, values.mT, out=grid.buffer("grad", *scores.shape))
            dq = torch.bmm(do, grid.at(chain.states, tile).mT, out=grid.buffer("dx", *tokens.k.shape))
            dq, dk = decay.queries_backward(scores, grad, dq)
            grid.put(self._dq, dq, tile, add=False)
            grid.put(self._dk, dk, tile, add=False)
            if self._dg is not None and (dg := decay.log_grad()) is not None:
                grid.put(self._dg, dg, tile, add=False)

    def finish(self, grad_leaving: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor]:
        """dq, dk, dv, dbeta, dg (None without decay) and the gradient of the entering states."""
        grid, given, laid, chain, back = self._grid, self._inputs, self._laid, self._chain, self._back
        arrived = grid.split_states(grad_leaving)
        grads = grid.zero_states() if arrived is None else arrived
        entering = grads.clone()
        values, rates = grid.empty_tokens(grid.value_heads, grid.value_dim), grid.empty_tokens(grid.value_heads, 1)
        for tile in reversed(grid.tiles):
            tokens, v = TileTokens(grid, tile, laid, "k"), grid.take("v", laid.v, tile)
            beta, decay = tokens.beta, tokens.decay
            decay.meet(keep=True)
            self._go_back(tile, decay.to_end(), decay.whole, grads, entering)
            state, value, pairs = grid.at(chain.states, tile), grid.at(chain.values, tile), grid.at(self._pairs, tile)
            leaving = grid.at(back.states, tile, 1)
            dk = torch.bmm(value, leaving.mT, out=grid.buffer("dk", *tokens.k.shape))
            decay.whole_backward(state, leaving)
            y = torch.bmm(self._inverses.pop().mT, grid.at(back.values, tile), out=grid.buffer("out", *v.shape))
            dx = grid.buffer("dx", *tokens.k.shape)
            torch.baddbmm(dx, y, state.mT, beta=0, alpha=-1, out=dx)
            below = grid.buffer("grad", *pairs.shape)
            torch.baddbmm(below, y, value.mT, beta=0, alpha=-1, out=below).tril_(-1)
            dbeta = sum_of_products(grid, y, v) + sum_of_products(grid, dx, decay.from_start(0))
            grid.put(rates, dbeta.add_(sum_of_products(grid, below, pairs)), tile, add=False)
            dk = decay.keys_backward(pairs, below.mul_(beta), dx.mul_(beta), dk)
            grid.put(self._dk, dk, tile, add=True)
            grid.put(values, y.mul_(beta), tile, add=False)
            if self._dg is not None and (dg := decay.log_grad()) is not None:
                grid.put(self._dg, dg, tile, add=True)
        chain.give_back()
        grid.give_back(self._w, self._pairs, back.states, back.values)
        del self._w, self._pairs, self._chain, self._back, self._laid
        dq, dk = grid.restore(self._dq, given.q.dtype), grid.restore(self._dk, given.k.dtype)
        dv, dbeta = grid.restore(values, given.v.dtype), grid.restore(rates, given.beta.dtype).squeeze(-1)
        logs = None if given.g is None or self._dg is None else grid.restore(self._dg, given.g.dtype)
        dg = None if logs is None or given.g is None else logs.view(given.g.shape)
        return dq, dk, dv, dbeta, dg, grid.join_states(entering)

    def _go_back(self, tile: Tile, keys: Tensor, whole: Tensor | None, leaving: Tensor, entering: Tensor) -> None:
        self._back.go_back(tile, self._grid.at(self._w, tile), keys, whole, leaving, entering)


class GradientStates:
    """The recurrence over chunks from the last to the first, tile by tile.

    Slot m of ``states`` holds first what do alone gives to the state that enters chunk m, and in the end the gradient
    of the state that leaves chunk m-1; ``values`` are dN, first as far as do alone makes them.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid, self.states, self.values = grid, grid.empty_states(), grid.empty_table(grid.chunk, grid.value_dim)

    def go_back(
        self, tile: Tile, w: Tensor, keys: Tensor, whole: Tensor | None, leaving: Tensor, entering: Tensor
    ) -> None:
        """Go through a tile; tiles come in reverse order. ``leaving`` [N, B, HV, K, V] are the gradients of what leaves
        the segments, those of what enters them are written.
        """
        grid = self._grid
        states, values = grid.steps(self.states, tile, more=1), grid.steps(self.values, tile)
        each_w, each_key = grid.split(w.mT, tile), grid.split(keys, tile)
        decays = None if whole is None else grid.split(whole, tile)
        for step in reversed(range(tile.shape[0])):
            m = tile.m.start + step
            s, before, after = grid.owner[m], states[step], states[step + 1]
            if m == grid.spans[s][1] - 1:
                self.states[m + 1, tile.b] = leaving[s, tile.b]
            value = values[step].baddbmm_(each_key[step], after)
            before.add_(after) if decays is None else before.addcmul_(after, decays[step])
            before.baddbmm_(each_w[step], value, alpha=-1)
            if m == grid.spans[s][0]:
                entering[s, tile.b] = self.states[m, tile.b]
