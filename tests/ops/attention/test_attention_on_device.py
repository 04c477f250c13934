"""Attention on tensors of the simulated device: no host synchronisation, and flash with whatever heads there are."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from worlds import simulated_device

import weft
from weft.ops.attention import kernels, on_device

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

        def run_there(axis: weft.Axis, run=program) -> list[Tensor]:
            found = run(axis, "sim")
            assert not [kind for kind in simulated.current_rank().host_syncs if kind != "copy to device"]
            return [x.cpu() for x in found]

        got = weft.world.VirtualWorld(3, rules="nccl", device="sim").run(run_there).results
        wanted = weft.world.VirtualWorld(3).run(lambda axis, run=program: run(axis, "cpu")).results
        for mine, true in zip(chain(*got), chain(*wanted), strict=True):
            assert mine.dtype == true.dtype
            error = (mine - true).abs().max().item() if true.numel() else 0.0
            assert error <= bound * (true.abs().max().item() if true.numel() else 1.0)


@pytest.mark.usefixtures("sim")
def test_heads_that_are_too_large_for_flash_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    kernels._log_large_heads.cache_clear()
    q, other = torch.empty(1, 2, 3, 264, dtype=torch.bfloat16, device="sim"), torch.empty(1, 2, 3, 8, device="sim")
    for _ in range(2):
        assert not kernels.takes_flash(q, q, 1.0, 0.0, False)
        assert not kernels.takes_flash(other, other, 1.0, 0.0, False)
    assert [record.getMessage() for record in caplog.records] == [
        "attention: vectors of 264 numbers are over the 256 of flash operators; products by tiles are slower"
    ]


def inputs(rank: int, tokens: int, dim: int, value_dim: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and sinks: 6 heads, 3 of keys."""
    make = torch.Generator().manual_seed(rank)
    shapes = (1, tokens, 6, dim), (1, tokens, 3, dim), (1, tokens, 3, value_dim), (6,)
    return [torch.randn(*shape, generator=make).to(dtype) for shape in shapes]


OPTIONS = {
    "documents": {"cu_seqlens": torch.tensor([0, 3, 4, 11, 12, 17, 24])},
    "documents in a window": {"cu_seqlens": torch.tensor([0, 3, 4, 11, 12, 17, 24]), "window": (2, 0)},
    "documents, both ways": {"cu_seqlens": torch.tensor([0, 3, 4, 19, 24]), "causal": False, "window": (3, 2)},
    "a window": {"window": (4, 0)},
    "only a right side": {"causal": False, "window": (-1, 3)},
    "only a left side": {"causal": False, "window": (3, -1)},
}


@pytest.mark.parametrize("dims", [(8, 5), *(pytest.param(dims, marks=pytest.mark.slow) for dims in ((8, 8), (5, 12)))])
@pytest.mark.parametrize("name", OPTIONS)
def test_windows_documents_sinks_and_gradients_of_lse(name: str, dims: tuple[int, int]) -> None:
    """Half precision on 3 ranks of a device, against the same numbers in fp32 on the CPU."""
    simulated, dtype, sizes = simulated_device(), torch.bfloat16, (9, 7, 8)
    options = {"causal": True, **OPTIONS[name]}

    def program(axis: weft.Axis, device: str, method: str, layout: str) -> list[Tensor]:
        wide = torch.float32 if device == "cpu" else dtype
        leaves = [x.to(wide).to(device).requires_grad_() for x in inputs(axis.rank, sizes[axis.rank], *dims, dtype)]
        out, lse = weft.attention(
            *leaves[:3], sinks=leaves[3], method=method, layout=layout, return_lse=True, group=axis, **options
        )
        grads = torch.autograd.grad(out.square().sum() + lse.square().sum(), leaves)
        if device == "sim":
            assert not [kind for kind in simulated.current_rank().host_syncs if kind != "copy to device"]
        return [x.detach().cpu().float() for x in (out, lse, *grads)]

    for method, layout in (("gather", "zigzag"), ("ring", "contiguous"), ("ulysses", "zigzag")):
        got, wanted = (
            weft.world.VirtualWorld(3, rules=rules, device=device)
            .run(lambda axis: program(axis, device, method, layout))  # noqa: B023
            .results
            for device, rules in (("sim", "nccl"), ("cpu", "ideal"))
        )
        for mine, true in zip(chain(*got), chain(*wanted), strict=True):
            assert (mine - true).abs().max() <= 3e-2 * true.abs().max()


def counting(kernel: Callable[..., Any], calls: list[int]) -> Callable[..., Any]:
    """The kernel, which notes how many sequences it is given."""

    def run(*args: Any) -> Any:
        calls.append(len(args[-2].areas))
        return kernel(*args)

    return run


@pytest.mark.parametrize("window", [None, (30, 0)])
def test_packed_documents_are_one_call_of_a_step(
    window: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where documents lie whole on a rank: one for each step of heads, however many there are."""
    calls: list[int] = []
    for name in ("attend", "attend_backward"):
        monkeypatch.setattr(on_device, name, counting(getattr(on_device, name), calls))
    bounds, simulated = (0, 2, 3, 70, 72, 80, 160), simulated_device()

    def program(axis: weft.Axis) -> None:
        q, k, v = (x.to("sim").requires_grad_() for x in inputs(axis.rank, 80, 8, 8, torch.bfloat16)[:3])
        weft.attention(
            q, k, v, causal=True, window=window, cu_seqlens=torch.tensor(bounds), method="gather", group=axis
        ).sum().backward()
        assert not [kind for kind in simulated.current_rank().host_syncs if kind != "copy to device"]

    weft.world.VirtualWorld(2, rules="nccl", device="sim").run(program)
    documents = [sum(b <= 80 for _, b in pairwise(bounds)), sum(a >= 80 for a, _ in pairwise(bounds))]
    steps = 4  # the head that begins while lengths are gathered, the others; in the backward the first, the rest
    assert sorted(calls) == sorted(documents * steps * (len(calls) // (2 * steps)))
