"""The numbers of one parameter group, as the mathematics of a step needs them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from weft.comm.arguments import find_choice_fault, find_flag_fault, find_integer_fault, show
from weft.optim.step.compare import join_faults
from weft.optim.step.part import find_kind_fault

Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]  # of each tensor of a state: shape and dtype
ALGORITHMS = ("rekls", "adamw")


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

    def factored(self, dim: int) -> bool:
        """Whether a side of this length has a factor."""
        return dim <= self.max_factor_dim


_SHRINK = {
    "decoupled": lambda lr, decay: 1 - lr * decay,
    "independent": lambda lr, decay: 1 - decay,
    "palm": lambda lr, decay: 1 - lr * lr * decay,
    "l2": lambda lr, decay: 1.0,
}
DECAY_METHODS = tuple(_SHRINK)


def find_group_fault(group: dict[str, Any], variants: tuple[str, ...]) -> Exception | None:
    """All that is wrong with a parameter group's numbers and options, if anything."""
    if fault := find_kind_fault("REKLS", group, "eps", "weight_decay", "shampoo_beta"):
        return fault
    return join_faults(_group_faults(group, variants))


def _group_faults(group: dict[str, Any], variants: tuple[str, ...]) -> Iterator[Exception | None]:
    lr, decay = float(group["lr"]), group["weight_decay"]
    if not (0 <= lr < float("inf") and 0 <= group["eps"] < float("inf") and 0 <= decay < float("inf")):
        yield ValueError(
            f"REKLS: lr, eps and weight_decay must be finite and not negative, got {lr}, {group['eps']} and {decay}"
        )
    b1, b2 = group["betas"]
    if not (0 <= b1 < 1 and 0 <= b2 < 1 and 0 <= group["shampoo_beta"] < 1):
        yield ValueError(
            f"REKLS: betas and shampoo_beta must be in [0, 1), got ({b1}, {b2}) and {group['shampoo_beta']}"
        )
    for name, known in (
        ("weight_decay_method", DECAY_METHODS), ("variant", variants), ("algorithm", ALGORITHMS),
    ):  # fmt: skip
        yield find_choice_fault("REKLS", name, group[name], None, known)
    yield find_integer_fault("REKLS", "max_factor_dim", group["max_factor_dim"], None, least=0)
    dim = group["partition_dim"]
    if dim is not None and (find_integer_fault("REKLS", "partition_dim", dim, None) or dim not in (0, 1)):
        yield ValueError(f"REKLS: partition_dim must be 0, 1 or None, got {show(dim)}")
    yield find_flag_fault("REKLS", "flatten", group["flatten"], None)
