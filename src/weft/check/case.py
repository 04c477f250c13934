"""What a case of the check is, and how its inputs are made: the same on every device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.comm import Axis

Work = Callable[[], list[Tensor]]
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2}
WARM_UPS = 2  # calls before the one that is compared: connections, kernels, state


@dataclass(frozen=True)
class Case:
    """One operation: ``prepare(axis, device)`` puts its inputs there and returns the work, which can be done again.

    What the work returns is compared with the CPU's: at most `TOLERANCES` of ``dtype`` apart, relative to the largest.
    ``syncs``: how often the host may wait for the device in it. ``local``: one rank alone has as much work with its
    part of the inputs, so that what communication adds can be timed.
    """

    family: str
    name: str
    prepare: Callable[[Axis, torch.device], Work]
    dtype: torch.dtype
    syncs: int = 0
    local: bool = False


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal numbers, the same on every rank and device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def leaves(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copies there that want gradients."""
    return [tensor.detach().to(device).requires_grad_() for tensor in tensors]


def with_gradients(function: Callable[[], Tensor], inputs: Sequence[Tensor], weight: Tensor) -> list[Tensor]:
    """The result, and the gradients of its product with ``weight``."""
    out = function()
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), inputs)]


def call_name(name: str, *options: str) -> str:
    """As it is shown.

    >>> call_name("attention", "ring", "bf16")
    'attention (ring, bf16)'
    """
    return f"{name} ({', '.join(options)})"


def dtype_name(dtype: torch.dtype) -> str:
    """In short.

    >>> dtype_name(torch.bfloat16)
    'bf16'
    """
    return {torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
