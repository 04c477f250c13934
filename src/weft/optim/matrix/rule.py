"""What a rule of a matrix optimizer is, and what rules share: the numbers of a group, Adam, decompositions.

A rule is a file with the functions of `Rule` and a line in `RULES` of `plan.py`. It sees one whole matrix, on the rank
that owns it. The engine does the rest for all of them: `plan.py` says where parameters lie and who owns them,
`engine.py` moves gradients and updates and sees to it that a step is made on every rank or on none, `checkpoint.py`
saves and loads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from weft.comm.device import runs_behind

Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]  # of each tensor of a state: shape and dtype


@dataclass(frozen=True)
class Settings:
    """One step's numbers for the parameters of a group."""

    lr: float
    betas: tuple[float, float]
    shampoo_beta: float
    eps: float
    weight_decay: float
    weight_decay_method: str
    max_factor_dim: int

    @staticmethod
    def of(group: dict[str, Any]) -> Settings:
        b1, b2 = group["betas"]
        return Settings(
            float(group["lr"]), (float(b1), float(b2)), float(group["shampoo_beta"]), float(group["eps"]),
            float(group["weight_decay"]), group["weight_decay_method"], int(group["max_factor_dim"]),
        )  # fmt: skip

    @property
    def shrink(self) -> float:
        """What weight decay leaves of a weight, before the update."""
        return _SHRINK[self.weight_decay_method](self.lr, self.weight_decay)

    @property
    def decays_gradient(self) -> bool:
        """Whether the decay is part of the gradient (l2), so that whoever works needs the weights too."""
        return self.weight_decay_method == "l2" and self.weight_decay != 0

    def factors(self, shape: tuple[int, ...], dtype: torch.dtype) -> Layout:
        """The layout of the factors L and R of a matrix: of each side that is not too long."""
        sides = zip("LR", shape, strict=True)
        return {side: ((dim, dim), dtype) for side, dim in sides if dim <= self.max_factor_dim}

    def keep_factor(self, number: int) -> float:
        """b_t: what the ``number``-th step leaves of a factor, with bias correction."""
        return 1 - (1 - self.shampoo_beta) / (1 - self.shampoo_beta**number)


_SHRINK = {
    "decoupled": lambda lr, decay: 1 - lr * decay,
    "independent": lambda lr, decay: 1 - decay,
    "palm": lambda lr, decay: 1 - lr * lr * decay,
    "l2": lambda lr, decay: 1.0,
}
DECAY_METHODS = tuple(_SHRINK)


class Rule(Protocol):
    """How the state and the update of a matrix follow from its gradient."""

    def layout(self, shape: tuple[int, ...], dtype: torch.dtype, settings: Settings) -> Layout:
        """The shape and dtype of each tensor of the state that is saved; all are zero before the first step."""

    def derive(self, state: dict[str, Any], zero: bool = False) -> None:
        """Add what is made from saved tensors: the same bits as in the step that made these.

        ``zero``: there has been none, and all are zero.
        """

    def advance(
        self, state: dict[str, Any], grad: Tensor, weight: Tensor | None, settings: Settings
    ) -> tuple[dict[str, Any], Tensor]:
        """The state after a step and what is to be subtracted from the weight, both new: the step may be dropped.

        On a device the host must not wait: what depends on numbers there is chosen there.
        ``weight`` is given where the decay is part of the gradient (l2); it does not enter factors.
        """


class AdamW:
    """The rule of vectors and of what is not a matrix.

    Only operators that round once: parts of a tensor then get the bits that the whole would get, on any number of
    ranks. (Fused kernels and those with a factor, as ``addcmul``, round the last elements of a tensor differently.)
    """

    @staticmethod
    def layout(shape: tuple[int, ...], dtype: torch.dtype, settings: Settings) -> Layout:
        return dict.fromkeys(("exp_avg", "exp_avg_sq"), (shape, dtype))

    @staticmethod
    def derive(state: dict[str, Any], zero: bool = False) -> None:
        """Nothing is left out of a checkpoint."""

    @staticmethod
    def advance(
        state: dict[str, Any], grad: Tensor, weight: Tensor | None, settings: Settings
    ) -> tuple[dict[str, Any], Tensor]:
        limit = math.sqrt(torch.finfo(grad.dtype).max) / 16  # whose square still fits; torch's AdamW never moves again
        grad = grad.clamp(-limit, limit)
        decayed = grad if weight is None else grad + weight * settings.weight_decay
        new, direction = adam_direction(state, decayed, state["exp_avg"], settings)
        return new, direction.mul_(settings.lr)


def adam_direction(
    state: dict[str, Any], grad: Tensor, first: Tensor, settings: Settings
) -> tuple[dict[str, Any], Tensor]:  # fmt: skip
    """Both moments after a step from the ``first`` one, and Adam's direction: bias correction, eps outside the root."""
    b1, b2 = settings.betas
    number = int(state["step"]) + 1
    first = (first * b1).add_(grad * (1 - b1))
    second = (state["exp_avg_sq"] * b2).add_((grad * grad).mul_(1 - b2))
    root = (second / (1 - b2**number)).sqrt_().add_(settings.eps)
    return {"exp_avg": first, "exp_avg_sq": second}, (first / (1 - b1**number)).div_(root)


class EigenError(RuntimeError):
    """A factor could not be decomposed, not in fp64 either."""


def decompose(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues ``[n]``, descending, and the eigenvectors ``[n, n]`` as columns of a symmetric matrix.

    One that fails is tried again in fp64. A zero matrix gets the basis that LAPACK gives it. On a device the host waits
    for the decomposition, in torch, and for nothing else: eigenvalues that are not finite make vectors of NaN there.
    """
    if not runs_behind(factor.device) and is_zero(factor):
        return zero_basis(factor)
    for dtype in (factor.dtype, torch.float64):
        try:
            values, vectors = torch.linalg.eigh(factor.to(dtype))
        except torch.linalg.LinAlgError:
            continue
        fine = torch.isfinite(values).all()
        if runs_behind(factor.device):
            found = values.flip(0).to(factor.dtype), torch.where(fine, vectors.flip(1), math.nan).to(factor.dtype)
            pairs = zip(found, zero_basis(factor), strict=True)  # laid out as the first: in columns, as on the CPU
            values, vectors = (torch.where(~is_zero(factor), other, blank) for other, blank in pairs)
            return values, vectors
        if fine:
            return values.flip(0).to(factor.dtype), vectors.flip(1).to(factor.dtype)
    raise EigenError(f"a factor of {len(factor)} x {len(factor)} could not be decomposed")


def is_zero(factor: Tensor) -> Tensor:
    """Whether all of a factor is zero: it has no negative eigenvalue, so the diagonal tells. On its device."""
    return ~factor.diagonal().any()


def zero_basis(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of a zero matrix as large as ``factor``."""
    return factor.new_zeros(len(factor)), torch.eye(len(factor), dtype=factor.dtype, device=factor.device).flip(1)
