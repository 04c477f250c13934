"""gather (LASP-2): every map to every later rank in one round, then one weighted sum."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.comm.rounds import Expect, Path, Round, Schedule
from weft.ops.scan.affine import Affine, Form


def gather(path: Path, form: Form) -> Schedule[Tensor | None]:
    """One round; a rank receives the maps of the ranks before it and nothing it will not use.

    Extra memory: up to P-1 maps on the last rank.
    """
    maps = form.new_empty(path.rank, form.map_elements)
    local: Affine = yield Expect([(0, peer, maps[peer]) for peer in range(path.rank)])
    yield Round(0, [(peer, local.flat) for peer in range(path.rank + 1, path.size)])
    return fold(maps, form) if path.rank else None


def fold(maps: Tensor, form: Form) -> Tensor:
    """What ``maps`` ``[R, n]`` (flat, of this form), applied in order, make of the zero state."""
    count = form.state_elements
    states = maps[:, :count]
    if form.kind == "none":
        return states.sum(0).view(form.shape)
    if form.kind == "dense":
        state = form.new_empty(*form.shape).zero_()
        for row in maps:
            state = form.from_flat(row).apply(state)
        return state
    logs = maps[:, count:]
    # Map i is decayed by the maps after it: a sum of their logs, never a quotient of prefix products.
    after = torch.zeros_like(logs)
    after[:-1] = logs[1:].flip(0).cumsum(0).flip(0)
    return torch.einsum("rd,rde->de", after.exp(), states.view(*logs.shape, -1)).view(form.shape)
