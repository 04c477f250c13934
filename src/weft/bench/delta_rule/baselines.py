"""What people use today for the delta rule over a sharded sequence, written for the benchmark with weft's own kernels.

Both differ from `weft.delta_rule` in what they send and when they wait. A contiguous layout, no initial state.

- `by_gather`, as flash-linear-attention's context parallelism: [U | M] of the shard by a recurrence of its own, one
  blocking all-gather, then the recurrence again from the state that entered; backward the same for its gradient.
- `by_heads`, as Megatron-LM: an all-to-all from tokens to heads, the whole sequence of these, and an all-to-all back.

`with_nothing_sent` is what a rank computes in `weft.delta_rule`, maps and correction too (two CPU ranks have none),
when zeros arrive at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.comm import Axis, Call
from weft.comm.wire import SoloWire
from weft.ops.delta_rule import delta_rule
from weft.ops.delta_rule.backward import ChunkBackward
from weft.ops.delta_rule.chunk import ChunkForward, ChunkStates, Inputs, TileTokens, write_outputs
from weft.ops.delta_rule.operation import Options as DeltaOptions
from weft.ops.delta_rule.two_ranks import WaitingBackward, WaitingForward
from weft.ops.scan import Affine
from weft.ops.scan.gather import fold
from weft.ops.scan.grid import Grid


@dataclass(frozen=True)
class Options:
    """What the ranks must have in common."""

    heads: tuple[int, ...]
    dtype: torch.dtype


def by_gather(axis: Axis, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None) -> Tensor:
    """o; tokens of this rank."""
    o: Tensor = _Gathered.apply(q, k, v, beta, g, axis)
    return o


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, axis: Axis) -> Tensor:
        call = axis.begin("by_gather", Options(tuple(v.shape[2:]), v.dtype))
        inputs, scale = Inputs(q, k, v, beta, g), q.shape[-1] ** -0.5
        grid = Grid(q, v, [q.shape[1]], DeltaOptions.chunk_size_on(q.device.type))
        laid, one = inputs.lay(grid), grid.identity(grid.chunk)
        w, u = grid.empty_table(grid.chunk, grid.key_dim), grid.empty_table(grid.chunk, grid.value_dim)
        reduced = _Reduced(grid, enters=call.rank > 0)
        for tile in grid.tiles:
            tokens, mine = TileTokens(grid, tile, laid, "k"), grid.at(w, tile)
            tokens.meet()
            tokens.solve(grid.take("v", laid.v, tile), one, mine, grid.at(u, tile))
            reduced.advance(tile, mine, tokens, grid.steps(u, tile))
        entering = _gather(call, reduced.transition, reduced.state)
        chain = ChunkStates(grid, grid.zero_states() if entering is None else entering.unsqueeze(0))
        chain.values.copy_(u)
        o = grid.empty_tokens(grid.value_heads, grid.value_dim)
        for tile in grid.tiles:
            tokens = TileTokens(grid, tile, laid, "q")
            tokens.meet()
            chain.advance(tile, grid.at(w, tile), tokens.decay.to_end(), tokens.decay.whole)
            write_outputs(grid, tile, tokens, [chain], [o], scale)
        chain.give_back()
        grid.give_back(w, u)
        ctx.save_for_backward(q, k, v, beta, g, entering, reduced.transition)
        ctx.how = axis, scale, grid.chunk
        return grid.restore(o, v.dtype)

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        *given, entering, transition = ctx.saved_tensors
        axis, scale, chunk = ctx.how
        v = given[2]
        call = axis.begin("by_gather.backward", Options(tuple(v.shape[2:]), v.dtype)).reversed()
        kernel = _Backward(Inputs(*given), scale, [v.shape[1]], chunk, entering, do, None, None)
        kernel.intra()
        leaving = _gather(call, None if transition is None else transition.mT, kernel.reduce())
        return *kernel.finish(leaving)[:5], None


class _Reduced:
    """The pre-process of the forward: what a shard makes of no state, and of the identity."""

    def __init__(self, grid: Grid, enters: bool) -> None:
        self._grid = grid
        rows = grid.batch, grid.value_heads
        self.state = grid.zeros(*rows, grid.key_dim, grid.value_dim)
        self.transition = grid.identity(grid.key_dim).expand(*rows, -1, -1).clone() if enters else None

    def advance(self, tile: Any, w: Tensor, tokens: TileTokens, u: tuple[Tensor, ...]) -> None:
        """Through a tile, for all chunks of its batch rows."""
        grid, decay = self._grid, tokens.decay
        each_w, each_key = grid.split(w, tile), grid.split(decay.to_end().mT, tile)
        decays = None if decay.whole is None else grid.split(decay.whole, tile)
        kinds = [(self.state, True)] + ([] if self.transition is None else [(self.transition, False)])
        for whole, has_values in kinds:
            state = whole[tile.b].flatten(0, 1)
            out = grid.buffer("out", len(state), grid.chunk, state.shape[-1])
            for step, value in enumerate(u):
                torch.baddbmm(
                    value if has_values else out, each_w[step], state, beta=int(has_values), alpha=-1, out=out
                )
                if decays is not None:
                    state.mul_(decays[step])
                state.baddbmm_(each_key[step], out)


class _Backward(ChunkBackward):
    """With the pre-process of the backward."""

    def reduce(self) -> Tensor:
        """The gradient of the entering state as far as this rank's outputs make it, by a recurrence of its own."""
        grid, back = self._grid, self._back
        grad = grid.zeros(grid.batch, grid.value_heads, grid.key_dim, grid.value_dim)
        for tile in reversed(grid.tiles):
            tokens = TileTokens(grid, tile, self._laid)
            tokens.meet()
            values, sums = grid.steps(back.values, tile), grid.steps(back.states, tile)
            each_w, each_key = grid.steps(self._w, tile), grid.split(tokens.decay.to_end(), tile)
            decays = None if tokens.decay.whole is None else grid.split(tokens.decay.whole, tile)
            current = grad[tile.b].flatten(0, 1)
            out = grid.buffer("out", *values[0].shape)
            for step in reversed(range(len(values))):
                torch.baddbmm(values[step], each_key[step], current, out=out)
                if decays is not None:
                    current.mul_(decays[step])
                current.add_(sums[step]).baddbmm_(each_w[step].mT, out, alpha=-1)
        return grad


def _gather(call: Call, transition: Tensor | None, state: Tensor) -> Tensor | None:
    """What enters this rank, from everybody's map ``[B, HV, K, K + V]``; waited for at once."""
    if transition is None:  # nothing enters: whatever it would become
        transition = state.new_zeros(*state.shape[:-1], state.shape[-2])
    own = Affine.of(state, transition=transition)
    everybody = torch.stack(call.all_gather(own.flat).wait())
    return fold(everybody[: call.rank], own.form) if call.rank else None


def with_nothing_sent(axis: Axis, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None) -> Tensor:
    """o, as if the tokens of other ranks left nothing; tokens of this rank."""
    o: Tensor = _Unsent.apply(q, k, v, beta, g, axis)
    return o


class _Unsent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, axis: Axis) -> Tensor:
        how = q.shape[-1] ** -0.5, [q.shape[1]], DeltaOptions.chunk_size_on(q.device.type)
        inputs, ctx.waits = Inputs(q, k, v, beta, g), axis.size == 2 and axis.rank == 1 and q.device.type == "cpu"
        kernel: ChunkForward | WaitingForward = (
            WaitingForward(inputs, *how)
            if ctx.waits
            else ChunkForward(inputs, *how, None, enters=axis.rank > 0, waits=axis.size > 1)
        )
        kernel.intra()
        arrived = None if axis.rank == 0 else torch.zeros_like(kernel.maps[1])
        ctx.save_for_backward(q, k, v, beta, g, arrived, kernel.left, kernel.maps[0])
        ctx.how, ctx.is_last = how, axis.rank + 1 == axis.size
        return kernel.finish(arrived)

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        *given, arrived, left, transition = ctx.saved_tensors
        scale, lengths, chunk = ctx.how
        inputs = Inputs(*given)
        kernel = (
            WaitingBackward(inputs, scale, lengths, chunk, arrived, do)
            if ctx.waits
            else ChunkBackward(inputs, scale, lengths, chunk, arrived, do, left, transition)
        )
        kernel.intra()
        return *kernel.finish(None if ctx.is_last else torch.zeros_like(kernel.maps[1]))[:5], None


def by_heads(axis: Axis, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None) -> Tensor:
    """o; tokens of this rank. The heads are as many for each rank."""
    if v.shape[2] % axis.size or q.shape[2] != v.shape[2]:
        raise ValueError(f"by_heads: {q.shape[2]} and {v.shape[2]} heads cannot be dealt to {axis.size} ranks")
    keys, values = q.shape[-1], v.shape[-1]
    rates = beta.unsqueeze(-1) if g is None else torch.cat([beta.unsqueeze(-1), g.reshape(*beta.shape, -1)], -1)
    tokens, rates = _Dealt.apply(axis, 2, 1, torch.cat([q, k, v], -1), rates)
    q, k, v = tokens.split([keys, keys, values], -1)
    shape = beta.shape if g is None else g.shape
    gate = None if g is None else rates[..., 1:].reshape(shape[0], -1, rates.shape[2], *shape[3:])
    o, _ = delta_rule(q, k, v, rates[..., 0], gate, group=Axis.over(SoloWire()))
    back: Tensor = _Dealt.apply(axis, 1, 2, o)[0]
    return back


class _Dealt(torch.autograd.Function):
    """Tensors dealt to the ranks along dimension ``apart``, what comes joined along ``together``.

    From 2 to 1: [B, T, H, D] of this rank's tokens become [B, P T, H / P, D] of its heads. The backward deals back.
    """

    @staticmethod
    def forward(ctx: Any, axis: Axis, apart: int, together: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.how = axis, apart, together
        return _deal(axis, apart, together, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        axis, apart, together = ctx.how
        return None, None, None, *_deal(axis, together, apart, grads)


def _deal(axis: Axis, apart: int, together: int, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    call = axis.begin("by_heads")
    outgoing = [[part.contiguous() for part in tensor.chunk(axis.size, apart)] for tensor in tensors]
    coming = [call.all_to_all(parts) for parts in outgoing]
    return tuple(torch.cat(one.wait(), together) for one in coming)
