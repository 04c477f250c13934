"""AdamW for vectors and what is not a matrix, with the weight decay methods of REKLS.

Only operators that round once: parts of a tensor then get the bits that the whole would get, on any number of ranks.
(Fused kernels and those with a factor, as ``addcmul``, round the last elements of a tensor differently.)
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from weft.optim.matrix.settings import Layout, Settings


def layout(shape: tuple[int, ...], dtype: torch.dtype, settings: Settings) -> Layout:
    """The shape and dtype of each tensor of the state that is saved."""
    return dict.fromkeys(("exp_avg", "exp_avg_sq"), (shape, dtype))


def derive(state: dict[str, Any]) -> None:
    """Nothing is left out of a checkpoint."""


def advance(
    state: dict[str, Any], grad: Tensor, weight: Tensor | None, settings: Settings
) -> tuple[dict[str, Any], Tensor]:
    """The state after a step and what is to be subtracted from the weight, both new."""
    limit = math.sqrt(torch.finfo(grad.dtype).max) / 16  # whose square still fits; torch's AdamW never moves again
    grad = grad.clamp(-limit, limit)
    decayed = grad if weight is None else grad + weight * settings.weight_decay
    direction, first, second = adam_direction(decayed, state["exp_avg"], state["exp_avg_sq"], state["step"], settings)
    return {"exp_avg": first, "exp_avg_sq": second}, direction.mul_(settings.lr)


def adam_direction(
    grad: Tensor, first: Tensor, second: Tensor, step: Tensor, settings: Settings
) -> tuple[Tensor, Tensor, Tensor]:
    """Adam's direction with bias correction, eps outside the root, and both moments after the step."""
    b1, b2 = settings.betas
    number = int(step) + 1
    first = (first * b1).add_(grad * (1 - b1))
    second = (second * b2).add_((grad * grad).mul_(1 - b2))
    root = (second / (1 - b2**number)).sqrt_().add_(settings.eps)
    return (first / (1 - b1**number)).div_(root), first, second
