"""Muon: momentum whose singular values are brought near to 1 by Newton-Schulz iterations, which need products only.

For a gradient G ``[m, n]`` with momentum B, after K. Jordan, kellerjordan.github.io/posts/muon, and torch.optim.Muon:

    B <- u B + (1 - u) G                                    u = momentum
    X = u B + (1 - u) G, or B without nesterov
    X <- X / max(||X||_F, ns_eps)                           no singular value is above 1 now
    X <- a X + (b A + c A A) X,   A = X X^T                 once for each (a, b, c); X^T in place of X where m > n
    update = X,   rate = lr * scale                         scale by the shape alone

    scale: "original"  sqrt(max(1, m / n))                  as torch's default
           "spectral"  sqrt(m / n)                          the same size of activations at every width
           "rms"       0.2 sqrt(max(m, n))                  entries as large as AdamW's; torch: match_rms_adamw

Operators, their order and their dtypes are those of torch.optim.Muon, and so are the bits. Where its norm would
overflow, a power of two is taken out of X first, which X / ||X|| does not notice.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from weft.optim.matrix.rule import Layout

Triple = tuple[float, float, float]
COEFFICIENTS: Triple = (3.4445, -4.7750, 2.0315)  # K. Jordan's: steep at 0, and then between 0.7 and 1.2
SCALES = {
    "original": lambda m, n: math.sqrt(max(1, m / n)),
    "spectral": lambda m, n: math.sqrt(m / n),
    "rms": lambda m, n: 0.2 * math.sqrt(max(m, n)),
}


@dataclass(frozen=True)
class MuonSettings:  # TODO: (Settings), which has the first five
    """One step's numbers. ``ns_coefficients``: a triple for ``ns_steps`` steps, or a triple for each step there is."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    weight_decay_method: str
    momentum: float = 0.95
    nesterov: bool = True
    ns_coefficients: Triple | Sequence[Triple] = COEFFICIENTS
    ns_steps: int = 5
    ns_dtype: torch.dtype = torch.bfloat16
    ns_eps: float = 1e-7
    scale: str = "original"

    @property
    def polynomials(self) -> Sequence[Triple]:
        """(a, b, c) of each step."""
        if isinstance(self.ns_coefficients[0], Sequence):
            return cast(Sequence[Triple], self.ns_coefficients)
        return [cast(Triple, self.ns_coefficients)] * self.ns_steps


def layout(shape: tuple[int, int], dtype: torch.dtype, settings: MuonSettings) -> Layout:
    """The momentum, by torch's name."""
    return {"momentum_buffer": (shape, dtype)}


def derive(state: dict[str, Any], zero: bool = False) -> None:
    """Nothing is left out of a checkpoint."""


def advance(
    state: dict[str, Any], grad: Tensor, weight: Tensor | None, settings: MuonSettings, due: Collection[str] = ()
) -> tuple[dict[str, Any], Tensor]:
    """The state after a step and the update, in the dtype of the iterations; it is still to be multiplied by `rate`."""
    buffer, ahead = advance_momentum(state["momentum_buffer"], grad, weight, settings)
    return {"momentum_buffer": buffer}, orthogonalize(ahead, settings)


def rate(shape: tuple[int, int], settings: MuonSettings) -> float:
    """The learning rate of a matrix: what the update is multiplied by."""
    return settings.lr * (SCALES[settings.scale](*shape) if all(shape) else 1.0)


def advance_momentum(
    buffer: Tensor, grad: Tensor, weight: Tensor | None, settings: MuonSettings
) -> tuple[Tensor, Tensor]:
    """The momentum ``[m, n]`` after a step, and what is to be made orthogonal.

    Entries of more than a quarter of the largest number are cut: ``lerp`` takes differences.
    """
    decayed = grad if weight is None else grad + weight * settings.weight_decay
    limit = torch.finfo(grad.dtype).max / 4
    decayed = decayed.clamp(-limit, limit)
    buffer = buffer.lerp(decayed, 1 - settings.momentum)
    return buffer, decayed.lerp(buffer, settings.momentum) if settings.nesterov else buffer


def orthogonalize(matrix: Tensor, settings: MuonSettings) -> Tensor:
    """U V^T of a matrix U S V^T ``[m, n]``, nearly, laid out in rows; zero where it is zero.

    In bf16, or else in the dtype of the matrix but at least in fp32.
    """
    dtype = settings.ns_dtype if settings.ns_dtype == torch.bfloat16 else matrix.dtype
    found = within_range(matrix, 2.0**40).to(dtype)
    tall = matrix.shape[0] > matrix.shape[1]
    found = found.mT if tall else found
    found = found / found.norm().clamp(min=settings.ns_eps)
    for a, b, c in settings.polynomials:
        gram = found @ found.mT
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.mT.contiguous() if tall else found


def within_range(matrix: Tensor, limit: float) -> Tensor:
    """The matrix, times a power of two where an entry is not below ``limit``, itself a power of two: then all are."""
    if not matrix.numel():
        return matrix
    exponent = torch.frexp(matrix.abs().amax().double())[1]  # the largest entry is in [2^(exponent - 1), 2^exponent)
    above = (exponent - int(math.log2(limit))).clamp_min(0).to(torch.int64)
    return matrix * ((1023 - above) << 52).view(torch.float64)  # 2^-above
