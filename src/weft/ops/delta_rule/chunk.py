"""The local delta rule in chunks: S_t = (I - beta k^T k) Diag(exp g) S_{t-1} + beta k^T v, o_t = scale q_t S_t.

Within a chunk of C tokens that a state S enters (G the sums of g from its start, all products decayed):

    A = tril(beta k k^T, -1)     W = (I + A)^-1 beta (k e^G)     U = (I + A)^-1 beta v
    N = U - W S                  o = scale (q e^G) S + scale tril(q k^T) N
    S' = e^{G_C} S + (k e^{G_C - G})^T N

The state that enters a rank arrives late. All of it is linear in S, so the recurrence carries K further columns that
start as the identity: where they leave is the map M of the segment, and their outputs are ``left``, what the state that
arrives is multiplied by. Shapes as in `weft.ops.scan.grid`; states are [B*N, HV, K, V] in fp32, fp64 for fp64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.ops.delta_rule.decay import Decay, decay_of
from weft.ops.scan.grid import Grid, Tile


@dataclass(frozen=True)
class Inputs:
    """A rank's tokens of one run, or tensors made of them on the grid: q, k, v, beta, g."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor  # [B, T, HV]
    g: Tensor | None  # [B, T, HV] or [B, T, HV, K]

    def cut(self, tokens: slice) -> Inputs:
        g = None if self.g is None else self.g[:, tokens]
        return Inputs(self.q[:, tokens], self.k[:, tokens], self.v[:, tokens], self.beta[:, tokens], g)

    def lay(self, grid: Grid) -> Inputs:
        """On the grid, [M, B, heads, C, D]."""
        g = self.g if self.g is None or self.g.dim() == 4 else self.g.unsqueeze(-1)
        beta = grid.lay(self.beta.unsqueeze(-1))
        laid = None if g is None else grid.lay(g)
        return Inputs(grid.lay(self.q), grid.lay(self.k), grid.lay(self.v), beta, laid)


class TileFactors:
    """What the chunks of a tile do to any state: k, beta, v [n, C, D], W, U and the inverse [n, C, C]."""

    def __init__(self, grid: Grid, tile: Tile, inputs: Inputs) -> None:
        self.tile, self.k, self.v = tile, grid.copy(inputs.k, tile), grid.copy(inputs.v, tile)
        self.beta = grid.copy(inputs.beta, tile)
        log = None if inputs.g is None else grid.copy(inputs.g, tile)
        self.decay: Decay = decay_of(log, grid.chunk, self.k)
        self.from_start, self.to_end = self.decay.from_start(self.k), self.decay.to_end(self.k)
        self.pairs = self.decay.pairs(self.k, self.k)
        one = torch.eye(grid.chunk, dtype=grid.dtype, device=grid.device)
        # By substitution: a series of powers loses everything where keys are alike.
        self.inverse = torch.linalg.solve_triangular(self.beta * self.pairs, one, upper=False, unitriangular=True)
        self.w, self.u = self.inverse @ (self.beta * self.from_start), self.inverse @ (self.beta * self.v)

    def chunk(self, x: Tensor, number: int) -> Tensor:
        """x [n, ...] of the tile's chunk ``number``, all batch rows and heads."""
        return x.unflatten(0, (self.tile.shape[0], -1))[number]


class ChunkStates:
    """The recurrence over chunks: the states that enter them and N, tile by tile.

    ``start`` [N, B, HV, K, columns] enters the segments; U is zero in columns beyond V.
    """

    def __init__(self, grid: Grid, start: Tensor) -> None:
        self._grid, self._start, self.leaving = grid, start, start.clone()
        self._current = start.new_empty(start.shape[1:])

    def advance(self, factors: TileFactors) -> tuple[Tensor, Tensor]:
        """(states entering the tile's chunks [n, K, columns], N [n, C, columns]). Tiles come in order."""
        grid, tile = self._grid, factors.tile
        states, values = [], []
        for number, m in enumerate(range(tile.m.start, tile.m.stop)):
            s = grid.owner[m]
            first, last = grid.spans[s][0], grid.spans[s][1] - 1
            current = self._current[tile.b]
            if m == first:
                current.copy_(self._start[s, tile.b])
            state = current.flatten(0, 1).clone()
            value = factors.chunk(factors.w, number) @ state
            u = value[..., : grid.value_dim]
            torch.sub(factors.chunk(factors.u, number), u, out=u)
            value[..., grid.value_dim :].neg_()
            decay = factors.decay.whole
            after = state if decay is None else state * factors.chunk(decay, number)
            after = torch.baddbmm(after, factors.chunk(factors.to_end, number).mT, value)
            current.copy_(after.view_as(current))
            if m == last:
                self.leaving[s, tile.b] = current
            states.append(state)
            values.append(value)
        return torch.cat(states), torch.cat(values)


class ChunkForward:
    """Forward of one run of a rank, from the states that ``start`` its segments; None: zero.

    ``enters``: its one segment goes on from another run, whose state comes later. ``maps`` is (M [B, HV, K, K], None if
    nothing enters; the state that leaves [B*N, HV, K, V], from a zero start if one enters).
    """

    def __init__(
        self, inputs: Inputs, scale: float, lengths: list[int], chunk_size: int, start: Tensor | None, enters: bool
    ) -> None:
        self._grid = grid = Grid(inputs.q, inputs.v, lengths, chunk_size)
        self._dtype, self._scale, self._enters = inputs.v.dtype, scale, enters
        laid = inputs.lay(grid)
        self._q = laid.q
        given = grid.split_states(start)
        first = grid.zero_states() if given is None else given
        if enters:
            one = torch.eye(grid.key_dim, dtype=grid.dtype, device=grid.device)
            first = torch.cat([first, one.expand(*first.shape[:-2], -1, -1)], dim=-1)
        chain = ChunkStates(grid, first)
        self._parts: list[tuple[TileFactors, Tensor, Tensor]] = []
        for tile in grid.tiles:
            factors = TileFactors(grid, tile, laid)
            self._parts.append((factors, *chain.advance(factors)))
        leaving = grid.join_states(chain.leaving)
        values = grid.value_dim
        self.maps = leaving[..., values:].contiguous() if enters else None, leaving[..., :values].contiguous()

    def intra(self) -> None:
        """Outputs as far as they are known, and what the entering state will be multiplied by."""
        grid = self._grid
        self._o = grid.empty_tokens(grid.value_heads, grid.value_dim)
        left = grid.empty_tokens(grid.value_heads, grid.key_dim) if self._enters else None
        for factors, states, values in self._parts:
            q = grid.copy(self._q, factors.tile)
            out = factors.decay.from_start(q) @ states
            out.baddbmm_(factors.decay.pairs(q, factors.k), values).mul_(self._scale)
            grid.put(self._o, out[..., : grid.value_dim], factors.tile, add=False)
            if left is not None:
                grid.put(left, out[..., grid.value_dim :], factors.tile, add=False)
        self._parts = []
        self.left = None if left is None else grid.restore(left, grid.dtype)  # [B, T, HV, K]

    def finish(self, entering: Tensor | None) -> Tensor:
        """o [B, T, HV, V], with what the state that entered [B, HV, K, V] adds."""
        o = self._grid.restore(self._o, self._grid.dtype)
        if self.left is not None and entering is not None:
            o += (self.left.transpose(1, 2) @ entering).transpose(1, 2)
        return o.to(self._dtype)
