"""The well-conditioned update: whitening by inverse roots of KL-Shampoo's factors, with one scalar second moment.

Nothing depends on the choice of eigenvectors, so the update is smooth in the gradient: a sum over ranks in another
order changes it by rounding, not by its own size. For a gradient G ``[m, n]`` at step t, with inverse roots P_L, P_R
(the identity before the first step), momentum M and a scalar s:

    g = rms(G),  U = G / g                                  g = 0: M fades, the factors stay
    M <- b1 M + (1 - b1) G
    s <- b2 s + (1 - b2) (g rms(P_L U P_R))^2               with the old roots
    L <- b_t L + (1 - b_t) (U P_R)(U P_R)^T / n             b_t as in the published update
    R <- b_t R + (1 - b_t) (P_L U)^T (P_L U) / m            with the old roots
    P = Q diag(max(l / mean(l), floor))^(-1/2) Q^T          of each factor
    update = lr P_L (b1 M / (1 - b1^t) + (1 - b1) G) P_R / sqrt(s / (1 - b2^t))

On the first step with a gradient that is not zero the roots of the update are still the identity. A side over
``max_factor_dim`` keeps it. s is fp64 and G is scaled before it is squared: gradients of any size are alike.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from weft.optim.matrix.rule import Layout, Settings, decompose

FLOOR = 0.05  # of an eigenvalue to the mean


def layout(shape: tuple[int, ...], dtype: torch.dtype, settings: Settings) -> Layout:
    """The momentum, the scalar second moment and the factors."""
    return {"exp_avg": (shape, dtype), "second_moment": ((), torch.float64)} | settings.factors(shape, dtype)


def derive(state: dict[str, Any]) -> None:
    """The inverse roots, from the factors."""
    for side in "LR":
        if side in state and bool(state[side].diagonal().any()):
            state[f"root_{side}"] = _inverse_root(state[side])


def advance(
    state: dict[str, Any], grad: Tensor, weight: Tensor | None, settings: Settings
) -> tuple[dict[str, Any], Tensor]:
    """The state after a step and the update."""
    b1, b2 = settings.betas
    number = int(state["step"]) + 1
    new: dict[str, Any] = {}
    roots = state.get("root_L"), state.get("root_R")
    second = b2 * float(state["second_moment"])
    size, unit = _unit(grad)
    if size > 0:
        left, right = _times(roots[0], unit), _times(unit, roots[1])
        second += (1 - b2) * (size * _unit(_times(left, roots[1]))[0]) ** 2
        keep = settings.keep_factor(number)
        for side, one in (("L", right), ("R", left.mT)):
            if side in state:
                new[side] = torch.addmm(state[side], one, one.mT, beta=keep, alpha=(1 - keep) / one.shape[1])
        derive(new)
        if any(root is not None for root in roots):
            roots = new.get("root_L"), new.get("root_R")
    decayed = grad if weight is None else grad + weight * settings.weight_decay
    new["exp_avg"] = state["exp_avg"] * b1 + decayed * (1 - b1)
    new["second_moment"] = torch.full_like(state["second_moment"], second)
    sigma = math.sqrt(second / (1 - b2**number))
    ahead = new["exp_avg"] * (b1 / (1 - b1**number)) + decayed * (1 - b1)
    direction = ahead / sigma if sigma > 0 else torch.zeros_like(ahead)
    return new, _times(_times(roots[0], direction), roots[1]) * settings.lr


def _inverse_root(factor: Tensor) -> Tensor:
    """Q diag(max(l / mean(l), floor))^(-1/2) Q^T."""
    values, vectors = decompose(factor)
    return (vectors * (values / values.mean()).clamp_min(FLOOR).rsqrt()) @ vectors.mT


def _times(one: Tensor | None, other: Tensor | None) -> Tensor:
    """The product; None is the identity."""
    if one is None or other is None:
        found = other if one is None else one
        assert found is not None
        return found
    return one @ other


def _unit(matrix: Tensor) -> tuple[float, Tensor]:
    """The root of the mean square, without overflow, and the matrix over it; (0, itself) if all is zero."""
    largest = float(matrix.abs().amax()) if matrix.numel() else 0.0
    if largest < torch.finfo(matrix.dtype).tiny:
        return 0.0, matrix
    scaled = matrix / largest
    ratio = math.sqrt(float(scaled.square().mean()))
    return largest * ratio, scaled / ratio
