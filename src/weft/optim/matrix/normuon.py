"""NorMuon: Muon whose rows (neurons) have learning rates of their own, by a second moment of one number for each.

Published by Z. Li et al., arXiv 2510.05491. For a gradient ``[m, n]``, with O the orthogonalized momentum of `muon.py`
and v ``[m, 1]``:

    v <- b2 v + (1 - b2) mean_of_row(O * O)                 b2 = beta2
    H = O / (sqrt(v) + eps)                                 row by row; eps outside the root
    update = H sqrt(m n) / ||H||_F,   rate = 0.2 lr         scale = "rms": the paper's, entries as large as AdamW's
    update = H ||O||_F / ||H||_F,     rate = as Muon's      scale = "original" or "spectral"

v has no bias correction, as in the paper: but for eps the norm of H takes out any common factor. With the scale
"original" the update has the norm it had before and Muon's first rate, as in the authors' implementation. That steps
with nesterov, Dion's by default without. A matrix of zeros has no update.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.optim.matrix import muon
from weft.optim.matrix.muon import COEFFICIENTS, Muon, MuonSettings, Triple, find_share_faults
from weft.optim.matrix.rule import Layout, Rule, State
from weft.optim.step.compare import join_faults


@dataclass(frozen=True)
class NorMuonSettings(MuonSettings):
    """One step's numbers: those of Muon, and ``beta2`` of the second moment, whose eps is ``eps``."""

    scale: str = "rms"
    beta2: float = 0.95


def _layout(shape: tuple[int, ...], dtype: torch.dtype, settings: NorMuonSettings) -> Layout:
    """The momentum, and a number for each row."""
    return {"momentum_buffer": (shape, dtype), "second_momentum_buffer": ((shape[0], 1), dtype)}


def _advance(
    state: State, grad: Tensor, weight: Tensor | None, settings: NorMuonSettings, due: Collection[str]
) -> tuple[State, Tensor]:
    """The state after a step and the update, in the dtype of the gradient; it is still to be multiplied by `rate`."""
    buffer, ahead = muon.advance_momentum(state["momentum_buffer"], grad, weight, settings)
    direction = muon.orthogonalize(ahead, settings).to(grad.dtype)
    second = state["second_momentum_buffer"]
    if direction.numel():
        second = second * settings.beta2 + direction.square().mean(1, keepdim=True) * (1 - settings.beta2)
        even = _unit(direction / (second.sqrt() + settings.eps))
        norm = math.sqrt(grad.numel()) if settings.scale == "rms" else direction.norm()
        direction = even * norm
    return {"momentum_buffer": buffer, "second_momentum_buffer": second}, direction


def _rate(shape: tuple[int, ...], settings: NorMuonSettings) -> float:
    """What the update is multiplied by."""
    return 0.2 * settings.lr if settings.scale == "rms" else muon.rate(shape, settings)


def _unit(matrix: Tensor) -> Tensor:
    """The matrix over its Frobenius norm, which is taken without underflow; zero if all is zero."""
    largest = matrix.abs().amax()
    scaled = matrix / torch.where(largest >= torch.finfo(matrix.dtype).tiny, largest, 1.0)
    norm = scaled.norm()
    return scaled / torch.where(norm >= 1, norm, 1.0)


NORMUON = Rule(_layout, _advance, rate=_rate)


class NorMuon(Muon):
    """Muon whose rows have rates of their own; AdamW for the rest. Everything else as in `Muon`.

    ``beta2``: of the second moment of each row. ``eps`` is added to its root, and is AdamW's.

    >>> model = torch.nn.Linear(4, 3)
    >>> optimizer = NorMuon([model.weight], lr=0.02)
    >>> model(torch.ones(2, 4)).sum().backward()
    >>> optimizer.step()
    """

    label = "NorMuon"
    settings_kind = NorMuonSettings

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        beta2: float = 0.95,
        nesterov: bool = True,
        *,
        ns_coefficients: Triple | Sequence[Triple] = COEFFICIENTS,
        ns_steps: int = 5,
        ns_dtype: torch.dtype = torch.bfloat16,
        scale: str = "rms",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay_method: str = "decoupled",
        cautious: bool = False,
        group: Any = None,
        data_group: Any = None,
        on_nonfinite: str = "raise",
    ) -> None:
        self._own = {"beta2": beta2}
        super().__init__(
            params, lr, weight_decay, momentum, nesterov, ns_coefficients=ns_coefficients, ns_steps=ns_steps,
            ns_dtype=ns_dtype, scale=scale, betas=betas, eps=eps, weight_decay_method=weight_decay_method,
            cautious=cautious, group=group, data_group=data_group, on_nonfinite=on_nonfinite,
        )  # fmt: skip

    def rule_of(self, group: dict[str, Any]) -> Rule:
        return NORMUON

    def find_own_fault(self, group: dict[str, Any]) -> Exception | None:
        return join_faults([super().find_own_fault(group), *find_share_faults(self.label, group, "beta2")])
