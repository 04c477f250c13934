"""Linear attention on tensors of the simulated device: no host synchronisation, and lanes that own their memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
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
