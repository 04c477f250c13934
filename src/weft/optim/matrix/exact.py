"""The published update: SOAP in the eigenbases of KL-Shampoo's factors, which are renewed in every step.

For a gradient G ``[m, n]`` at step t, with eigenvalues and bases (l_L, Q_L), (l_R, Q_R) of the factors before it:

    b_t = 1 - (1 - b) / (1 - b^t)                                     b = shampoo_beta
    L <- b_t L + (1 - b_t) G Q_R diag(1 / (n max(l_R, eps))) Q_R^T G^T
    R <- b_t R + (1 - b_t) G^T Q_L diag(1 / (m max(l_L, eps))) Q_L^T G
    M is carried from the old bases to those of the new L and R; V stays as it is
    Adam on Q_L^T G Q_R with M and V; its step, turned back, is the update

The bases before a step are those after the one before it, so they are kept: two decompositions, not four. A side over
``max_factor_dim`` has no factor: its basis is the identity and its eigenvalues are 1.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from weft.optim.matrix.rule import Layout, Settings, adam_direction, decompose, zero_basis


def layout(shape: tuple[int, ...], dtype: torch.dtype, settings: Settings) -> Layout:
    """Adam's moments in the eigenbases, and the factors."""
    return dict.fromkeys(("exp_avg", "exp_avg_sq"), (shape, dtype)) | settings.factors(shape, dtype)


def derive(state: dict[str, Any], zero: bool = False) -> None:
    """The bases, from the factors."""
    for side in "LR":
        if side in state:
            find = zero_basis if zero else decompose
            state[f"eigenvalues_{side}"], state[f"Q_{side}"] = find(state[side])


def advance(
    state: dict[str, Any], grad: Tensor, weight: Tensor | None, settings: Settings
) -> tuple[dict[str, Any], Tensor]:
    """The state after a step and the update."""
    grad = _within_range(grad)
    new = _renew_factors(state, grad, settings)
    old_l, old_r, now_l, now_r = (some.get(f"Q_{side}") for some in (state, new) for side in "LR")
    moment = _turn(state["exp_avg"], _transposed(old_l), _transposed(old_r))
    decayed = grad if weight is None else grad + weight * settings.weight_decay
    moments, direction = adam_direction(state, _turn(decayed, now_l, now_r), _turn(moment, now_l, now_r), settings)
    return new | moments, _turn(direction, _transposed(now_l), _transposed(now_r)).mul_(settings.lr)


def _renew_factors(state: dict[str, Any], grad: Tensor, settings: Settings) -> dict[str, Any]:
    """Both factors, from the old bases, and their new bases."""
    keep = settings.keep_factor(int(state["step"]) + 1)
    new: dict[str, Any] = {}
    for side, other, matrix in (("L", "R", grad), ("R", "L", grad.mT)):
        if side not in state:
            continue
        width = matrix.shape[1]
        if other in state:
            matrix = matrix @ state[f"Q_{other}"]
            weights = 1 / (width * state[f"eigenvalues_{other}"].clamp_min(settings.eps))
            weighted = matrix * weights
        else:
            weighted = matrix / width
        new[side] = (weighted @ matrix.mT).mul_(1 - keep).add_(state[side] * keep)
    derive(new)
    return new


def _turn(matrix: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    """left^T matrix right; None is the identity."""
    turned = matrix if left is None else left.mT @ matrix
    return turned if right is None else turned @ right


def _transposed(basis: Tensor | None) -> Tensor | None:
    return None if basis is None else basis.mT


def _within_range(grad: Tensor) -> Tensor:
    """The gradient, or a power of two of it where an entry is so large (2^40 in fp32) that its square over eps is not
    finite, nor is the published update.
    """  # fmt: skip
    if not grad.numel():
        return grad
    limit = math.sqrt(torch.finfo(grad.dtype).max) * 2.0**-24
    fraction, exponent = torch.frexp(grad.abs().amax().double() / limit)
    above = (exponent - (fraction == 0.5).to(exponent.dtype)).clamp_min(0).to(torch.int64)  # powers of two
    return grad * ((1023 - above) << 52).view(torch.float64)  # 2^-above
