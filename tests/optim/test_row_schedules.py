"""`RowAdam` "exact" is dense Adam, to rounding in fp64, whatever the learning rates are while rows rest."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from worlds import place, virtual_world

import weft
from weft import optim

ROWS, WIDTH = 8, 3


def loss_of(rows: Tensor, step: int) -> Tensor:
    """Gradients that do not depend on the rows: rounding is not fed back."""
    make = torch.Generator().manual_seed(step)
    return (rows * torch.randn(WIDTH, generator=make, dtype=torch.float64)).sum()


def train(axis, rates: list[float], touched: list[set[int]], options: dict) -> tuple[Tensor, Tensor]:
    """(rows, dense) after all steps; every rank has the same batch."""
    torch.manual_seed(0)
    whole = torch.nn.Embedding(ROWS, WIDTH, dtype=torch.float64)
    table = weft.ShardedEmbedding.from_embedding(whole, group=axis)
    table = table if axis is None else place(table)
    rows = optim.RowAdam(table.parameters(), **options)
    dense = (torch.optim.AdamW if options.get("weight_decay") else torch.optim.Adam)(whole.parameters(), **options)
    for step, (rate, ids) in enumerate(zip(rates, touched, strict=True)):
        batch = torch.tensor(sorted(ids), dtype=torch.int64)
        for module, optimizer in ((table, rows), (whole, dense)):
            optimizer.param_groups[0]["lr"] = rate
            optimizer.zero_grad()
            loss_of(module(batch).cpu(), step).backward()
            optimizer.step()
    return table.full_weight().detach(), whole.weight.detach()


def touched_by(steps: int, seed: int) -> list[set[int]]:
    """All rows at first, then row 0 always, rows 1 and 2 now and then, the others hardly ever."""
    make = torch.Generator().manual_seed(seed)
    chance = torch.tensor([1.0, 0.5, 0.2, 0.1, 0.05, 0.03, 0.0, 0.0])
    found = [set((torch.rand(ROWS, generator=make) < chance).nonzero().view(-1).tolist()) for _ in range(steps)]
    return [set(range(ROWS - 1)), *found[1:]]


SCHEDULES = {
    "zeros at the start": [0.0] * 6 + [0.1] * 20,
    "a warm-up from zero": [0.0] * 4 + [0.1 * step / 30 for step in range(30)],
    "a frozen phase": [0.1] * 5 + [0.0] * 20 + [0.1] * 12,
    "zeros at the end": [0.1] * 12 + [0.0] * 9,
    "tiny, then large": [1e-12] * 18 + [0.3] * 9,
    "rising": [1e-9 * 10 ** (step / 4) for step in range(36)],
    "falling": [10 ** (-step / 4) for step in range(48)],
    "on and off": [0.0, 0.2, 0.0, 0.0, 0.0, 1e-6, 0.0, 0.0] * 6,
    "one step alone": [0.0] * 17 + [0.1] + [0.0] * 17 + [0.1],
}


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.95, 0.9), (0.5, 0.0), (0.0, 0.9), (0.0, 0.0)])
@pytest.mark.parametrize("name", SCHEDULES)
def test_rows_that_rest_through_a_schedule_are_dense_adams(name: str, betas: tuple[float, float]) -> None:
    rates = SCHEDULES[name]
    for decay in (0.0, 0.1):
        options = {"betas": betas, "weight_decay": decay, "lr": 0.1, "eps": 1e-8 if betas[1] else 1e-2}
        rows, dense = train(None, rates, touched_by(len(rates), 1), options)
        torch.testing.assert_close(rows, dense, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize("name", ["a warm-up from zero", "a frozen phase", "on and off"])
def test_the_same_on_ranks(name: str) -> None:
    rates = SCHEDULES[name]
    for rows, dense in (
        virtual_world(3)
        .run(lambda axis: train(axis, rates, touched_by(len(rates), 2), {"lr": 0.1, "betas": (0.5, 0.0), "eps": 1e-2}))
        .results
    ):
        torch.testing.assert_close(rows, dense, rtol=1e-12, atol=1e-12)


RATE = st.one_of(st.just(0.0), st.sampled_from([1e-15, 1e-9, 1e-4, 1e-2, 0.1, 0.5]))
PHASES = st.lists(st.tuples(RATE, st.integers(1, 25)), min_size=1, max_size=6)
BETAS = st.tuples(st.sampled_from([0.0, 0.5, 0.9, 0.95]), st.sampled_from([0.0, 0.3, 0.9, 0.95, 0.999]))


@settings(max_examples=20)
@given(PHASES, BETAS, st.sampled_from([0.0, 0.01, 0.5]), st.sampled_from([1e-8, 1e-3]), st.integers(0, 99))
def test_any_schedule(phases, betas, decay: float, eps: float, seed: int) -> None:
    rates = [rate for rate, steps in phases for _ in range(steps)]
    if betas[0] > betas[1] ** 0.5:  # momentum outlives v: dense Adam itself moves by m / eps
        eps = 1e-1
    options = {"betas": betas, "weight_decay": decay, "lr": 0.1, "eps": eps}
    rows, dense = train(None, rates, touched_by(len(rates), seed), options)
    torch.testing.assert_close(rows, dense, rtol=1e-12, atol=1e-12)
