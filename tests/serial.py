"""The slow obvious scan that every schedule is compared with: a fold over ranks, in plain autograd operations."""

from __future__ import annotations

import torch
from torch import Tensor

KINDS = ("none", "scalar", "vector", "dense")


def apply_map(kind: str, decay: Tensor | None, state: Tensor, entering: Tensor, transposed: bool) -> Tensor:
    if decay is None:
        return entering + state
    if kind == "dense":
        return (decay.mT if transposed else decay) @ entering + state
    factor = decay.exp()
    return factor.reshape(*factor.shape, *(1,) * (state.ndim - factor.ndim)) * entering + state


def serial_scan(kind: str, states: list[Tensor], decays: list[Tensor | None], reverse: bool) -> list[Tensor]:
    """What enters each rank."""
    size = len(states)
    entering: list[Tensor] = [torch.zeros_like(states[0])] * size
    running = torch.zeros_like(states[0])
    for rank in reversed(range(size)) if reverse else range(size):
        entering[rank] = running
        running = apply_map(kind, decays[rank], states[rank], running, reverse)
    return entering


def random_maps(
    kind: str, size: int, shape: tuple[int, ...], decay: str, seed: int, dtype: torch.dtype = torch.float64
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Leaves that require gradients: a state and a decay a rank. Dense maps do not commute."""
    make = torch.Generator().manual_seed(seed)
    keys = shape[-2]
    states = [torch.randn(shape, generator=make, dtype=torch.float64).to(dtype).requires_grad_() for _ in range(size)]
    if kind == "none":
        return states, [None] * size
    decays: list[Tensor | None] = []
    for _ in range(size):
        if kind == "dense":
            strength = {"one": 0.0, "slow": 0.05, "fast": 0.3, "zero": 0.0}[decay]
            eye = torch.eye(keys, dtype=torch.float64).expand(*shape[:-1], keys)
            noise = torch.randn(*shape[:-1], keys, generator=make, dtype=torch.float64) / keys**0.5
            matrix = torch.zeros_like(eye) if decay == "zero" else eye * (1 - strength) + strength * noise
            decays.append(matrix.clone().to(dtype).requires_grad_())
            continue
        of = shape[:-2] if kind == "scalar" else shape[:-1]
        log = -torch.rand(of, generator=make, dtype=torch.float64)
        log = {"one": log * 0, "slow": log * 1e-3, "fast": log * 50, "zero": log * 0 - torch.inf}[decay]
        decays.append(log.to(dtype).requires_grad_())
    return states, decays


def as_arguments(kind: str, decay: Tensor | None) -> dict[str, Tensor]:
    if decay is None:
        return {}
    return {"transition" if kind == "dense" else "log_decay": decay}


def relative_error(got: Tensor, wanted: Tensor) -> float:
    assert got.isfinite().all(), "not finite"
    if wanted.numel() == 0:
        return 0.0
    scale = max(1.0, wanted.abs().max().item())
    return (got.double() - wanted.double()).abs().max().item() / scale
