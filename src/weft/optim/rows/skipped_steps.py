"""Many steps of Adam without a gradient, done at once when a row is next needed.

A row that gets no gradient in the steps i = last+1 .. now still moves, by its momentum:

    w <- (1 - lr_i wd) w  -  lr_i / c1_i * b1^j m / (sqrt(b2^j v / c2_i) + eps),      j = i - last

with the bias corrections c1_i = 1 - b1^i and c2_i = 1 - b2^i. With s = sqrt(v) these updates sum to m F(s), where

    F(s) = sum_j  a_j / (s q_j + eps)

has the same a_j and q_j for every element of a row, and for every row with the same ``last``. As a function of log q,
each term is smooth: sqrt(q) / (s q + eps) has its nearest poles at a distance of pi, whatever s and eps are. So it is
interpolated in a few Chebyshev points X_k that serve all rows, and the sum becomes

    F(s) = sum_k  W_k / (s X_k + eps)                                                 k = 1 .. K

right to rounding for every s: in fp32 K is at most 12 for betas (0.9, 0.999) and 24 for (0.9, 0.95), instead of
hundreds of steps. K depends on the range of the q_j alone, and is enough for a single term anywhere in it: then it is
enough for their sum whatever the a_j are, zero, tiny or rising by orders of magnitude. m and v fade as b1^j and b2^j;
once the updates still to come are below rounding (`StepHistory.horizon`), momentum is dropped and the row is at rest.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from weft.comm.device import copy_to_device

_MOST = 96  # points; beyond, the steps are summed themselves
_WIDTHS = 8  # widths of an interval that are told apart, for each doubling


@dataclass(frozen=True)
class Skipped:
    """How to bring rows from several last steps to now: row r of each ``[L, ...]`` belongs to one last step."""

    weight: Tensor  # [L, 1] what is left of w after weight decay
    momentum: Tensor  # [L, 1] what is left of m
    variance: Tensor  # [L, 1] what is left of v
    amounts: Tensor  # [L, K] W
    points: Tensor  # [K] X, or [L, K] where the steps themselves are summed

    def on(self, device: torch.device) -> Skipped:
        """For rows on a device; points that all rows share stay numbers of the host."""
        names = ("weight", "momentum", "variance", "amounts", *(("points",) if self.points.ndim > 1 else ()))
        return replace(self, **{name: copy_to_device(getattr(self, name), device) for name in names})

    def at_rest(self) -> Skipped:
        """For rows without momentum: nothing to sum."""
        return replace(self, amounts=self.amounts[:, :0])


class StepHistory:
    """The steps a table has made since all its rows were up to date, at step ``base``."""

    def __init__(self, base: int, betas: tuple[float, float], eps: float, dtype: torch.dtype) -> None:
        self.base = self.now = base
        self.betas, self.eps, self._dtype = betas, eps, dtype
        self._rates = torch.zeros(64, dtype=torch.float64)  # lr of step base + 1 + index
        self._decays = torch.zeros(65, dtype=torch.float64)  # sum of log(1 - lr wd) of the first ``index`` of them
        self.decays = False  # whether any step had weight decay
        self.horizon = _horizon(betas, dtype)

    def append(self, lr: float, weight_decay: float) -> None:
        """Note a step."""
        index = self.now - self.base
        if index == len(self._rates):
            self._rates = torch.cat([self._rates, torch.zeros_like(self._rates)])
            self._decays = torch.cat([self._decays, torch.zeros_like(self._decays[1:])])
        self._rates[index] = lr
        self._decays[index + 1] = self._decays[index] + math.log1p(-lr * weight_decay)
        self.decays = self.decays or lr * weight_decay != 0
        self.now += 1

    def skipped(self, last: Tensor) -> Skipped:
        """For rows whose last steps were ``last`` ``[L]``, each before now: how to bring them to now."""
        (b1, b2), last = self.betas, last.double()
        lag = self.now - last
        longest = int(lag.max()) if self.horizon is None else min(int(lag.max()), self.horizon)
        j = torch.arange(1, longest + 1, dtype=torch.float64)
        step = last[:, None] + j
        index = (step.clamp(max=self.now) - self.base).long()
        end = self._decays[self.now - self.base]
        a = (step <= self.now) * self._rates[index - 1] * b1**j / (1 - b1**step) * (end - self._decays[index]).exp()
        q = (b2**j / (1 - b2**step)).sqrt()
        amounts, points = _shorten(a, q, self._dtype)
        left = (end - self._decays[(last - self.base).long()]).exp()
        columns = (left[:, None], (b1**lag)[:, None], (b2**lag)[:, None], amounts, points)
        return Skipped(*(column.to(self._dtype) for column in columns))


def _shorten(a: Tensor, q: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(W, X) for the sums of ``a / (s q + eps)`` over the last dimension of ``[L, J]``; a and q if that is no less."""
    if not a.shape[1]:
        return a, q
    low, high = float(q.min()), float(q.max())
    if low <= 0:  # b2 is 0, or so small that its powers are
        return a, q
    half = max(2.0**-10, math.log(high / low) / 2)
    count = _count_points(math.ceil(_WIDTHS * math.log2(half)), dtype)
    return (a, q) if count >= min(_MOST, a.shape[1]) else interpolate(a, q, low, high, count)


@functools.lru_cache(maxsize=512)
def _count_points(width: int, dtype: torch.dtype) -> int:
    """Points that are enough for one term anywhere in an interval of log q of half width 2^(width / _WIDTHS).

    In fp64 the error is held to the largest value in the interval: 1e-14 of a smaller one is below rounding there.
    """
    half = 2.0 ** (width / _WIDTHS)
    tolerance = 1e-14 * math.exp(half) if dtype == torch.float64 else 2.0**-22
    return next((count for count in range(2, _MOST) if _error(half, count) <= tolerance), _MOST)


def _error(half: float, count: int) -> float:
    """The largest relative error of one term interpolated in ``count`` points, for s / eps of any size."""
    log_q = torch.linspace(-half, half, 8 * count + 1, dtype=torch.float64)[:, None]  # each a sum of one term
    amounts, points = interpolate(torch.ones_like(log_q), log_q.exp(), math.exp(-half), math.exp(half), count)
    ratio = torch.linspace(-half - 8, half + 8, 65, dtype=torch.float64).exp()[:, None]
    found = (amounts[:, None] / (ratio * points + 1)).sum(2)
    return float((found * (ratio * log_q[:, :, None].exp() + 1)[..., 0] - 1).abs().max())


def _horizon(betas: tuple[float, float], dtype: torch.dtype) -> int | None:
    """Steps after which what momentum still does is below rounding of one update; None if that never comes.

    |m| <= C sqrt(v), by the Cauchy-Schwarz inequality, and updates shrink by b1 / sqrt(b2) in each step.
    """
    b1, b2 = betas
    if b1 == 0:
        return 0
    ratio = b1 / math.sqrt(b2) if b2 > 0 else math.inf
    if ratio >= 1:
        return None
    bound = (1 - b1) / math.sqrt((1 - b2) * (1 - b1 * b1 / b2))
    small = 2.0**-54 if dtype == torch.float64 else 2.0**-25
    return math.ceil(math.log(small * (1 - ratio) / max(bound, 1.0)) / math.log(ratio))


def interpolate(a: Tensor, q: Tensor, low: float, high: float, count: int) -> tuple[Tensor, Tensor]:
    """(W ``[L, count]``, X ``[count]``) with sum_j a_j / (s q_j + eps) = sum_k W_k / (s X_k + eps), a and q ``[L, J]``.

    sqrt(q) / (s q + eps) is interpolated at Chebyshev points in log q between ``low`` and ``high``.

    >>> a, q = torch.ones(1, 3).double(), torch.tensor([[0.5, 0.6, 0.7]]).double()
    >>> W, X = interpolate(a, q, 0.5, 0.7, 8)
    >>> float((W / (2 * X + 1)).sum() - (a / (2 * q + 1)).sum()) < 1e-12
    True
    """
    middle, half = math.log(low * high) / 2, max(1e-9, math.log(high / low) / 2)
    angles = math.pi * (torch.arange(count, dtype=a.dtype) + 0.5) / count
    points = torch.exp(middle + half * angles.cos())
    place, scaled = (q.log() - middle) / half, a / q.sqrt()
    # The moments of the measure with Chebyshev polynomials, by their recurrence.
    before, now = torch.ones_like(place), place
    moments = [scaled.sum(1)]
    for _ in range(count - 1):
        moments.append((scaled * now).sum(1))
        before, now = now, 2 * place * now - before
    factors = 2 / count * torch.cos(torch.arange(count, dtype=a.dtype)[:, None] * angles)
    factors[0] /= 2
    return torch.stack(moments, 1) @ factors * points.sqrt(), points
