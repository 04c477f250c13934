"""The launches of linear attention on meta tensors, to be counted and compiled ahead of time."""

from __future__ import annotations

import torch

from weft.ops.fused.ahead import Counted, Shape, collect_phases, distinct, empty_gate, empty_tokens
from weft.ops.linear_attention.fused.phases import FusedBackward, FusedForward


def phases(shape: Shape) -> dict[str, list[Counted]]:
    """All launches of a forward and a backward, in order, by the phase they belong to (see `fused.phases`)."""
    q, k, v, do = (empty_tokens(shape, dim) for dim in (shape.keys, shape.keys, shape.values, shape.values))
    g, state = empty_gate(shape), torch.empty(1, shape.heads, shape.keys, shape.values, device="meta")
    given = q, k, v, g, 1.0, [shape.tokens], shape.chunk
    return collect_phases(lambda: FusedForward(*given), lambda _: FusedBackward(*given, state, do), state)


def launches(shape: Shape) -> list[Counted]:
    """What there is to compile."""
    return distinct(phases(shape))
