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
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from weft.comm.arguments import find_choice_fault, find_flag_fault, find_integer_fault, find_number_fault, show
from weft.optim.matrix.optimizer import MatrixOptimizer
from weft.optim.matrix.rule import Layout, Rule, Settings, State, within_range
from weft.optim.step.compare import join_faults

Triple = tuple[float, float, float]
COEFFICIENTS: Triple = (3.4445, -4.7750, 2.0315)  # K. Jordan's: steep at 0, and then between 0.7 and 1.2
SCALES = {
    "original": lambda m, n: math.sqrt(max(1, m / n)),
    "spectral": lambda m, n: math.sqrt(m / n),
    "rms": lambda m, n: 0.2 * math.sqrt(max(m, n)),
}


@dataclass(frozen=True)
class MuonSettings(Settings):
    """One step's numbers. ``ns_coefficients``: a triple for ``ns_steps`` steps, or a triple for each step there is."""

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


def _layout(shape: tuple[int, ...], dtype: torch.dtype, settings: MuonSettings) -> Layout:
    """The momentum, by torch's name."""
    return {"momentum_buffer": (shape, dtype)}


def _advance(
    state: State, grad: Tensor, weight: Tensor | None, settings: MuonSettings, due: Collection[str]
) -> tuple[State, Tensor]:
    """The state after a step and the update, in the dtype of the iterations; it is still to be multiplied by `rate`."""
    buffer, ahead = advance_momentum(state["momentum_buffer"], grad, weight, settings)
    return {"momentum_buffer": buffer}, orthogonalize(ahead, settings)


def rate(shape: tuple[int, ...], settings: MuonSettings) -> float:
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


MUON = Rule(_layout, _advance, rate=rate)


class Muon(MatrixOptimizer):
    """Momentum made orthogonal, for matrices; AdamW for the rest. torch.optim.Muon's bits where options coincide.

    Each matrix has an owner among the ranks, as in `REKLS`, whose table says how parameters are placed and what crosses
    ranks; groups have the same further keys. What is no matrix, and groups with ``"algorithm": "adamw"``, is stepped by
    AdamW with ``betas`` and ``eps``.

    ``ns_coefficients``: (a, b, c) for all of ``ns_steps`` Newton-Schulz iterations, or a sequence of triples, one for
    each. ``ns_dtype``: theirs, bf16 or fp32. ``scale``: "original", "spectral" or "rms" (docs/matrix_optimizers.md).

    >>> model = torch.nn.Linear(4, 3)
    >>> optimizer = Muon([model.weight], lr=0.02)
    >>> model(torch.ones(2, 4)).sum().backward()
    >>> optimizer.step()
    """

    label = "Muon"
    settings_kind: type[Settings] = MuonSettings
    _own: dict[str, Any] = {}  # noqa: RUF012 - what a rule made of this one adds to the defaults, never changed

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        *,
        ns_coefficients: Triple | Sequence[Triple] = COEFFICIENTS,
        ns_steps: int = 5,
        ns_dtype: torch.dtype = torch.bfloat16,
        scale: str = "original",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay_method: str = "decoupled",
        cautious: bool = False,
        group: Any = None,
        data_group: Any = None,
        on_nonfinite: str = "raise",
    ) -> None:
        defaults = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov,
            "ns_coefficients": ns_coefficients, "ns_steps": ns_steps, "ns_dtype": ns_dtype, "ns_eps": 1e-7,
            "scale": scale, "betas": betas, "eps": eps, "weight_decay_method": weight_decay_method,
            "cautious": cautious,
        }  # fmt: skip
        super().__init__(params, defaults | self._own, group, data_group, on_nonfinite)

    def rule_of(self, group: dict[str, Any]) -> Rule:
        return MUON

    def find_own_fault(self, group: dict[str, Any]) -> Exception | None:
        return join_faults([
            *find_share_faults(self.label, group, "momentum"),
            find_flag_fault(self.label, "nesterov", group["nesterov"], None),
            find_integer_fault(self.label, "ns_steps", group["ns_steps"], None, least=1),
            find_choice_fault(self.label, "scale", group["scale"], None, tuple(SCALES)),
            _find_iteration_fault(self.label, group["ns_coefficients"], group["ns_dtype"]),
        ])  # fmt: skip


def find_share_faults(label: str, group: dict[str, Any], *names: str) -> Iterable[Exception | None]:
    """What of a group is no number from 0 to less than 1."""
    for name in names:
        fault = find_number_fault(label, name, group[name], None, allow="any")
        if fault is None and not 0 <= group[name] < 1:
            fault = ValueError(f"{label}: {name} must be in [0, 1), got {group[name]}")
        yield fault


def _find_iteration_fault(label: str, coefficients: Any, dtype: Any) -> Exception | None:
    """What is wrong with the coefficients or the dtype of the iterations."""
    if dtype not in (torch.bfloat16, torch.float32):
        return ValueError(f"{label}: ns_dtype must be torch.bfloat16 or torch.float32, got {show(dtype)}")
    triples = coefficients if isinstance(coefficients, tuple | list) else [coefficients]
    triples = triples if triples and all(isinstance(one, tuple | list) for one in triples) else [coefficients]
    for triple in triples:
        numbers = triple if isinstance(triple, tuple | list) and len(triple) == 3 else [None]
        if any(find_number_fault(label, "ns_coefficients", one, None, allow="finite") for one in numbers):
            return ValueError(
                f"{label}: ns_coefficients must be (a, b, c) or a sequence of such, got {show(coefficients)}"
            )
    return None
