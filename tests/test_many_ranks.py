"""What all ranks must know in a step, on many of them: log2(P) messages from each rank, wherever the numbers lie."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import nn
from worlds import on_simulated_device, simulated_device

import weft
from weft.comm.rounds import FAN_OUT, gather_rows

SIZE = FAN_OUT + 3
# Gradients and results; how many rows each rank alone gets.
FOR_EACH = (".to_owners", ".from_owners", "embedding.metadata")


def rows(axis: weft.Axis, device: str) -> list[float]:
    mine = torch.tensor([float(axis.rank), -1.0]).to(device)
    return gather_rows(axis.begin("a test"), mine).wait().flatten().tolist()


def mean_loss(axis: weft.Axis, device: str) -> list[float]:
    x = torch.tensor(float(axis.rank)).to(device).requires_grad_()
    counted = weft.mean_loss(x, torch.tensor(2).to(device), group=axis)
    told = weft.mean_loss(x, 2, group=axis)
    (counted + told).backward()
    assert x.grad is not None
    return [counted.item(), told.item(), x.grad.item()]


def norm_of_rows(axis: weft.Axis, device: str) -> list[float]:
    table = weft.ShardedEmbedding(2 * axis.size, 1, group=axis, reduce="sum").to(device)
    table(torch.tensor([axis.rank])).sum().backward()
    return [weft.clip_grad_norm_(table.parameters(), 1.0).item()]


def norm_of_a_step(axis: weft.Axis, device: str) -> list[float]:
    weight = nn.Parameter(torch.ones(3, device=device))
    step = weft.optim.OverlappedStep([weft.optim.ShardedAdamW([weight], lr=0.1, group=axis)], clip=0.5)
    (weight * axis.rank).sum().backward()
    step.step()
    assert step.norm is not None
    return [step.norm]


MEAN = (SIZE - 1) / 2
SUBJECTS: dict[str, tuple[Callable[[weft.Axis, str], list[float]], list[float]]] = {
    "rows": (rows, [number for rank in range(SIZE) for number in (float(rank), -1.0)]),
    "mean_loss": (mean_loss, [MEAN / 2, MEAN / 2, 1.0]),
    "clip_grad_norm_": (norm_of_rows, [math.sqrt(SIZE)]),
    "a step with clip": (norm_of_a_step, [math.sqrt(3) * MEAN]),
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("sim", marks=on_simulated_device)])
@pytest.mark.parametrize("name", SUBJECTS)
def test_numbers_reach_all_of_many_ranks_in_few_messages(name: str, device: str) -> None:
    run, wanted = SUBJECTS[name]
    if device == "sim":
        simulated_device()

    def program(axis: weft.Axis) -> tuple[list[float], Counter[str]]:
        with weft.record() as ledger:
            found = run(axis, device)
        messages: Counter[str] = Counter()
        for event in ledger.events:
            if not event.operation.endswith(FOR_EACH):
                messages[event.operation] += len(event.sends)
        return found, messages

    world = weft.world.VirtualWorld(SIZE, rules="nccl", **({"device": "sim"} if device == "sim" else {}))
    results = world.run(program).results
    assert all(found == results[0][0] for found, _ in results)  # to the bit
    assert results[0][0] == pytest.approx(wanted)
    most = 2 * math.ceil(math.log2(SIZE))  # a call of mean_loss is made twice here
    for _, messages in results:
        assert messages and max(messages.values()) <= most < SIZE - 1, messages


@pytest.mark.parametrize("size", [3, SIZE])
def test_the_host_waits_for_none_of_them(size: int) -> None:
    simulated = simulated_device()

    def program(axis: weft.Axis) -> list[float]:
        mine = torch.full((2,), float(axis.rank), device="sim")
        with simulated.no_host_sync():
            found = gather_rows(axis.begin("a test"), mine).wait().sum(1)
            more = [torch.zeros(size, 2, device="sim") for _ in range(4)]  # would be given memory that is still used
        return (found + more[0].sum()).tolist()

    wanted = [2.0 * rank for rank in range(size)]
    assert weft.world.VirtualWorld(size, rules="nccl", device="sim").run(program).results == [wanted] * size


def test_memory_of_numbers_that_nobody_waits_for_is_safe() -> None:
    """As after an error: what is under way still uses it."""
    simulated_device()

    def program(axis: weft.Axis) -> float:
        gather_rows(axis.begin("a test"), torch.ones(2, device="sim"))
        return float(sum(torch.ones(SIZE, 2, device="sim").sum() for _ in range(4)))

    assert weft.world.VirtualWorld(SIZE, rules="nccl", device="sim").run(program).results == [8.0 * SIZE] * SIZE
