"""Training with sharded tables equals dense data-parallel training in one process."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace

import pytest
import torch
from dense import Run, train_dense, train_rows
from worlds import every, virtual_world

pytestmark = pytest.mark.usefixtures("every_network")


def difference(run: Run) -> float:
    """The largest difference, of any rank, in tables and losses, relative to the largest value."""
    wanted = train_dense(run)
    found = virtual_world(run.ranks).run(lambda axis: train_rows(axis, run)).results
    worst = 0.0
    for one, two, _ in found:
        for mine, theirs in ((one, wanted[0]), (two, wanted[1])):
            worst = max(worst, ((mine - theirs).abs().max() / theirs.abs().max()).item())
    for step, loss in enumerate(wanted[2]):
        worst = max(worst, abs(sum(rank[2][step] for rank in found) - loss) / max(1.0, abs(loss)))
    return worst


def steps(network: str) -> int:
    """All of them on an ideal network; messages are the same in every step, so few where each is watched."""
    return {"ideal": 50, "nccl": 8, "sim": 4}[network]


CASES = list(itertools.product((1, 3), (0.0, 0.05), ("strided", "contiguous"), (False, True)))


@pytest.mark.parametrize("ranks", [1, 2, 3, pytest.param(5, marks=pytest.mark.slow)])
def test_exact_is_dense_training_in_every_combination(ranks: int, every_network: str) -> None:
    """A fourth of them here, another one for each number of ranks; all with `make soak`."""
    some = CASES if "WEFT_SOAK" in os.environ else CASES[ranks % 4 :: 5]
    for accumulate, decay, ownership, replicate in every(some):
        run = Run(ranks, steps(every_network), accumulate, decay, ownership, replicate)
        assert difference(run) < 1e-12, run


@pytest.mark.parametrize(
    ("betas", "eps"), [((0.9, 0.95), 1e-8), ((0.95, 0.9), 1e-2), ((0.0, 0.9), 1e-8), ((0.5, 0.99), 1e-2)]
)
def test_exact_with_other_betas(betas: tuple[float, float], eps: float, every_network: str) -> None:
    assert difference(Run(2, steps(every_network), weight_decay=0.1, betas=betas, eps=eps)) < 1e-12


def test_sums_instead_of_means() -> None:
    assert difference(Run(3, 12, reduce="sum")) < 1e-12


@pytest.mark.parametrize(("mode", "accumulate", "decay"), [("exact", 1, 0.05), ("exact", 2, 0.0), ("lazy", 2, 0.0)])
def test_prefetched_rows_are_right(mode: str, accumulate: int, decay: float, every_network: str) -> None:
    """The same bits with and without."""
    run = Run(3, steps(every_network), accumulate, decay, mode=mode)
    plain = virtual_world(3).run(lambda axis: train_rows(axis, run)).results
    early = virtual_world(3).run(lambda axis: train_rows(axis, replace(run, prefetch=True))).results
    for one, other in zip(plain, early, strict=True):
        assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1]) and one[2] == other[2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_auto_gives_the_bits_of_exact(dtype: torch.dtype, every_network: str) -> None:
    run = Run(2, steps(every_network), weight_decay=0.01, dtype=dtype)
    wanted = virtual_world(2).run(lambda axis: train_rows(axis, run)).results
    found = virtual_world(2).run(lambda axis: train_rows(axis, replace(run, mode="auto"))).results
    for one, other in zip(wanted, found, strict=True):
        assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
