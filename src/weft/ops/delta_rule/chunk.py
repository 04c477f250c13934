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

from weft.ops.delta_rule.decay import Decay, ScalarDecay
from weft.ops.delta_rule.decay_vector import VectorDecay
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


class TileTokens:
    """Keys of a tile, and queries if they are ``met``: [n, C, K]; beta [n, C, 1] and the decay between the tokens.

    ``met`` says what meets the keys: "k", "q", "kq" or nothing; `meet` writes their ``pairs`` [n, C, C].
    """

    def __init__(self, grid: Grid, tile: Tile, laid: Inputs, met: str = "") -> None:
        self._grid = grid
        self.pairs = {name: self._square(f"pairs of {name}", tile) for name in met}
        self.k, self.beta = grid.take("k", laid.k, tile), grid.take("beta", laid.beta, tile)
        who = [self.k if name == "k" else grid.take("q", laid.q, tile) for name in met]
        g = None if laid.g is None else grid.take("g", laid.g, tile)
        if g is None:
            self.decay = Decay(grid, self.k, who)
        else:
            self.decay = (VectorDecay if g.shape[-1] > 1 else ScalarDecay)(grid, self.k, who, g)

    def _square(self, name: str, tile: Tile) -> Tensor:
        cells = tile.shape[0] * tile.shape[1] * self._grid.value_heads
        return self._grid.buffer(name, cells, self._grid.chunk, self._grid.chunk)

    def meet(self, keep: bool = False) -> None:
        """Write the pairs. ``keep`` what a backward will need."""
        self.decay.meet(*self.pairs.values(), keep=keep)

    def solve(self, v: Tensor, one: Tensor, w: Tensor, u: Tensor) -> Tensor:
        """(I + A)^-1 [n, C, C]; ``w`` and ``u`` are written."""
        triangle = torch.mul(self.pairs["k"], self.beta)
        # By substitution: a series of powers loses everything where keys are alike.
        inverse = torch.linalg.solve_triangular(triangle, one, upper=False, unitriangular=True)
        weighted = torch.mul(inverse, self.beta.mT, out=triangle)
        torch.bmm(weighted, self.decay.from_start(0), out=w)
        torch.bmm(weighted, v, out=u)
        return inverse


class ChunkStates:
    """The recurrence over chunks: the states that enter them, ``states``, and N, ``values``, tile by tile.

    ``start`` [N, B, HV, K, columns] enters the segments, ``leaving`` leaves them. Columns that have no U of their own
    (``mapped``) are those of M. ``states`` and ``values`` are borrowed of the grid.
    """

    def __init__(self, grid: Grid, start: Tensor, mapped: bool = False) -> None:
        self._grid, self.start, self._mapped, self.leaving = grid, start, mapped, start.clone()
        self.states = grid.borrow(grid.chunks + 1, *start.shape[1:])
        self.values = grid.empty_table(grid.chunk, start.shape[-1])

    def advance(self, tile: Tile, w: Tensor, keys: Tensor, whole: Tensor | None) -> None:
        """Go through a tile; ``values`` holds its U. Tiles come in order."""
        grid, first = self._grid, tile.m.start
        states, values = grid.steps(self.states, tile, more=1), grid.steps(self.values, tile)
        each_w, each_key = grid.split(w, tile), grid.split(keys.mT, tile)
        decays = None if whole is None else grid.split(whole, tile)
        for step, (value, mine, key) in enumerate(zip(values, each_w, each_key, strict=True)):
            m = first + step
            s, state, after = grid.owner[m], states[step], states[step + 1]
            if m == grid.spans[s][0]:
                self.states[m, tile.b] = self.start[s, tile.b]
            torch.baddbmm(value, mine, state, beta=0 if self._mapped else 1, alpha=-1, out=value)
            if decays is None:
                torch.baddbmm(state, key, value, out=after)
            else:
                torch.mul(state, decays[step], out=after).baddbmm_(key, value)
            if m == grid.spans[s][1] - 1:
                self.leaving[s, tile.b] = self.states[m + 1, tile.b]

    def give_back(self) -> None:
        self._grid.give_back(self.states, self.values)
        del self.states, self.values


class ChunkForward:
    """Forward of one run of a rank, from the states that ``start`` its segments; None: zero.

    ``enters``: its one segment goes on from another run, whose state comes later. ``maps`` is (M [B, HV, K, K], None if
    nothing enters; the state that leaves [B*N, HV, K, V], from a zero start if one enters). If nobody ``waits`` for
    them, outputs are computed on the way.
    """

    def __init__(
        self, inputs: Inputs, scale: float, lengths: list[int], chunk_size: int, start: Tensor | None, enters: bool,
        waits: bool,
    ) -> None:  # fmt: skip
        self._grid = grid = Grid(inputs.q, inputs.v, lengths, chunk_size)
        self._dtype, self._scale, self._laid = inputs.v.dtype, scale, inputs.lay(grid)
        given = grid.split_states(start)
        own = ChunkStates(grid, grid.zero_states() if given is None else given)
        self._chains = [own]
        if enters:
            one = grid.identity(grid.key_dim).expand(1, grid.batch, grid.value_heads, -1, -1)
            self._chains.append(ChunkStates(grid, one, mapped=True))
        self._found = [grid.empty_tokens(grid.value_heads, chain.states.shape[-1]) for chain in self._chains]
        self._later = grid.tiles if waits else []
        one = grid.identity(grid.chunk)
        for tile in grid.tiles:
            tokens, v = TileTokens(grid, tile, self._laid, "k" if waits else "kq"), grid.take("v", self._laid.v, tile)
            w, u = grid.buffer("w", *tokens.k.shape), grid.at(own.values, tile)
            tokens.meet()
            tokens.solve(v, one, w, u)
            keys = tokens.decay.to_end()
            for chain in self._chains:
                chain.advance(tile, w, keys, tokens.decay.whole)
            if not waits:
                write_outputs(grid, tile, tokens, self._chains, self._found, scale)
        self.maps = grid.join_states(self._chains[1].leaving) if enters else None, grid.join_states(own.leaving)

    def intra(self) -> None:
        """Outputs as far as they are known, and what the entering state will be multiplied by."""
        for tile in self._later:
            tokens = TileTokens(self._grid, tile, self._laid, "q")
            tokens.meet()
            write_outputs(self._grid, tile, tokens, self._chains, self._found, self._scale)
        for chain in self._chains:
            chain.give_back()
        self._o, *left = self._found
        self.left = self._grid.restore(left[0], self._grid.dtype) if left else None  # [B, T, HV, K]
        del self._chains, self._laid, self._found

    def finish(self, entering: Tensor | None) -> Tensor:
        """o [B, T, HV, V], with what the state that entered [B, HV, K, V] adds."""
        o = self._grid.restore(self._o, self._grid.dtype)
        if self.left is not None and entering is not None:
            o += (self.left.transpose(1, 2) @ entering).transpose(1, 2)
        return o.to(self._dtype)


def write_outputs(
    grid: Grid, tile: Tile, tokens: TileTokens, chains: list[ChunkStates], found: list[Tensor], scale: float
) -> None:
    """What each chain's columns give to the outputs of a tile, into ``found`` on the grid."""
    scores, queries = tokens.pairs["q"], tokens.decay.from_start(-1)
    for chain, target in zip(chains, found, strict=True):
        states, values = grid.at(chain.states, tile), grid.at(chain.values, tile)
        out = grid.buffer("out", *values.shape)
        torch.baddbmm(out, queries, states, beta=0, alpha=scale, out=out)
        grid.put(target, out.baddbmm_(scores, values, alpha=scale), tile, add=False)
