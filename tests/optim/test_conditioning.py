"""How much the weights change when gradients change by 1e-6: what decides whether ranks can follow one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import weft

Draw = Callable[[torch.Generator], Tensor]


def normal(make: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=make, dtype=torch.float64)


FIXED = normal(torch.Generator().manual_seed(99), 24, 4)  # a space that gradients stay in

SOURCES: dict[str, Draw] = {
    "16 x 16": lambda make: normal(make, 16, 16),
    "12 x 20": lambda make: normal(make, 12, 20),
    "64 x 128": lambda make: normal(make, 64, 128),
    "256 x 16": lambda make: normal(make, 256, 16),
    "rank 1": lambda make: normal(make, 24, 1) @ normal(make, 1, 40),
    "rank 4": lambda make: normal(make, 24, 4) @ normal(make, 4, 40),
    "rank 4, 1 % noise": lambda make: normal(make, 24, 4) @ normal(make, 4, 40) / 2 + 0.01 * normal(make, 24, 40),
    "fixed rank 4, 1 % noise": lambda make: FIXED @ normal(make, 4, 40) / 2 + 0.01 * normal(make, 24, 40),
    "constant and noise": lambda make: FIXED @ FIXED.mT + 0.1 * normal(make, 24, 24),
    "zero rows and columns": lambda make: (
        normal(make, 24, 40) * (torch.arange(24) % 2 == 0)[:, None] * (torch.arange(40) % 4 != 0)
    ),
}


def change_over_movement(source: Draw, dtype: torch.dtype, changed: float = 1e-6, steps: int = 20, **options) -> float:
    """How far weights end apart, over how far they moved, when every gradient is changed by ``changed`` of its size."""
    ends = []
    for factor in (0.0, changed):
        make, noise = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
        start = torch.zeros(source(torch.Generator().manual_seed(0)).shape, dtype=dtype)
        parameter = torch.nn.Parameter(start.clone())
        optimizer = weft.REKLS([parameter], lr=0.01, weight_decay=0.0, **options)
        for _ in range(steps):
            grad = source(make)
            grad = grad + factor * grad.square().mean().sqrt() * normal(noise, *grad.shape)
            parameter.grad = grad.to(dtype)
            optimizer.step()
        ends.append(parameter.detach())
    return ((ends[1] - ends[0]).norm() / ends[0].norm()).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SOURCES)
def test_stable_changes_as_little_as_its_gradients(name: str, dtype: torch.dtype) -> None:
    assert change_over_movement(SOURCES[name], dtype, variant="stable") < 1e-4


def test_the_published_update_changes_as_much_as_it_moves() -> None:
    for name in ("16 x 16", "12 x 20", "64 x 128"):
        assert change_over_movement(SOURCES[name], torch.float32, variant="exact") > 0.1, name
