"""`weft bench train`: the plain pieces compute what the trainer computes, and what they send is counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from worlds import virtual_world

import weft
from weft.bench.plain_attention import gather_then_attend, lasp2
from weft.bench.plain_train import METHODS, PlainTrainer, count_on_ranks
from weft.bench.sockets import sent_bytes
from weft.bench.timing import line_up
from weft.comm import Axis, record
from weft.comm.mesh import make_mesh
from weft.train.config import TrainConfig
from weft.train.metrics import FAMILIES
from weft.train.mixers import attend_linear, attend_softmax
from weft.train.trainer import Trainer
from weft.world.launch import ProcessWorld

TINY = TrainConfig(
    steps=100, dtype="fp64", dp=2, cp=2, length=48, batch=6, width=16, layers=2, heads=2, kv_heads=1, hidden=24,
    table_rows=211, warmup=1, lr=0.02, lr_adamw=0.01, lr_rows=0.05, weight_decay=0.1, clip=0.5, timeline_step=0,
)  # fmt: skip
STEPS = 6
# Documents that begin and end within a rank, at its edges, and that go through several ranks; the last two are empty
# of boundaries on some ranks.
DOCUMENTS = [(0, 24), (0, 8, 16, 24), (0, 3, 24), (0, 5, 7, 17, 24), (0, 1, 2, 23, 24), (0, 6, 12, 18, 24)]


def draw(heads: tuple[int, ...], seed: int) -> list[Tensor]:
    make = torch.Generator().manual_seed(seed)
    found = [torch.randn(1, 24, number, 4, generator=make, dtype=torch.float64) for number in heads]
    return [*found, -torch.rand(1, 24, heads[0], generator=make, dtype=torch.float64)]


@pytest.mark.parametrize("bounds", DOCUMENTS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["linear", "softmax"])
def test_plain_attention_is_weft_s_with_every_gradient(kind: str, size: int, bounds: tuple[int, ...]) -> None:
    heads = (2, 2, 2) if kind == "linear" else (4, 2, 2)
    whole = draw(heads, len(bounds))[: 4 if kind == "linear" else 3]
    grad = torch.randn(whole[0].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ours, plain = (attend_linear, lasp2) if kind == "linear" else (attend_softmax, gather_then_attend)

    def program(axis: Axis) -> list[Tensor]:
        found = []
        for attend in (ours, plain):
            mine = [weft.shard(part, 1, group=axis).clone().requires_grad_() for part in whole]
            where = weft.sequence(mine[0].shape[1], cu_seqlens=bounds, group=axis)
            out = attend(*mine, where)  # type: ignore[operator]
            found.append([out, *torch.autograd.grad(out, mine, weft.shard(grad, 1, group=axis))])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)
        return [part.detach() for part in found[1]]

    for parts in virtual_world(size).run(program).results:
        assert all(part.abs().sum() > 0 for part in parts)


@pytest.fixture(scope="module")
def four() -> ProcessWorld:
    with ProcessWorld(4) as world:
        yield world


def follow(axis: Axis, kind: type[Trainer], config: TrainConfig) -> list[tuple[float, float]]:
    assert config.dp is not None
    trainer = kind(config, make_mesh((config.dp, config.cp, 1)))
    try:
        return [(result.loss, result.norm) for result in (trainer.take_step() for _ in range(STEPS))]
    finally:
        trainer.close()


@pytest.mark.processes
def test_the_losses_of_plain_pieces_follow_the_trainer_s(four: ProcessWorld) -> None:
    ours, *others = four.run(follow, Trainer, TINY)
    plain = four.run(follow, PlainTrainer, TINY)
    assert all(rank == ours for rank in others)
    losses = [loss for loss, _ in ours]
    assert losses[-1] < losses[0] - 0.3  # it learns, so that a step that does nothing would be seen
    for rank in plain:
        torch.testing.assert_close(torch.tensor(rank), torch.tensor(ours), rtol=1e-6, atol=0)


def count_both_ways(axis: Axis, config: TrainConfig) -> tuple[dict[str, int], int, dict[str, object]]:
    """(by family, by the kernel, of all ranks) for a step of one rank."""
    trainer = PlainTrainer(config, make_mesh((2, 2, 1)))
    trainer.take_step()
    line_up(axis)
    before = sent_bytes() or 0
    with record() as ledger:
        trainer.take_step()
    line_up(axis)
    after = sent_bytes() or 0
    trainer.close()
    return trainer.sent_bytes(ledger), after - before, count_on_ranks(axis, config)


@pytest.mark.processes
def test_what_plain_pieces_send_is_what_the_kernel_counts(four: ProcessWorld) -> None:
    config = replace(TINY, dtype="fp32", table_rows=4001)
    found = four.run(count_both_ways, config)
    counted = found[0][2]
    assert counted["ranks"] == 4 and counted["methods"] == METHODS
    total = {name: sum(rank[0][name] for rank in found) for name in FAMILIES}
    assert counted["bytes"] == {name: total[name] for name in METHODS} and set(METHODS) == set(FAMILIES) - {"agreeing"}
    assert all(size > 0 for size in counted["bytes"].values())
    # Each of 4 ranks sends three quarters of the table's gradient twice.
    assert counted["bytes"]["embedding rows"] == 4 * (2 * 3 * 4001 * 16 * 4 // 4)
    if sent_bytes() is not None:
        kernel = sum(rank[1] for rank in found)
        assert sum(total.values()) <= kernel < 1.1 * sum(total.values()) + 4 * 20_000


def test_plain_pieces_refuse_tensor_parallel_ranks() -> None:
    mesh = make_mesh((1, 1, 1))
    with pytest.raises(ValueError, match="plain pieces take whole weights, so --tp 1, not 2"):
        PlainTrainer(TINY, replace(mesh, tensor=Axis(mesh.tensor.wire, (0, 1), 0, mesh.tensor.counter)))
