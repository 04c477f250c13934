"""Documents on at most two ranks, on a CPU: the second rank waits for its state, and computes no map.

A rank that a state enters usually carries K further columns (see `weft.ops.delta_rule.chunk`), which with K = V is as
much work as its forward. The map is there for the ranks behind it. Where there are none the rank can wait instead: it
solves its chunks meanwhile, and goes through the recurrence once the state is there. In the backward it is the first,
and knows by its recurrence what the rank before it waits for. Heads go in groups, each an exchange of its own, and all
begin before one is waited for: while the first group's states are under way a rank works on the others.

On a device the recurrence takes as long for a few heads as for many, and columns cost little: this is not for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from weft.comm import Axis
from weft.ops.delta_rule.backward import ChunkBackward
from weft.ops.delta_rule.chunk import ChunkStates, Inputs, TileTokens, write_outputs
from weft.ops.scan.arguments import OptionsT, StateOptions
from weft.ops.scan.grid import Grid, Tile
from weft.ops.scan.state_scan import most_places
from weft.ops.sequence.layout import Sequence

HEAD_GROUPS = 2  # more gained nothing in `weft bench delta-rule`


def second_rank_waits(options: StateOptions, axis: Axis, sequence: Sequence | None) -> bool:
    """Whether no document lies on more than two runs, the same on every rank.

    Not where lengths are not yet known, nor with final states, which the map of a document's last run gives.
    """
    if options.device != "cpu" or options.output_final_state:
        return False
    if sequence is None:
        return options.cu_seqlens is None and options.layout == "contiguous" and axis.size == 2
    return most_places(sequence) == 2


def cut_heads(
    options: OptionsT, inputs: Inputs, initial: Tensor | None
) -> Iterator[tuple[OptionsT, Inputs, Tensor | None]]:
    """Options, inputs and initial states of each group of heads."""
    heads, shared = options.q[1], options.v[1] // options.q[1]
    count = min(HEAD_GROUPS, heads)
    sizes = [heads // count + (number < heads % count) for number in range(count)]
    wide = [size * shared for size in sizes]

    def split(x: Tensor | None, dim: int = 2) -> list[Tensor | None]:
        return [None] * count if x is None else list(x.split(wide, dim))

    v, beta, g, initials = split(inputs.v), split(inputs.beta), split(inputs.g), split(initial, 1)
    q, k = (x.split(sizes, 2) for x in (inputs.q, inputs.k))
    for i, (size, values) in enumerate(zip(sizes, wide, strict=True)):
        mine = replace(
            options,
            q=(options.q[0], size, options.q[2]),
            v=(options.v[0], values, options.v[2]),
            g=None if options.g is None else (options.g[0], values, *options.g[2:]),
            initial_state=None if initial is None else (len(initial), values, *initial.shape[2:]),
        )
        v_of, beta_of = v[i], beta[i]
        assert v_of is not None and beta_of is not None
        yield mine, Inputs(q[i], k[i], v_of, beta_of, g[i]), initials[i]


class WaitingForward:
    """`ChunkForward` of a run whose one segment goes on from another run and ends here."""

    left = None  # no state is multiplied by it

    def __init__(self, inputs: Inputs, scale: float, lengths: list[int], chunk_size: int) -> None:
        self._grid = grid = Grid(inputs.q, inputs.v, lengths, chunk_size)
        self._dtype, self._scale, self._laid = inputs.v.dtype, scale, inputs.lay(grid)
        self._chain, self._w = ChunkStates(grid, grid.zero_states()), grid.empty_table(grid.chunk, grid.key_dim)
        one = grid.identity(grid.chunk)
        for tile in grid.tiles:
            tokens, v = TileTokens(grid, tile, self._laid, "k"), grid.take("v", self._laid.v, tile)
            tokens.meet()
            tokens.solve(v, one, grid.at(self._w, tile), grid.at(self._chain.values, tile))
        self.maps = None, grid.join_states(grid.zero_states())  # which goes nowhere

    def intra(self) -> None:
        """All else needs the state."""

    def finish(self, entering: Tensor | None) -> Tensor:
        """o [B, T, HV, V], from the state that entered [B, HV, K, V]."""
        grid, chain = self._grid, self._chain
        if (start := grid.split_states(entering)) is not None:
            chain.start = start
        o = grid.empty_tokens(grid.value_heads, grid.value_dim)
        for tile in grid.tiles:
            tokens = TileTokens(grid, tile, self._laid, "q")
            tokens.meet()
            chain.advance(tile, grid.at(self._w, tile), tokens.decay.to_end(), tokens.decay.whole)
            write_outputs(grid, tile, tokens, [chain], [o], self._scale)
        chain.give_back()
        grid.give_back(self._w)
        del self._chain, self._w, self._laid
        return grid.restore(o, self._dtype)


class WaitingBackward(ChunkBackward):
    """`ChunkBackward` of such a run. Nothing leaves it, so its recurrence goes first: ``maps`` has what enters."""

    def __init__(
        self, inputs: Inputs, scale: float, lengths: list[int], chunk_size: int, entering: Tensor | None, do: Tensor
    ) -> None:
        super().__init__(inputs, scale, lengths, chunk_size, entering, do, None, None)
        super().intra()
        grid = self._grid
        leaving, found = grid.zero_states(), grid.zero_states()
        for tile in reversed(grid.tiles):
            tokens = TileTokens(grid, tile, self._laid)
            tokens.meet()
            super()._go_back(tile, tokens.decay.to_end(), tokens.decay.whole, leaving, found)
        self.maps = None, grid.join_states(found)

    def intra(self) -> None:
        """Done before."""

    def _go_back(self, tile: Tile, keys: Tensor, whole: Tensor | None, leaving: Tensor, entering: Tensor) -> None:
        """Done before."""

    def finish(self, grad_leaving: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor]:
        return *super().finish(None)[:5], self.maps[1]
