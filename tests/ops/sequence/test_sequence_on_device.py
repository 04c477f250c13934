"""What `weft.sequence` gives to tensors of the simulated device."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from worlds import simulated_device

import weft


def test_positions_come_to_the_device_without_the_host_waiting(sim: Any) -> None:
    positions = weft.sequence(5, cu_seqlens=[0, 2, 5]).positions("sim")
    assert positions.device.type == "sim" and not sim.host_syncs
    assert positions.cpu().tolist() == [0, 1, 0, 1, 2]


def test_boundaries_on_the_device_are_read_once(sim: Any) -> None:
    bounds = torch.tensor([0, 2, 5]).to("sim")
    sim.host_syncs.clear()
    assert weft.sequence(5, cu_seqlens=bounds).bounds == (0, 2, 5)
    assert sum(sim.host_syncs.values()) == 1, sim.places_of_syncs()


def mean_and_gradient(axis: weft.Axis, device: str, count: Any, dtype: torch.dtype) -> list[Tensor]:
    x = torch.full((3,), 0.1 + axis.rank, dtype=dtype).to(device).requires_grad_()
    given = count.to(device) if isinstance(count, Tensor) else count
    simulated = simulated_device()
    before = sum(simulated.current_rank().host_syncs.values())
    loss = weft.mean_loss(x.square().sum() / 3, given, group=axis)
    loss.backward()
    waited = sum(simulated.current_rank().host_syncs.values()) - before
    assert not waited, simulated.current_rank().places_of_syncs()
    assert x.grad is not None and loss.device.type == device
    return [loss.detach().cpu(), x.grad.cpu()]


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("count", [None, 3, torch.tensor(2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_mean_loss_is_not_waited_for(size: int, count: Any, dtype: torch.dtype) -> None:
    wanted = weft.world.VirtualWorld(size).run(lambda axis: mean_and_gradient(axis, "cpu", count, dtype)).results
    world = weft.world.VirtualWorld(size, rules="nccl", device="sim")
    got = world.run(lambda axis: mean_and_gradient(axis, "sim", count, dtype)).results
    for mine, true in zip(got, wanted, strict=True):
        for a, b in zip(mine, true, strict=True):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=1e-15 if dtype == torch.float64 else 0, atol=0)
        assert torch.equal(mine[0], got[0][0])


@pytest.mark.parametrize(
    ("loss", "count", "words"),
    [
        (1.0, 0, "no tokens on any of 2 ranks, but their losses add up to 2.0"),
        (1.0, torch.tensor([1, 2]), "count must be a number"),
    ],
)
def test_faults_of_a_mean_loss_are_found_on_the_device(loss: float, count: Any, words: str) -> None:
    simulated_device()

    def program(axis: weft.Axis) -> float:
        given = count.to("sim") if isinstance(count, Tensor) else count
        with pytest.raises((TypeError, ValueError), match=words):
            weft.mean_loss(torch.tensor(loss).to("sim"), given, group=axis)
        return weft.mean_loss(torch.tensor(0.0).to("sim"), 0, group=axis).item()  # the mean over nothing

    assert weft.world.VirtualWorld(2, rules="nccl", device="sim").run(program).results == [0.0, 0.0]


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf"), 0.0])
def test_a_wrong_count_on_the_device_makes_the_mean_nan_on_all_ranks(wrong: float) -> None:
    """Nobody waits to find it; 0 is wrong where there are losses, and right where there are none."""
    simulated = simulated_device()

    def program(axis: weft.Axis) -> list[list[float]]:
        found = []
        for loss, count in ((1.0, wrong if axis.rank == 1 or wrong == 0 else 2.0), (0.0, 0.0)):
            x = torch.full((), loss).to("sim").requires_grad_()
            with simulated.no_host_sync():
                mean = weft.mean_loss(x, torch.full((), count, device="sim"), group=axis)
                mean.backward()
            found.append([mean.item(), x.grad.item()])
        return found

    for bad, nothing in weft.world.VirtualWorld(2, rules="nccl", device="sim").run(program).results:
        assert all(map(math.isnan, bad)) and nothing == [0.0, 0.0]
