"""Linear attention on tensors of the simulated device: no host synchronisation, and lanes that own their memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from interpreter import Interpreter
from worlds import simulated_device

import weft
from weft.comm.call import Call
from weft.ops.scan import METHODS


def reports_of(method: str, size: int, layout: str) -> list[str]:
    """What the device says of a training step on ``size`` ranks that start with a state."""
    simulated = simulated_device()

    def program(axis: weft.Axis) -> None:
        make = torch.Generator().manual_seed(axis.rank)
        q, k, v, g = (torch.randn(1, 16, 2, 8, generator=make).to("sim") for _ in range(4))
        q, k, v, start = (x.requires_grad_() for x in (q, k, v, torch.ones(1, 2, 8, 8, device="sim")))
        with simulated.no_host_sync():
            o, final = weft.linear_attention(
                q, k, v, -g.abs(), initial_state=start, output_final_state=True, method=method, layout=layout,
                group=axis,
            )  # fmt: skip
            assert final is not None
            (o.square().sum() + final.sum()).backward()

    with simulated.collect_reports() as found:
        weft.world.VirtualWorld(size, rules="nccl", device="sim").run(program)
    return found


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("method", METHODS)
def test_the_scan_of_states_owns_its_memory(method: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is reported, and whatever the method there is something as soon as lanes are given no buffers."""
    assert reports_of(method, size, "zigzag") == [] == reports_of(method, size, "contiguous")
    start = Call.start

    def start_without_buffers(self: Call, schedule: Any, device: Any = "cpu", buffers: Any = ()) -> Any:
        return start(self, schedule, device)

    monkeypatch.setattr(Call, "start", start_without_buffers)
    assert any("freed too early" in one for one in reports_of(method, size, "contiguous"))


def compare_backends(step: Callable[[weft.Axis, str], list[torch.Tensor]]) -> float:
    """The worst error of what ``step`` gives with Triton's kernels against those of torch, on 2 ranks of the device."""
    simulated = simulated_device()

    def program(axis: weft.Axis) -> float:
        pairs = zip(step(axis, "triton"), step(axis, "torch"), strict=True)
        return max(((a - b).abs().max() / b.abs().max().clamp(min=1)).item() for a, b in pairs)

    with simulated.collect_reports() as found:
        worst = max(weft.world.VirtualWorld(2, rules="nccl", device="sim").run(program).results)
    assert found == []
    return worst


def backends_agree_on_device(gate: str, layout: str, method: str) -> float:
    """Triton's kernels against those of torch, on 2 ranks: the worst error, of results and all gradients."""
    simulated = simulated_device()

    def step(axis: weft.Axis, backend: str) -> list[torch.Tensor]:
        make = torch.Generator().manual_seed(axis.rank)
        tokens = (21, 16)[axis.rank]
        shape = {"none": (), "constant": (2,), "scalar": (1, tokens, 2), "vector": (1, tokens, 2, 16)}[gate]
        given = [torch.randn(1, tokens, 2, 16, generator=make) for _ in range(3)] + [torch.ones(1, 2, 16, 16)]
        given += [] if gate == "none" else [torch.rand(shape, generator=make) if gate != "constant" else torch.ones(2)]
        leaves = [x.to("sim").requires_grad_() for x in given]
        with simulated.no_host_sync():
            o, final = weft.linear_attention(
                *leaves[:3], -leaves[4] if leaves[4:] else None, initial_state=leaves[3], output_final_state=True,
                backend=backend, layout=layout, method=method, chunk_size=16, group=axis,
            )  # fmt: skip
            assert final is not None and o.device.type == "sim"
            (o.square().sum() + final.sum()).backward()
        gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
        return [x.detach().cpu() for x in (o, final, *gradients)]

    return compare_backends(step)


@pytest.mark.parametrize(
    ("gate", "layout", "method"),
    [("none", "contiguous", "ring"), ("constant", "zigzag", "gather"), ("scalar", "zigzag", "doubling"),
     ("vector", "contiguous", "transpose")],
)  # fmt: skip
def test_triton_kernels(interpreter: Interpreter, gate: str, layout: str, method: str) -> None:
    """Their launches are operators of the device: ordered by streams, on memory of its own, and never waited for."""
    assert interpreter.run(backends_agree_on_device, gate, layout, method) <= 2e-5
