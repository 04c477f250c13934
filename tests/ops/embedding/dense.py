"""The slow, obvious training: one process, whole tables, torch's Adam, gradients averaged over what ranks would see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from worlds import place

import weft

ROWS, WIDTH, SECOND = 1003, 6, 97


@dataclass(frozen=True)
class Run:
    """One way to train: see `train_dense` and `train_rows`."""

    ranks: int
    steps: int = 50
    accumulate: int = 1
    weight_decay: float = 0.0
    ownership: str = "strided"
    replicate: bool = False
    reduce: str = "mean"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    mode: str = "exact"
    prefetch: bool = False
    dtype: torch.dtype = torch.float64
    options: dict = field(default_factory=dict, hash=False)


def ids_of(rank: int, step: int, part: int) -> tuple[Tensor, Tensor]:
    """A batch: frequent and rare ids, and some that stay away for 30 steps and more; now and then none at all."""
    make = torch.Generator().manual_seed(1000 * step + 10 * part + rank)
    if (step + rank) % 11 == 5:
        return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
    zipf = (ROWS ** torch.rand(12, generator=make, dtype=torch.float64)).long() - 1
    away = torch.randint(900, ROWS, (4,), generator=make) if step < 3 or step > 35 else zipf[:4]
    return torch.cat([zipf, away]), torch.randint(0, SECOND, (16,), generator=make)


def tables(dtype: torch.dtype) -> tuple[nn.Embedding, nn.Embedding, nn.Linear]:
    torch.manual_seed(0)
    made = nn.Embedding(ROWS, WIDTH), nn.Embedding(SECOND, WIDTH), nn.Linear(WIDTH, 3)
    return tuple(one.to(dtype) for one in made)


def loss_of(one: Callable, two: Callable, head: nn.Linear, ids: tuple[Tensor, Tensor]) -> Tensor:
    hidden = torch.tanh(one(ids[0]) + two(ids[1]))
    return (head(hidden).square().sum(-1) + hidden.sin().sum(-1)).sum()


def rate(step: int) -> float:
    """A schedule with a warm-up."""
    return min(1.0, (step + 1) / 8) * (1 - step / 100)


def train_dense(run: Run) -> tuple[Tensor, Tensor, list[float]]:
    one, two, head = tables(run.dtype)
    parameters = [*one.parameters(), *two.parameters(), *head.parameters()]
    kind = torch.optim.AdamW if run.weight_decay else torch.optim.Adam
    optimizer = kind(parameters, lr=0.02, betas=run.betas, eps=run.eps, weight_decay=run.weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    losses = []
    for step in range(run.steps):
        optimizer.zero_grad()
        total = 0.0
        for part in range(run.accumulate):
            for rank in range(run.ranks):
                loss = loss_of(one, two, head, ids_of(rank, step, part))
                (loss / (run.ranks if run.reduce == "mean" else 1)).backward()
                total += loss.item()
        optimizer.step()
        schedule.step()
        losses.append(total)
    return one.weight.detach(), two.weight.detach(), losses


def average(axis: weft.Axis, parameters: list[nn.Parameter], scale: float) -> None:
    """Gradients of replicated parameters over the ranks, as DistributedDataParallel would."""
    for parameter in parameters:
        call = axis.begin("average")
        grads = call.all_gather(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).wait()
        parameter.grad = sum(grads[1:], grads[0].clone()) * scale


def train_rows(axis: weft.Axis, run: Run) -> tuple[Tensor, Tensor, list[float]]:
    """The same with sharded tables: each rank computes on its own ids."""
    first, second, head = tables(run.dtype)
    kind = {"group": axis, "ownership": run.ownership, "replicate": run.replicate, "reduce": run.reduce}
    head = place(head)
    one = place(weft.ShardedEmbedding.from_embedding(first, **kind))
    two = place(weft.ShardedEmbedding.from_embedding(second, **kind))
    rows = weft.optim.RowAdam(
        [{"params": [one.weight]}, {"params": [two.weight]}], lr=0.02, betas=run.betas, eps=run.eps,
        weight_decay=run.weight_decay, mode=run.mode,
    )  # fmt: skip
    dense = (torch.optim.AdamW if run.weight_decay else torch.optim.Adam)(
        head.parameters(), lr=0.02, betas=run.betas, eps=run.eps, weight_decay=run.weight_decay
    )
    schedules = [torch.optim.lr_scheduler.LambdaLR(each, rate) for each in (rows, dense)]
    losses = []

    def ids_here(step: int, part: int) -> tuple[Tensor, Tensor]:
        """On a device: the first table's are there, the second's are of a loader, on the CPU."""
        ids = ids_of(axis.rank, step, part)
        return place(ids[0]), ids[1]

    for step in range(run.steps):
        total = 0.0
        for part in range(run.accumulate):
            loss = loss_of(one, two, head, ids_here(step, part))
            if run.prefetch:
                ahead = (step, part + 1) if part + 1 < run.accumulate else (step + 1, 0)
                for table, ids in zip((one, two), ids_here(*ahead), strict=True):
                    table.prefetch(ids)
            loss.backward()
            total += loss.item()
        average(axis, list(head.parameters()), one.table.scale)
        rows.step()
        dense.step()
        for each in schedules:
            each.step()
        rows.zero_grad()
        dense.zero_grad()
        losses.append(total)
    with torch.no_grad():
        return one.full_weight(), two.full_weight(), losses
