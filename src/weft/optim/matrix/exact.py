"""The published update: SOAP in the eigenbases of KL-Shampoo's factors, which are renewed in every step.

For a gradient G ``[m, n]`` at step t, with eigenvalues and bases (l_L, Q_L), (l_R, Q_R) of the factors before it:

    b_t = 1 - (1 - b) / (1 - b^t)                                     b = shampoo_beta
    L <- b_t L + (1 - b_t) G Q_R diag(1 / (n max(l_R, eps))) Q_R^T G^T
    R <- b_t R + (1 - b_t) G^T Q_L diag(1 / (m max(l_L, eps))) Q_L^T G
    M is carried from the old bases to those of the new L and R; V stays as it is
    Adam on Q_L^T G Q_R with M and V; its step, turned back, is the update

The bases before a step are those after the one before it, so they are kept: two decompositions, not four. A side over
``max_factor_dim`` has no factor: its basis is the identity and its eigenvalues are 1. With ``root_every`` over 1 bases
and eigenvalues stay until a side is due: that is no longer the published update.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from weft.optim.matrix.rule import (
    LARGEST,
    Advancing,
    FactorSettings,
    Layout,
    Rule,
    State,
    adam_direction,
    decompose,
    within_range,
    zero_basis,
)


def _layout(shape: tuple[int, ...], dtype: torch.dtype, settings: FactorSettings) -> Layout:
    """Adam's moments in the eigenbases, and the factors."""
    return dict.fromkeys(("exp_avg", "exp_avg_sq"), (shape, dtype)) | settings.factors(shape, dtype)


def _kept(shape: tuple[int, ...], dtype: torch.dtype, settings: FactorSettings) -> Layout:
    """Eigenvalues and bases of the factors."""
    found: Layout = {}
    for side, dim in settings.sides(shape):
        found |= {f"eigenvalues_{side}": ((dim,), dtype), f"Q_{side}": ((dim, dim), dtype)}
    return found


def _derive(state: State, due: Collection[str], zero: bool = False) -> None:
    """The bases, from the factors."""
    for side in due:
        find = zero_basis if zero else decompose
        state[f"eigenvalues_{side}"], state[f"Q_{side}"] = find(state[side])


def _advance(
    state: State, grad: Tensor, weight: Tensor | None, settings: FactorSettings, due: Collection[str]
) -> Advancing:
    """The state after a step and the update."""
    grad = within_range(grad, LARGEST[grad.dtype])
    new = _renew_factors(state, grad, settings)
    new |= yield {side: new[side] for side in due}
    now_l, now_r = ((state | new).get(f"Q_{side}") for side in "LR")
    from_l, from_r = (state[f"Q_{side}"].mT if side in due else None for side in "LR")
    to_l, to_r = (new[f"Q_{side}"] if side in due else None for side in "LR")
    moment = _turn(_turn(state["exp_avg"], from_l, from_r), to_l, to_r)
    decayed = grad if weight is None else grad + weight * settings.weight_decay
    moments, direction = adam_direction(state, _turn(decayed, now_l, now_r), moment, settings)
    return new | moments, _turn(direction, _transposed(now_l), _transposed(now_r)).mul_(settings.lr)


def _renew_factors(state: State, grad: Tensor, settings: FactorSettings) -> State:
    """Both factors, from the bases before the step."""
    keep = settings.keep_factor(int(state["step"]) + 1)
    new: State = {}
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
    return new


def _turn(matrix: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    """left^T matrix right; None is the identity."""
    turned = matrix if left is None else left.mT @ matrix
    return turned if right is None else turned @ right


def _transposed(basis: Tensor | None) -> Tensor | None:
    return None if basis is None else basis.mT


EXACT = Rule(_layout, _advance, _derive, _kept)
