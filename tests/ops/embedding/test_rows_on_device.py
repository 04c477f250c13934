"""Tables on a device: how often the host waits for it in a batch, and the bits of the CPU.

A batch is a forward, a prefetch where it is asked for, the backward and the step of `RowAdam`. Ids on the CPU, as a
loader hashes them, cost no synchronisation. Ids on the device cost one: they are read. A prefetch reads its own.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from worlds import simulated_device

import weft
from weft.optim.rows.steps import RowCosts

ROWS, WIDTH, STEPS = 40, 5, 8
BATCHES = ((12,), (3, 4), (12,), (0,), (12,), (80,), (2,), (12,), (12,))


def on_cpu(size: int, program: Callable[[weft.Axis], Any]) -> list[Any]:
    return weft.world.VirtualWorld(size, rules="nccl").run(program).results


def on_device(size: int, program: Callable[[weft.Axis], Any]) -> list[Any]:
    simulated_device()
    return weft.world.VirtualWorld(size, rules="nccl", device="sim").run(program).results


def host_syncs(device: str) -> int:
    return sum(simulated_device().current_rank().host_syncs.values()) if device == "sim" else 0


def batch_of(rank: int, step: int, device: str) -> Tensor:
    """The first and the sixth touch nearly all rows, the fourth none; most rows rest between."""
    make = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(0, ROWS if step in (0, 5) else 12, BATCHES[step], generator=make).to(device)


def train(
    axis: weft.Axis, device: str, ids: str, mode: str, ahead: bool, costs: RowCosts | None = None, **options: Any
) -> tuple[list[int], Tensor, Tensor]:
    """(syncs of each batch, the whole table, its first moment), trained on ``device``, with ids on ``ids``."""
    torch.manual_seed(0)
    whole = torch.nn.Embedding(ROWS, WIDTH, padding_idx=3)
    table = weft.ShardedEmbedding.from_embedding(whole, group=axis, **options).to(device)
    optimizer = weft.optim.RowAdam(table.parameters(), lr=0.1, mode=mode)
    if costs is not None:
        optimizer.set_costs(costs)
    batches, counts = [batch_of(axis.rank, step, ids) for step in range(STEPS + 1)], []
    for step in range(STEPS):
        before = host_syncs(device)
        out = table(batches[step])
        if ahead:
            table.prefetch(batches[step + 1])
        (out * (1 + 0.1 * step)).sin().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(host_syncs(device) - before)
    with torch.no_grad():
        return counts, table.full_weight().cpu(), optimizer.state_dict()["state"][0]["exp_avg"].cpu()


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("mode", ["exact", "lazy", "auto"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_syncs_of_a_batch_and_the_bits_of_the_cpu(size: int, mode: str, ahead: bool) -> None:
    costs = RowCosts(1.0, 0.1, 0.1) if mode == "auto" else None  # where most rows are touched: all of them in place
    wanted = on_cpu(size, lambda axis: train(axis, "cpu", "cpu", mode, ahead, costs))
    for ids in ("cpu", "sim"):
        found = on_device(size, lambda axis: train(axis, "sim", ids, mode, ahead, costs))  # noqa: B023
        for (counts, *values), (_, *others) in zip(found, wanted, strict=True):
            read = [int(ids == "sim" and shape != (0,)) for shape in BATCHES]
            extra = read[1:] if ahead else [0] * STEPS
            assert counts == [own + more for own, more in zip(read[:STEPS], extra, strict=True)]
            assert all(torch.equal(one, other) for one, other in zip(values, others, strict=True))


@pytest.mark.parametrize("ownership", ["strided", "contiguous"])
def test_replicas_too(ownership: str) -> None:
    options = {"replicate": True, "ownership": ownership}
    wanted = on_cpu(3, lambda axis: train(axis, "cpu", "cpu", "exact", True, **options))
    for (counts, *values), (_, *others) in zip(
        on_device(3, lambda axis: train(axis, "sim", "cpu", "exact", True, **options)), wanted, strict=True
    ):
        assert counts == [0] * STEPS
        assert all(torch.equal(one, other) for one, other in zip(values, others, strict=True))


def test_costs_are_measured_once_and_not_in_a_step_of_few_rows() -> None:
    """By the device's time: the host waits before and after each trial."""

    def program(axis: weft.Axis) -> list[int]:
        return train(axis, "sim", "cpu", "auto", False)[0]

    for counts in on_device(2, program):
        assert [count for count in counts if count] == [2 * 3 * 3]


@pytest.mark.parametrize("tokens_on", ["cpu", "sim"])
def test_bigrams_hashed_in_the_loader_cost_nothing_and_on_the_device_one_read(tokens_on: str) -> None:
    tokens = torch.randint(0, 900, (2, 16), generator=torch.Generator().manual_seed(5))

    def program(axis: weft.Axis, device: str, where: str) -> tuple[list[int], Tensor]:
        table = weft.BigramHashEmbedding(101, 3, group=axis).to(device)
        optimizer = weft.optim.RowAdam(table.parameters(), lr=0.1)
        batches = [(tokens + axis.rank + step).to(where) for step in range(4)]
        counts = []
        for batch in batches:
            before = host_syncs(device)
            if where == "cpu":
                out = table(rows=table.rows_of(batch, cu_seqlens=[0, 7, 16]))
            else:
                out = table(batch, cu_seqlens=[0, 7, 16])
            (out + 1).sin().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            counts.append(host_syncs(device) - before)
        with torch.no_grad():
            return counts, table.full_weight().cpu()

    wanted = on_cpu(2, lambda axis: program(axis, "cpu", "cpu"))
    for (counts, table), (_, other) in zip(
        on_device(2, lambda axis: program(axis, "sim", tokens_on)), wanted, strict=True
    ):
        assert counts == [int(tokens_on == "sim")] * 4 and torch.equal(table, other)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_bigrams_of_a_sequence_over_ranks_cost_two_reads_on_the_device(layout: str) -> None:
    """The last tokens of the runs, in one, and the rows."""

    def program(axis: weft.Axis) -> tuple[int, int]:
        table = weft.BigramHashEmbedding(101, 3, group=axis).to("sim")
        tokens, counts = torch.arange(24).view(2, 12) + axis.rank, []
        for mine in (tokens.to("sim"), tokens):
            before = host_syncs("sim")
            table(mine, context_group=axis, layout=layout)
            counts.append(host_syncs("sim") - before)
        return counts[0], counts[1]

    assert on_device(2, program) == [(2, 0)] * 2


@pytest.mark.parametrize("ids", ["cpu", "sim"])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_wrong_id_of_one_rank_is_raised_on_all_before_anything_changes(ids: str, ahead: bool) -> None:
    def program(axis: weft.Axis) -> tuple[str, int, bool, bool]:
        table = weft.ShardedEmbedding(10, 2, group=axis).to("sim")
        values = table.full_weight().detach().clone()
        if ahead:
            table.prefetch(torch.tensor([4, 5], device=ids))
        bad, before = torch.tensor([3, 12 if axis.rank == 1 else 4], device=ids), host_syncs("sim")
        try:
            (table.prefetch if ahead else table)(bad)
        except IndexError as error:
            words = str(error)
        syncs = host_syncs("sim") - before
        fine = table(torch.tensor([9, 1], device=ids)).shape == (2, 2)  # the group is still good
        return words, syncs, fine, torch.equal(values, table.full_weight())

    for words, syncs, fine, same in on_device(3, program):
        assert words == "embedding: id 12 is not a row of 0..9 (rank 1)"
        assert syncs == int(ids == "sim") and fine and same


@pytest.mark.parametrize("mode", ["exact", "lazy"])
def test_a_checkpoint_of_a_device_goes_on_there_and_on_the_cpu(mode: str) -> None:
    def steps(table: weft.ShardedEmbedding, optimizer: torch.optim.Optimizer, rank: int, first: int, last: int) -> None:
        for step in range(first, last):
            table(batch_of(rank, step, "cpu")).sin().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    def program(axis: weft.Axis, device: str) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        made = []
        for _ in range(2):
            table = weft.ShardedEmbedding(ROWS, WIDTH, group=axis).to(device)
            made.append((table, weft.optim.RowAdam(table.parameters(), lr=0.1, mode=mode, weight_decay=0.1)))
        steps(*made[0], axis.rank, 0, 4)
        moments, weights = made[0][1].state_dict(), made[0][0].state_dict()
        steps(*made[0], axis.rank, 4, STEPS)
        steps(*made[1], axis.rank, 0, 2)  # what it was before leaves no trace
        made[1][0].load_state_dict({"weight": weights["weight"].cpu()})
        state = {name: value.cpu() for name, value in moments["state"][0].items()}
        made[1][1].load_state_dict({**moments, "state": {0: state}})
        steps(*made[1], axis.rank, 4, STEPS)
        return made[0][0].full_weight().detach().cpu(), made[1][0].full_weight().detach().cpu()

    for (first, second), (wanted, _) in zip(
        on_device(3, lambda axis: program(axis, "sim")), on_cpu(3, lambda axis: program(axis, "cpu")), strict=True
    ):
        assert torch.equal(first, second) and torch.equal(first, wanted)


@pytest.mark.parametrize("writer", ["step", "by hand", "whole step"])
def test_a_prefetch_does_not_wait_and_whoever_writes_comes_after_what_it_reads(writer: str) -> None:
    """The batch has own rows only, so that its backward sends nothing: no message orders the writer after the lane."""

    def program(axis: weft.Axis, device: str) -> list[Tensor]:
        torch.manual_seed(0)
        whole = torch.nn.Embedding(ROWS, WIDTH)
        table = weft.ShardedEmbedding.from_embedding(whole, group=axis).to(device)
        optimizer = weft.optim.RowAdam(table.parameters(), lr=0.1, mode="exact" if writer == "whole step" else "lazy")
        found = []
        for step in range(3):
            with simulated_device().no_host_sync() if device == "sim" else nullcontext():
                own = torch.arange(ROWS)[table.table.ownership.ids(axis.rank)][: 3 + step]
                out = table(own)
                table.prefetch(torch.arange(30, 36) - step)  # all of them travel at once
                out.sum().backward()
                if writer == "by hand":
                    with torch.no_grad():
                        table.weight.mul_(0.5)
                else:
                    optimizer.step()
                found.append(table(torch.arange(30, 36) - step).detach())
            optimizer.zero_grad()
        return [one.cpu() for one in found]

    wanted = on_cpu(2, lambda axis: program(axis, "cpu"))
    for mine, theirs in zip(on_device(2, lambda axis: program(axis, "sim")), wanted, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


def test_a_table_that_is_given_up_while_its_rows_are_fetched() -> None:
    def program(axis: weft.Axis) -> float:
        table = weft.ShardedEmbedding(40, 4, group=axis).to("sim")
        table.prefetch(torch.arange(8))
        del table
        gc.collect()
        return float(torch.ones(8, device="sim").sum())  # may be given the table's memory

    assert on_device(2, program) == [8.0, 8.0]


def test_a_gradient_that_somebody_replaced_is_read_once() -> None:
    def program(axis: weft.Axis) -> tuple[int, bool]:
        table = weft.ShardedEmbedding(10, 2, group=axis).to("sim")
        optimizer = weft.optim.RowAdam(table.parameters(), lr=0.1)
        table(torch.tensor([1, 2, 3])).sum().backward()
        places = table.table.gradient()[0]
        before = host_syncs("sim")
        table.weight.grad = (table.weight.grad * 0.5).coalesce()
        same = torch.equal(table.table.gradient()[0], places)
        syncs = host_syncs("sim") - before
        optimizer.step()
        return syncs, same

    for syncs, same in on_device(2, program):
        assert syncs <= 2 and same  # the multiplication of a sparse tensor may be one
