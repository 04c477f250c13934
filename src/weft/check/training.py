"""Cases of what a training step has besides: rows of a table, optimizers, and the trainer's model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import weft
from weft.check.case import WARM_UPS, Case, Work, call_name, draw
from weft.comm import Axis
from weft.comm.device import copy_to_device
from weft.parallel.mesh import ParallelMesh
from weft.train.config import TrainConfig
from weft.train.model import LanguageModel, Place, make_step

ROWS, WIDTH, IDS = 509, 16, 64  # of a table; ids of a rank in a batch
_SHAPES = {"up": (24, WIDTH), "down": (WIDTH, 24), "head": (12, WIDTH)}
_BATCHES = WARM_UPS + 2  # made beforehand, and gone round


def row_cases() -> Iterator[Case]:
    """A step of a table: rows that were fetched ahead, gradients back, Adam on the rows touched."""
    for mode in ("exact", "lazy"):
        for ids, syncs in (("host ids", 0), ("device ids", 2)):
            work = partial(_rows, mode, ids == "host ids")
            yield Case("rows", call_name("RowAdam", mode, ids), work, torch.float32, syncs)


def _rows(mode: str, on_host: bool, axis: Axis, device: torch.device) -> Work:
    table = _table(axis, device, torch.float32)
    optimizer = weft.optim.RowAdam(table.parameters(), lr=0.1, mode=mode)
    batches = [ids if on_host else ids.to(device) for ids in _ids_of(axis)]
    weight, number = draw(9, IDS, WIDTH, dtype=torch.float32).to(device), count()

    def work() -> list[Tensor]:
        at = next(number)
        rows = table(batches[at % _BATCHES])
        table.prefetch(batches[(at + 1) % _BATCHES])
        (rows * weight).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return [rows.detach()]  # they show the steps before

    return work


def _table(axis: Axis, device: torch.device, dtype: torch.dtype) -> weft.ShardedEmbedding:
    whole = nn.Embedding(ROWS, WIDTH, _weight=draw(7, ROWS, WIDTH, dtype=dtype))
    return weft.ShardedEmbedding.from_embedding(whole, group=axis).to(device)


def _ids_of(axis: Axis) -> list[Tensor]:
    """This rank's batches: many ids often, so that rows are shared, and others not for some steps."""
    return [(draw(100 * axis.rank + n, IDS).abs() * ROWS / 4).long() % ROWS for n in range(_BATCHES)]


def optimizer_cases() -> Iterator[Case]:
    """A step of each optimizer; matrices in fp64: eigenvectors otherwise show the rounding of the device."""
    yield Case("optimizers", "ShardedAdamW", partial(_step, None), torch.float32, 1)
    for name, make in _MATRIX_OPTIMIZERS.items():
        yield Case("optimizers", name, partial(_step, make), torch.float64, 1)
    yield Case("optimizers", "OverlappedStep (clip)", _overlapped_step, torch.float64, 1)


_MATRIX_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "REKLS (exact)": partial(weft.optim.REKLS, variant="exact"),
    "REKLS (stable)": partial(weft.optim.REKLS, root_every=2, dense_steps=1),
    "SOAP": partial(weft.optim.SOAP, root_every=2),
    "Muon": partial(weft.optim.Muon, ns_dtype=torch.float32),
    "NorMuon": partial(weft.optim.NorMuon, ns_dtype=torch.float32),
}


def _step(make: Callable[..., torch.optim.Optimizer] | None, axis: Axis, device: torch.device) -> Work:
    """Of data-parallel ranks, each with gradients of its own; by ShardedAdamW, or what ``make`` makes."""
    dtype = torch.float32 if make is None else torch.float64
    weights = _weights(device, dtype)
    gradients = [
        [
            draw(1000 * axis.rank + 10 * n + at, *shape, dtype=dtype).to(device)
            for at, shape in enumerate(_SHAPES.values())
        ]
        for n in range(_BATCHES)
    ]
    named, number = list(weights.items()), count()
    optimizer: torch.optim.Optimizer
    if make is None:
        optimizer = weft.optim.ShardedAdamW(named, lr=0.1, group=axis)
    else:
        optimizer = make(named, lr=0.1, data_group=axis)

    def work() -> list[Tensor]:
        for weight, gradient in zip(weights.values(), gradients[next(number) % _BATCHES], strict=True):
            weight.grad = gradient.clone()
        optimizer.step()
        return [weight.detach().clone() for weight in weights.values()]

    return work


def _weights(device: torch.device, dtype: torch.dtype) -> dict[str, nn.Parameter]:
    made = enumerate(_SHAPES.items())
    return {name: nn.Parameter(draw(at, *shape, dtype=dtype).to(device)) for at, (name, shape) in made}


def _overlapped_step(axis: Axis, device: torch.device) -> Work:
    weights, table = _weights(device, torch.float64), _table(axis, device, torch.float64)
    matrices = [(name, weights[name]) for name in ("up", "down")]
    optimizer = weft.optim.OverlappedStep(
        [
            weft.optim.REKLS(matrices, lr=0.1, variant="stable", data_group=axis),
            weft.optim.ShardedAdamW([("head", weights["head"])], lr=0.1, group=axis),
            weft.optim.RowAdam([("table", table.weight)], lr=0.1),
        ],
        clip=0.5,
        overlap_backward=True,
    )
    batches, number = _ids_of(axis), count()

    def work() -> list[Tensor]:
        at = next(number)
        hidden = F.gelu(table(batches[at % _BATCHES]) @ weights["up"].T) @ weights["down"].T
        table.prefetch(batches[(at + 1) % _BATCHES])
        loss = (hidden @ weights["head"].T).logsumexp(-1).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return [loss.detach(), *(weight.detach().clone() for weight in weights.values())]

    return work


def model_cases() -> Iterator[Case]:
    """The trainer's hybrid model over context-parallel ranks: its loss after some steps."""
    yield Case("model", "the model of weft train (bf16)", _model, torch.bfloat16, 1)


def _model(axis: Axis, device: torch.device) -> Work:
    config = TrainConfig(
        steps=_BATCHES, width=32, layers=3, pattern="lsd", heads=2, kv_heads=1, hidden=64, table_rows=ROWS,
        dtype="bf16", warmup=0,
    )  # fmt: skip
    alone = axis.subset([axis.rank])
    mesh = ParallelMesh(alone, axis, alone, axis, axis, None)
    torch.manual_seed(0)  # of the table's rows
    model = LanguageModel(config, 256, mesh).to(device)
    step, total = make_step(config, model, mesh), IDS * axis.size
    whole = [draw(n, 1, total + 1).mul(60).long() % 256 for n in range(_BATCHES)]
    rows = [weft.shard(model.bigrams.rows_of(tokens[:, :-1]), 1, layout="zigzag", group=axis) for tokens in whole]
    inputs = [
        [weft.shard(part, 1, layout="zigzag", group=axis) for part in (tokens[:, :-1], tokens[:, 1:])]
        for tokens in whole
    ]
    where = weft.sequence(IDS, layout="zigzag", group=axis)
    place, number = Place(where, where.positions(device)[None]), count()

    def work() -> list[Tensor]:
        at = next(number) % _BATCHES
        tokens, targets = (copy_to_device(part, device) for part in inputs[at])
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(tokens, rows[at], place)
        loss = model.loss(logits, targets)
        model.bigrams.prefetch(rows[(at + 1) % _BATCHES])
        (loss / IDS).backward()
        step.step()
        step.zero_grad()
        return [loss.detach()]

    return work
