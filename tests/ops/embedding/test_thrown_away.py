"""A batch thrown away by whatever sets gradients to None or to zero: its rows are not stepped, as with torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from worlds import place, virtual_world

import weft

pytestmark = pytest.mark.usefixtures("every_network")
ROWS = 12


class Model(nn.Module):
    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table, self.head = table, nn.Linear(3, 1, dtype=torch.float64)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids)).sin().sum()


def by_hand(model: Model, step: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = None


WAYS: dict[str, Callable[[Model, torch.optim.Optimizer], None]] = {
    "model": lambda model, step: model.zero_grad(),
    "model, zeros": lambda model, step: model.zero_grad(set_to_none=False),
    "step": lambda model, step: step.zero_grad(),
    "step, zeros": lambda model, step: step.zero_grad(set_to_none=False),
    "by hand": by_hand,
}


def train(model: Model, step: torch.optim.Optimizer, way: str, ranks: int, rank: int) -> Tensor:
    """Every third batch is thrown away; one of two is accumulated from two."""

    def backward(*ids: int) -> None:
        (model(torch.tensor(ids)) / (1 if isinstance(model.table, weft.ShardedEmbedding) else ranks)).backward()

    for number in range(9):
        if number % 3 == 1:
            for each in range(ranks) if rank < 0 else [rank]:
                backward(7, 8, 9, each)
                backward(10, number)
            WAYS[way](model, step)
        if number == 4:
            step.step()  # without gradients, or with zeros
        for each in range(ranks) if rank < 0 else [rank]:
            backward(number % 4, 5, each)
            if number % 2:
                backward(6, each)
        step.step()
        WAYS[way](model, step)
    return model.table.full_weight() if rank >= 0 else model.table.weight


@pytest.mark.parametrize("kind", ["rows", "overlapped"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [1, 3])
def test_rows_of_a_batch_thrown_away_are_not_stepped(way: str, kind: str, size: int) -> None:
    torch.manual_seed(0)
    plain = Model(nn.Embedding(ROWS, 3, dtype=torch.float64))
    start = plain.table.weight.detach().clone()
    wanted = train(plain, torch.optim.Adam(plain.table.parameters(), lr=0.1), way, size, -1).detach()

    def program(axis: weft.Axis) -> Tensor:
        table = weft.ShardedEmbedding(ROWS, 3, group=axis, dtype=torch.float64)
        table.load_state_dict({"weight": start})
        model = place(Model(table))
        rows = weft.optim.RowAdam(table.parameters(), lr=0.1)
        step = rows if kind == "rows" else weft.optim.OverlappedStep([rows])
        return train(model, step, way, size, axis.rank).detach()

    for found in virtual_world(size).run(program).results:
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
