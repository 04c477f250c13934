"""AdamW as a rule: of vectors, and of what is no matrix, in the optimizers of matrices."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import Tensor

from weft.optim.matrix.rule import Advanced, Layout, Rule, Settings, State, adam_direction


def _layout(shape: tuple[int, ...], dtype: torch.dtype, settings: Settings) -> Layout:
    return dict.fromkeys(("exp_avg", "exp_avg_sq"), (shape, dtype))


def _advance(state: State, grad: Tensor, weight: Tensor | None, settings: Settings, due: Collection[str]) -> Advanced:
    """Only operators that round once: parts of a tensor then get the bits that the whole would get, on any ranks.

    (Fused kernels and those with two factors, as ``addcmul``, round the last elements of a tensor differently.)
    """
    limit = math.sqrt(torch.finfo(grad.dtype).max) / 16  # whose square still fits; torch's AdamW never moves again
    grad = grad.clamp(-limit, limit)
    decayed = grad if weight is None else grad + weight * settings.weight_decay
    new, direction = adam_direction(state, decayed, state["exp_avg"], settings)
    return new, direction.mul_(settings.lr)


ADAMW = Rule(_layout, _advance)
