"""The launches of the delta rule on meta tensors, to be counted and compiled ahead of time."""

from __future__ import annotations

import torch

from weft.ops.delta_rule.chunk import Inputs
from weft.ops.delta_rule.fused.phases import FusedBackward, FusedForward
from weft.ops.fused.ahead import Counted, Shape, collect_phases, distinct, empty_gate, empty_tokens


def phases(shape: Shape) -> dict[str, list[Counted]]:
    """All launches of a forward and a backward that a state enters, in order, by phase (see `fused.phases`)."""
    q, k, v, do = (empty_tokens(shape, dim) for dim in (shape.keys, shape.keys, shape.values, shape.values))
    inputs = Inputs(q, k, v, empty_tokens(shape, 1).squeeze(-1), empty_gate(shape))
    state = torch.empty(1, shape.heads, shape.keys, shape.values, device="meta")
    given = inputs, 1.0, [shape.tokens], shape.chunk
    return collect_phases(
        lambda: FusedForward(*given, None, True, True),
        lambda forward: FusedBackward(*given, state, do, forward.left, forward.maps[0]),
        state,
    )


def launches(shape: Shape) -> list[Counted]:
    """What there is to compile."""
    return distinct(phases(shape))
