"""SOAP: Adam in the eigenbases of Shampoo's factors, which follow these by a power iteration now and then.

Published by N. Vyas et al., arXiv 2409.11321, Algorithm 3. For a gradient G ``[m, n]`` with factors L, R and bases
Q_L, Q_R (columns), at step t = 1, 2, ... after the first gradient:

    G' = Q_L^T G Q_R                                        with the bases from before G
    M <- b1 M + (1 - b1) G'                                 G' with weight decay, if that is l2
    V <- b2 V + (1 - b2) G' * G'
    N = M / (sqrt(V) + eps) * sqrt(1 - b2^t) / (1 - b1^t)   eps outside the root, not corrected
    update = Q_L N Q_R^T
    L <- s L + (1 - s) G G^T,   R <- s R + (1 - s) G^T G    s = shampoo_beta, no bias correction
    when due, for each side:
        order = diag(Q^T L Q), descending;  Q and V in this order
        Q <- the orthogonal factor of qr(L Q)               one power iteration
        M is carried from the old basis to the new

As in the authors' implementation the first gradient makes no update: it makes the factors, and the bases by an
eigendecomposition. So no basis ever depends on the gradient that it turns. M is kept in the bases (the paper keeps it
outside, which is the same but for rounding); V is not turned, it only follows the order. Bases cannot be made from the
factors, so they are saved. A side over ``max_factor_dim`` has no factor: its basis is the identity.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor

from weft.optim.matrix.optimizer import MatrixOptimizer
from weft.optim.matrix.rule import (
    LARGEST,
    FactorSettings,
    Layout,
    Rule,
    State,
    decompose,
    find_factor_fault,
    is_zero,
    within_range,
)


def _layout(shape: tuple[int, ...], dtype: torch.dtype, settings: FactorSettings) -> Layout:
    """Adam's moments in the bases; the factor and the basis of each side that is not too long."""
    found: Layout = dict.fromkeys(("exp_avg", "exp_avg_sq"), (shape, dtype))
    for side, dim in settings.sides(shape):
        found |= dict.fromkeys((side, f"Q_{side}"), ((dim, dim), dtype))
    return found


def _advance(
    state: State, grad: Tensor, weight: Tensor | None, settings: FactorSettings, due: Collection[str]
) -> tuple[State, Tensor]:
    """The state after a step and the update, which is still to be multiplied by `rate`."""
    grad = within_range(grad, LARGEST[grad.dtype])
    step = int(state["step"])
    keep = settings.shampoo_beta
    new = {
        side: (matrix @ matrix.mT).mul_(1 - keep).add_(state[side] * keep)
        for side, matrix in (("L", grad), ("R", grad.mT))
        if side in state
    }
    first, second = state["exp_avg"], state["exp_avg_sq"]
    if step == 0:
        # in rows, as those that are loaded
        bases = {f"Q_{side}": decompose(factor)[1].contiguous() for side, factor in new.items()}
        return {"exp_avg": first, "exp_avg_sq": second} | new | bases, torch.zeros_like(grad)
    old = {side: state[f"Q_{side}"] for side in new}
    decayed = grad if weight is None else grad + weight * settings.weight_decay
    first, second, direction = _adam(first, second, _turn(decayed, old), settings, step)
    update = _turn(direction, {side: basis.mT for side, basis in old.items()})
    bases = dict(old)
    for at, side in enumerate("LR"):
        if side in new and side in due:
            bases[side], order = _follow(new[side], old[side])
            second = second.index_select(at, order)
            first = _turn(first, {side: old[side].mT @ bases[side]})
    saved = {f"Q_{side}": basis for side, basis in bases.items()}
    return {"exp_avg": first, "exp_avg_sq": second} | new | saved, update


def _rate(shape: tuple[int, ...], settings: FactorSettings) -> float:
    """What the update is multiplied by."""
    return settings.lr


def _adam(
    first: Tensor, second: Tensor, grad: Tensor, settings: FactorSettings, step: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Both moments after a step, and the direction."""
    b1, b2 = settings.betas
    first = (first * b1).add_(grad * (1 - b1))
    second = (second * b2).add_((grad * grad).mul_(1 - b2))
    correction = math.sqrt(1 - b2**step) / (1 - b1**step)
    return first, second, (first / second.sqrt().add_(settings.eps)).mul_(correction)


def _follow(factor: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """The basis ``[n, n]`` after one power iteration, and the order ``[n]`` in which it has taken the old columns.

    A zero factor tells nothing: the old one stays, as V does, which is not zero if weights decay by l2. The new basis
    is laid out as the old, in rows, as one that is loaded: products have other bits otherwise.
    """
    powers = factor @ basis
    order = (basis * powers).sum(0).argsort(descending=True, stable=True)
    turned = torch.linalg.qr(powers.index_select(1, order))[0]
    return torch.where(is_zero(factor), basis, turned), order


def _turn(matrix: Tensor, bases: dict[str, Tensor]) -> Tensor:
    """Q_L^T matrix Q_R; a side that is not among the bases stays as it is."""
    turned = bases["L"].mT @ matrix if "L" in bases else matrix
    return turned @ bases["R"] if "R" in bases else turned


SOAP_RULE = Rule(_layout, _advance, rate=_rate)


class SOAP(MatrixOptimizer):
    """Adam in slowly followed eigenbases of Shampoo's factors, for matrices; AdamW for the rest.

    Each matrix has an owner among the ranks, as in `REKLS`, whose table says how parameters are placed and what crosses
    ranks; groups have the same further keys. What is no matrix, and groups with ``"algorithm": "adamw"``, is stepped by
    AdamW.

    ``root_every``: how many steps a basis stays before it follows its factor (published: precondition_frequency). The
    factors of all matrices take turns, so each step has as much to do. A side over ``max_factor_dim`` has no factor.

    >>> model = torch.nn.Linear(4, 3)
    >>> optimizer = SOAP([model.weight], lr=0.003)
    >>> model(torch.ones(2, 4)).sum().backward()
    >>> optimizer.step()
    """

    label = "SOAP"
    settings_kind = FactorSettings

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        shampoo_beta: float = 0.95,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        weight_decay_method: str = "decoupled",
        cautious: bool = False,
        root_every: int = 10,
        dense_steps: int = 0,
        max_factor_dim: int = 8192,
        group: Any = None,
        data_group: Any = None,
        on_nonfinite: str = "raise",
    ) -> None:
        defaults = {
            "lr": lr, "betas": betas, "shampoo_beta": shampoo_beta, "eps": eps, "weight_decay": weight_decay,
            "weight_decay_method": weight_decay_method, "cautious": cautious, "max_factor_dim": max_factor_dim,
            "root_every": root_every, "dense_steps": dense_steps,
        }  # fmt: skip
        super().__init__(params, defaults, group, data_group, on_nonfinite)

    def rule_of(self, group: dict[str, Any]) -> Rule:
        return SOAP_RULE

    def find_own_fault(self, group: dict[str, Any]) -> Exception | None:
        return find_factor_fault(self.label, group)
