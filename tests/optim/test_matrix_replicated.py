"""The replicated tensor-parallel algorithm, the reference of the benchmark: the bits of `REKLS` on every rank."""

from __future__ import annotations

import pytest
import torch
from sharded_run import Kind, assert_same, gradients, part_of, train_alone, weights
from torch import Tensor
from worlds import virtual_world

import weft
from weft.bench.matrix.replicated import ReplicatedREKLS, split_rows

pytestmark = pytest.mark.usefixtures("network")
KINDS = (Kind((7, 5), 0), Kind((6, 10), 1), Kind((8, 8), None), Kind((1, 4), 1), Kind((12, 3), 0))
STEPS = 8


def make(axis: weft.Axis, uneven: bool, **options: float) -> ReplicatedREKLS:
    cut = [
        part_of(weight, kind, axis.rank, axis.size, uneven) for weight, kind in zip(weights(KINDS), KINDS, strict=True)
    ]
    return ReplicatedREKLS(
        [(part, kind.partition_dim) for part, kind in zip(cut, KINDS, strict=True)], 0.01, axis, **options
    )


def train_replicated(axis: weft.Axis, uneven: bool, **options: float) -> tuple[list[Tensor], ReplicatedREKLS]:
    optimizer = make(axis, uneven, **options)
    parts = [part for part, _ in optimizer.parameters]
    for step in range(STEPS):
        for part, kind, grad in zip(parts, KINDS, gradients(step, kinds=KINDS), strict=True):
            part.grad = part_of(grad, kind, axis.rank, axis.size, uneven)
        optimizer.step()
    return parts, optimizer


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_it_has_the_bits_of_rekls(size: int, decay: float, uneven: bool) -> None:
    wanted = train_alone(STEPS, kinds=KINDS, weight_decay=decay)
    found = virtual_world(size).run(lambda axis: train_replicated(axis, uneven, weight_decay=decay)[0]).results
    assert_same(wanted, found, uneven, KINDS)


def test_a_rank_keeps_whole_moments_and_its_rows_of_the_factors() -> None:
    found = virtual_world(3).run(lambda axis: train_replicated(axis, False)[1]).results
    for rank, optimizer in enumerate(found):
        for (_, dim), kind, state in zip(optimizer.parameters, KINDS, optimizer.state.values(), strict=True):
            assert state["exp_avg"].shape == state["exp_avg_sq"].shape == kind.shape
            for side, size in zip("LR", kind.shape, strict=True):
                rows = size if dim is None else split_rows(size, 3)[rank]
                assert state[side].shape == (rows, size)
                assert state[side].untyped_storage().nbytes() == 4 * rows * size  # no view of all of it


def test_it_gathers_three_times_for_each_sharded_parameter() -> None:
    def program(axis: weft.Axis) -> list[tuple[str, int]]:
        optimizer = make(axis, False)
        for (part, _), kind, grad in zip(optimizer.parameters, KINDS, gradients(0, kinds=KINDS), strict=True):
            part.grad = part_of(grad, kind, axis.rank, axis.size, False)
        with weft.record() as ledger:
            optimizer.step()
        return [(event.operation, event.bytes_sent) for event in ledger.events]

    kinds = [kind for kind in KINDS if kind.partition_dim is not None]
    for rank, events in enumerate(virtual_world(2).run(program).results):
        assert {name for name, _ in events} == {"replicated.all_gather"}
        wanted = []
        for kind in kinds:
            shard = part_of(torch.empty(kind.shape), kind, rank, 2, False)
            wanted += [4 * shard.numel(), *(4 * split_rows(size, 2)[rank] * size for size in kind.shape)]
        assert [size for _, size in events] == wanted
