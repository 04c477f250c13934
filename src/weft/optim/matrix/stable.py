"""The well-conditioned update: whitening by inverse roots of KL-Shampoo's factors, with one scalar second moment.

Nothing depends on the choice of eigenvectors, so the update is smooth in the gradient: a sum over ranks in another
order changes it by rounding, not by its own size. For a gradient G ``[m, n]`` at step t, with inverse roots P_L, P_R
(the identity before the first step), momentum M and a scalar s:

    g = rms(G),  U = G / g                                  g = 0: M fades, the factors stay
    M <- b1 M + (1 - b1) G
    s <- b2 s + (1 - b2) (g rms(P_L U P_R))^2               with the old roots
    L <- b_t L + (1 - b_t) (U P_R)(U P_R)^T / n             b_t as in the published update
    R <- b_t R + (1 - b_t) (P_L U)^T (P_L U) / m            with the old roots
    P = Q diag(max(l / mean(l), floor))^(-1/2) Q^T          of each factor, where it is due
    update = lr P_L (b1 M / (1 - b1^t) + (1 - b1) G) P_R / sqrt(s / (1 - b2^t))

On the first step with a gradient that is not zero the roots of the update are still the identity; a root of zeros
stands for it. A side over ``max_factor_dim`` keeps it. Factors are renewed at every step, roots where they are due.
s is fp64 and G is scaled before it is squared: gradients of any size are alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from weft.comm.device import runs_behind
from weft.optim.matrix.rule import Advancing, FactorSettings, Layout, Rule, State, decompose, is_zero

FLOOR = 0.05  # of an eigenvalue to the mean


def _layout(shape: tuple[int, ...], dtype: torch.dtype, settings: FactorSettings) -> Layout:
    """The momentum, the scalar second moment and the factors."""
    return {"exp_avg": (shape, dtype), "second_moment": ((), torch.float64)} | settings.factors(shape, dtype)


def _kept(shape: tuple[int, ...], dtype: torch.dtype, settings: FactorSettings) -> Layout:
    """The inverse roots."""
    return {f"root_{side}": ((dim, dim), dtype) for side, dim in settings.sides(shape)}


def _derive(state: State, due: Collection[str], zero: bool = False) -> None:
    """The inverse roots, from the factors."""
    for side in due:
        state[f"root_{side}"] = torch.zeros_like(state[side]) if zero else _inverse_root(state[side])


def _advance(
    state: State, grad: Tensor, weight: Tensor | None, settings: FactorSettings, due: Collection[str]
) -> Advancing:
    """The state after a step and the update."""
    b1, b2 = settings.betas
    number = int(state["step"]) + 1
    new: State = {}
    roots = _Roots.of(state)
    second = b2 * state["second_moment"]
    size, unit = _unit(grad)
    moved, behind = size > 0, runs_behind(grad.device)
    if grad.numel() and (behind or moved):
        left, right = roots.left(unit), roots.right(unit)
        second = second + (1 - b2) * (size * _unit(roots.right(left))[0]).square()
        keep = settings.keep_factor(number)
        for side, one in (("L", right), ("R", left.mT)):
            if side in state:
                renew = partial(torch.addmm, state[side], one, one.mT, beta=keep, alpha=(1 - keep) / one.shape[1])
                new[side] = _if(moved, renew, state[side])
        for name, root in (yield {side: new[side] for side in due}).items():
            new[name] = torch.where(moved, root, state[name]) if behind else root
        roots = _Roots.of(state | new).if_any_of(roots)
    decayed = grad if weight is None else grad + weight * settings.weight_decay
    new["exp_avg"] = state["exp_avg"] * b1 + decayed * (1 - b1)
    new["second_moment"] = second
    sigma = _root(second / (1 - b2**number))
    ahead = new["exp_avg"] * (b1 / (1 - b1**number)) + decayed * (1 - b1)
    direction = torch.where(sigma > 0, ahead / sigma, 0.0)
    return new, roots.right(roots.left(direction)) * settings.lr


class _Roots(NamedTuple):
    """The inverse roots of both sides, each with a flag on its device whether it counts; None is the identity."""

    of_l: tuple[Tensor, Tensor] | None
    of_r: tuple[Tensor, Tensor] | None

    @staticmethod
    def of(state: State) -> _Roots:
        roots = (state.get(f"root_{side}") for side in "LR")
        return _Roots(*(None if root is None else (root, ~is_zero(root)) for root in roots))

    def left(self, matrix: Tensor) -> Tensor:
        """P_L times it."""
        return matrix if self.of_l is None else _if(self.of_l[1], partial(torch.matmul, self.of_l[0], matrix), matrix)

    def right(self, matrix: Tensor) -> Tensor:
        """It times P_R."""
        return matrix if self.of_r is None else _if(self.of_r[1], partial(torch.matmul, matrix, self.of_r[0]), matrix)

    def if_any_of(self, before: _Roots) -> _Roots:
        """These, if there were any ``before``."""
        flags = [one[1] for one in before if one is not None]
        if not flags:
            return _Roots(None, None)
        any_before = torch.stack(flags).any()
        return _Roots(*(None if one is None else (one[0], one[1] & any_before) for one in self))


def _inverse_root(factor: Tensor) -> Tensor:
    """Q diag(max(l / mean(l), floor))^(-1/2) Q^T; zeros of a factor of zeros."""

    def make() -> Tensor:
        values, vectors = decompose(factor)
        return (vectors * (values / values.mean()).clamp_min(FLOOR).rsqrt()) @ vectors.mT

    return _if(~is_zero(factor), make, torch.zeros_like(factor))


def _if(flag: Tensor, make: Callable[[], Tensor], otherwise: Tensor) -> Tensor:
    """``make()`` or the other, as the flag says; on a device, where the host does not know it, both are made."""
    if not runs_behind(flag.device):
        return make() if flag else otherwise
    return torch.where(flag, make(), otherwise)


def _root(square: Tensor) -> Tensor:
    """Of an fp64 scalar, rounded as it should be, as on CUDA: torch's on the CPU is off by a bit once in 80 times."""
    return square.sqrt() if runs_behind(square.device) else square.new_tensor(math.sqrt(square))


def _unit(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The root of the mean square, without overflow, in fp64, and the matrix over it; (0, itself) if all is zero."""
    if not matrix.numel():
        return torch.zeros((), dtype=torch.float64, device=matrix.device), matrix
    largest = matrix.abs().amax()
    there = largest >= torch.finfo(matrix.dtype).tiny
    scaled = matrix / torch.where(there, largest, 1.0)
    ratio = torch.where(there, _root(scaled.square().mean().double()), 1.0)
    return torch.where(there, largest.double() * ratio, 0.0), scaled / ratio


STABLE = Rule(_layout, _advance, _derive, _kept)
