"""A small model whose parameters need all parts of a step, trained alone, by parts in sequence, and overlapped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from worlds import place

import weft
from weft import optim
from weft.comm.wire import SoloWire

ROWS, WIDTH = 37, 6


class Mixed(nn.Module):
    """A table, matrices, vectors; one parameter is frozen, two are never used."""

    def __init__(self, axis: weft.Axis, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = weft.ShardedEmbedding(ROWS, WIDTH, group=axis, dtype=dtype)
        self.second = weft.ShardedEmbedding(11, WIDTH, group=axis, dtype=dtype)
        self.net = nn.Sequential(
            nn.Linear(WIDTH, 10), nn.Tanh(), nn.LayerNorm(10), nn.Linear(10, 7), nn.Tanh(), nn.Linear(7, 3)
        ).to(dtype)
        self.frozen = nn.Parameter(torch.ones(3, dtype=dtype), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(4, 3, dtype=dtype))
        self.unused_bias = nn.Parameter(torch.ones(5, dtype=dtype))
        if not isinstance(axis.wire, SoloWire):
            place(self)  # a rank's

    def forward(self, ids: Tensor) -> Tensor:
        return self.net(self.table(ids) + self.second(ids % 11)).float().square().sum() + self.frozen.sum()

    @property
    def matrices(self) -> list[nn.Parameter]:
        return [*(p for p in self.net.parameters() if p.ndim == 2), self.unused]

    @property
    def vectors(self) -> list[nn.Parameter]:
        return [*(p for p in self.net.parameters() if p.ndim < 2), self.frozen, self.unused_bias]

    def values(self) -> list[Tensor]:
        """Everything, whole; all ranks must ask."""
        tables = [table.full_weight().detach() for table in (self.table, self.second)]
        return [*(p.detach().clone() for p in (*self.matrices, *self.vectors)), *tables]


def ids_of(step: int, micro: int, rank: int) -> Tensor:
    make = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randint(0, ROWS, (5 + rank,), generator=make)


def parts_of(model: Mixed, axis: weft.Axis, mode: str = "exact") -> list[optim.StepPart]:
    alone = axis.subset([axis.rank])
    return [
        optim.REKLS(model.matrices, lr=0.02, variant="stable", weight_decay=0.1, group=alone, data_group=axis),
        optim.ShardedAdamW(
            [{"params": model.vectors[:3]}, {"params": model.vectors[3:], "lr": 0.05}], lr=0.01, group=axis
        ),
        optim.RowAdam([model.table.weight, model.second.weight], lr=0.03, weight_decay=0.05, mode=mode),
    ]


def overlapped(
    model: Mixed, axis: weft.Axis, mode: str = "exact", order: Sequence[int] = (0, 1, 2), **options: Any
) -> optim.OverlappedStep:
    """The parts listed in some ``order``."""
    parts = parts_of(model, axis, mode)
    return optim.OverlappedStep([parts[at] for at in order], **options)


def backward(model: Mixed, axis: weft.Axis, step: int, micros: int, quiet: Callable[[], Any] = nullcontext) -> None:
    for micro in range(micros):
        with quiet() if micro < micros - 1 else nullcontext():
            model(ids_of(step, micro, axis.rank).to(model.frozen.device)).backward()


def train_in_sequence(
    axis: weft.Axis, steps: int, micros: int = 1, dtype: torch.dtype = torch.float32, mode: str = "exact"
) -> list[Tensor]:
    model = Mixed(axis, dtype)
    parts = parts_of(model, axis, mode)
    for step in range(steps):
        backward(model, axis, step, micros)
        for part in parts:
            part.step()
        for part in parts:
            part.zero_grad()
    return model.values()


def train_overlapped(
    axis: weft.Axis, steps: int, micros: int = 1, dtype: torch.dtype = torch.float32, mode: str = "exact",
    **options: Any,
) -> list[Tensor]:  # fmt: skip
    model = Mixed(axis, dtype)
    optimizer = overlapped(model, axis, mode, **options)
    for step in range(steps):
        backward(model, axis, step, micros, optimizer.no_sync)
        optimizer.step()
        optimizer.zero_grad()
    return model.values()


def train_alone(ranks: int, steps: int, micros: int = 1) -> list[Tensor]:
    """One process: the gradients of all ranks' batches are averaged by hand, in rank order; three optimizers step."""
    axis = weft.Axis.of(None)
    model = Mixed(axis)
    tables = (model.table, model.second)
    dense = [p for p in (*model.matrices, *model.vectors) if p.requires_grad]
    vectors = model.vectors
    optimizers: list[torch.optim.Optimizer] = [
        optim.REKLS(model.matrices, lr=0.02, variant="stable", weight_decay=0.1),
        torch.optim.AdamW([{"params": vectors[:3]}, {"params": vectors[3:], "lr": 0.05}], lr=0.01),
        optim.RowAdam([table.weight for table in tables], lr=0.03, weight_decay=0.05),
    ]
    for step in range(steps):
        sums: list[Tensor | None] = [None] * len(dense)
        rows: list[list[tuple[Tensor, Tensor]]] = [[[] for _ in range(micros)] for _ in tables]  # type: ignore
        for rank in range(ranks):
            model.zero_grad()
            for micro in range(micros):
                for table in tables:
                    table.weight.grad = None
                model(ids_of(step, micro, rank)).backward()
                for at, table in enumerate(tables):
                    rows[at][micro].append(table.table.gradient())
            for at, parameter in enumerate(dense):
                if parameter.grad is not None:
                    grad = parameter.grad.clone()
                    sums[at] = grad if sums[at] is None else sums[at] + grad
        for parameter, total in zip(dense, sums, strict=True):
            parameter.grad = None if total is None else total / ranks
        for at, table in enumerate(tables):
            table.weight.grad = None
            for found in rows[at]:
                whole = torch.zeros(table.weight.shape)
                touched = torch.zeros(len(whole), dtype=torch.bool)
                for places, values in found:
                    whole[places] += values
                    touched[places] = True
                table.table.add_gradient(touched.nonzero().view(-1), whole[touched] * (1.0 / ranks))
        for optimizer in optimizers:
            optimizer.step()
    return model.values()


def assert_all_have(wanted: list[Tensor], found: list[list[Tensor]]) -> None:
    """The same bits on every rank."""
    for rank, mine in enumerate(found):
        for index, (one, other) in enumerate(zip(mine, wanted, strict=True)):
            assert one.dtype == other.dtype and torch.equal(one, other), (rank, index)


def weights_in_memory(model: nn.Module) -> list[Tensor]:
    """Copies of all weights as they lie in memory; reading a table's weight would bring its rows up to date."""
    return [
        (p.row_table.values if hasattr(p, "row_table") else p.detach()).clone()  # type: ignore[attr-defined]
        for p in model.parameters()
    ]
