"""The launches of linear attention on meta tensors, to be counted and compiled ahead of time."""

from __future__ import annotations

import torch

from weft.ops.fused.ahead import Collector, Counted, Shape, distinct, empty_gate, empty_tokens
from weft.ops.linear_attention.fused.phases import FusedBackward, FusedForward


def phases(shape: Shape) -> dict[str, list[Counted]]:
    """All launches of a forward and a backward, in order, by the phase they belong to (see `fused.phases`)."""
    q, k, v, do = (empty_tokens(shape, dim) for dim in (shape.keys, shape.keys, shape.values, shape.values))
    g, state = empty_gate(shape), torch.empty(1, shape.heads, shape.keys, shape.values, device="meta")
    with Collector() as collect:
        forward = FusedForward(q, k, v, g, 1.0, [shape.tokens], shape.chunk)
        collect.end("forward")
        forward.intra()
        collect.end("forward.intra")
        forward.finish(state)
        collect.end("forward.finish")
        backward = FusedBackward(q, k, v, g, 1.0, [shape.tokens], shape.chunk, state, do)
        collect.end("backward")
        backward.intra()
        collect.end("backward.intra")
        backward.finish(state)
        collect.end("backward.finish")
    return collect.found


def launches(shape: Shape) -> list[Counted]:
    """What there is to compile."""
    return distinct(phases(shape))
