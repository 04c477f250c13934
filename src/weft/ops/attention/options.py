"""The options of a call: what the ranks must have in common, everything but their lengths."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.ops.attention.plan import AttentionPlan, plan_attention
from weft.ops.sequence import Sequence
from weft.ops.sequence.sequence import Bounds


@dataclass(frozen=True)
class Options:
    """What was asked for."""

    q: tuple[int, ...]
    kv_heads: int
    dtype: torch.dtype
    device: str  # its type
    causal: bool
    scale: float
    window: tuple[int, int]
    cu_seqlens: Bounds | None
    layout: str
    lengths: tuple[int, ...] | None  # of a sequence that was made before
    method: str
    strides: tuple[int, ...] | None
    backward_strides: tuple[int, ...] | None
    backward: str | None
    grad_dtype: torch.dtype | None
    return_lse: bool
    gradients: tuple[bool, ...]
    local_first: bool = True  # see `KVExchange`

    def plan(self, sequence: Sequence) -> AttentionPlan:
        """Who attends to what, worked out by everybody alone."""
        return plan_attention(sequence.lengths, sequence.layout, sequence.bounds, self.causal, self.window)
