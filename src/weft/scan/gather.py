"""gather (LASP-2): every map to every later rank in one round, then one weighted sum."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.comm import Axis
from weft.scan.affine import Affine


def gather(axis: Axis, local: Affine, blocks: int | None) -> Tensor | None:
    """One round; a rank receives the maps of the ranks before it and nothing it will not use.

    Extra memory: up to P-1 maps on the last rank.
    """
    mine = local.flat
    maps = mine.new_empty(axis.rank, mine.numel())
    later = [(peer, mine) for peer in range(axis.rank + 1, axis.size)]
    axis.exchange(later, [(peer, maps[peer]) for peer in range(axis.rank)]).wait()
    return fold(maps, local) if axis.rank else None


def fold(maps: Tensor, like: Affine) -> Tensor:
    """What ``maps`` ``[R, n]`` (flat, of the form of ``like``), applied in order, make of the zero state."""
    count = like.state.numel()
    states = maps[:, :count]
    if like.decay is None:
        return states.sum(0).view(like.state.shape)
    if like.kind == "dense":
        state = like.state.new_zeros(like.state.shape)
        for row in maps:
            state = Affine.from_flat(like.kind, row, like.state.shape).apply(state)
        return state
    logs = maps[:, count:]
    # Map i is decayed by the maps after it: a sum of their logs, never a quotient of prefix products.
    after = torch.zeros_like(logs)
    after[:-1] = logs[1:].flip(0).cumsum(0).flip(0)
    return torch.einsum("rd,rde->de", after.exp(), states.view(*logs.shape, -1)).view(like.state.shape)
