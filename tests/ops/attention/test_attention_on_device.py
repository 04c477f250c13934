"""Attention on tensors of the simulated device: no host synchronisation, and flash with whatever heads there are."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from torch import Tensor
from worlds import simulated_device

import weft

SIZES = (5, 0, 4)  # tokens of each rank


def step(
    axis: weft.Axis, device: str, method: str, dtype: torch.dtype, dim: int, gap: int, width: int, **options
) -> list[Tensor]:
    """out and gradients; ``gap``: elements before each vector of ``width``, or (-1) beside the elements of one."""
    make = torch.Generator().manual_seed(axis.rank)
    tokens, leaves, given = SIZES[axis.rank], [], []
    for heads in (6, 3, 3):
        whole = torch.randn(1, tokens, heads, width, generator=make).to(dtype).to(device).requires_grad_()
        leaves.append(whole)
        given.append(whole[..., : dim * 2 : 2] if gap < 0 else whole[..., gap : gap + dim])
    out = weft.attention(*given, causal=True, method=method, group=axis, **options)
    out.square().sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize(
    ("dim", "gap", "width"), [(8, 0, 16), (8, 0, 12), (8, 4, 24), (8, -1, 16), (5, 0, 5), (264, 0, 264)]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_any_head_is_computed_without_host_synchronisation(dtype: torch.dtype, dim: int, gap: int, width: int) -> None:
    simulated, bound = simulated_device(), 1e-5 if dtype == torch.float32 else 2e-2  # of the largest number
    for method, options in (
        ("gather", {}),
        ("ring", {"layout": "zigzag"}),
        ("ulysses", {}),
        ("gather", {"window": (2, 0)}),
    ):

        def program(axis: weft.Axis, device: str, method: str = method, options: dict = options) -> list[Tensor]:
            return step(axis, device, method, dtype, dim, gap, width, **options)

        def on_device(axis: weft.Axis, run=program) -> list[Tensor]:
            found = run(axis, "sim")
            assert not [kind for kind in simulated.current_rank().host_syncs if kind != "copy to device"]
            return [x.cpu() for x in found]

        got = weft.world.VirtualWorld(3, rules="nccl", device="sim").run(on_device).results
        wanted = weft.world.VirtualWorld(3).run(lambda axis, run=program: run(axis, "cpu")).results
        for mine, true in zip(chain(*got), chain(*wanted), strict=True):
            assert mine.dtype == true.dtype
            error = (mine - true).abs().max().item() if true.numel() else 0.0
            assert error <= bound * (true.abs().max().item() if true.numel() else 1.0)
