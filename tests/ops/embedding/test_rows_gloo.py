"""On real Gloo processes: training, checkpoints at another size, DDP and FSDP2 beside it, memory and errors."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dense import Run, ids_of, train_dense, train_rows
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import weft
from weft.bench.timing import peak_memory
from weft.world.launch import ProcessWorld


def group_of(axis: weft.Axis, ranks: list[int]) -> dist.ProcessGroup | None:
    """The process group of some ranks of the pool; None on the others."""
    group = dist.new_group(ranks)
    return group if axis.rank in ranks else None


def train(axis: weft.Axis, ranks: list[int], run: Run) -> tuple[Tensor, Tensor, list[float]] | None:
    group = group_of(axis, ranks)
    return None if group is None else train_rows(weft.Axis.of(group), run)


@pytest.mark.parametrize(
    ("ranks", "ownership"), [pytest.param([0, 1], "strided", marks=pytest.mark.slow), ([5, 0, 3, 2], "contiguous")]
)
def test_training_is_dense_training(pool: ProcessWorld, ranks: list[int], ownership: str) -> None:
    run = Run(len(ranks), 40, 2, 0.05, ownership, prefetch=True)
    wanted = train_dense(run)
    found = [one for one in pool.run(train, ranks, run) if one is not None]
    assert len(found) == len(ranks)
    for one, two, _ in found:
        for mine, theirs in ((one, wanted[0]), (two, wanted[1])):
            assert ((mine - theirs).abs().max() / theirs.abs().max()).item() < 1e-12


class Model(nn.Module):
    """One table and a head, on any kind of table."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table, self.head = table, nn.Linear(6, 2, dtype=torch.float64)
        nn.init.constant_(self.head.weight, 0.3)
        nn.init.constant_(self.head.bias, 0.1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.table(ids))).square().sum()


def make_model(group: object, ownership: str = "strided") -> Model:
    torch.manual_seed(1)
    return Model(weft.ShardedEmbedding(101, 6, dtype=torch.float64, group=group, ownership=ownership))


def steps_on(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, size: int) -> None:
    """Every rank sees the same ids, so that the number of ranks does not matter."""
    for step in steps:
        model(ids_of(0, step, 0)[0] % 101).backward()
        optimizer.step()
        optimizer.zero_grad()


def saved_by(axis: weft.Axis, ranks: list[int], folder: str, ownership: str) -> Tensor | None:
    """Train 5 steps, save, train 5 more: the table then."""
    group = group_of(axis, ranks)
    if group is None:
        return None
    model = make_model(group, ownership)
    optimizer = weft.optim.RowAdam(model.table.parameters(), lr=0.05, weight_decay=0.1)
    steps_on(model, optimizer, range(1, 6), len(ranks))
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder, process_group=group)
    steps_on(model, optimizer, range(6, 11), len(ranks))
    return model.table.full_weight().detach()


def resumed(model: Model, optimizer: torch.optim.Optimizer, folder: str, group: object) -> None:
    weights, states = get_state_dict(model, optimizer)
    content = {"model": weights, "optimizer": states}
    dcp.load(content, checkpoint_id=folder, process_group=group, no_dist=group is None)
    set_state_dict(model, optimizer, model_state_dict=content["model"], optim_state_dict=content["optimizer"])


def resumed_by(axis: weft.Axis, ranks: list[int], folder: str, ownership: str) -> Tensor | None:
    group = group_of(axis, ranks)
    if group is None:
        return None
    model = make_model(group, ownership)
    torch.nn.init.zeros_(model.table.weight)
    optimizer = weft.optim.RowAdam(model.table.parameters(), lr=0.05, weight_decay=0.1)
    resumed(model, optimizer, folder, group)
    steps_on(model, optimizer, range(6, 11), len(ranks))
    return model.table.full_weight().detach()


@pytest.mark.parametrize("ownership", ["strided", "contiguous"])
def test_a_checkpoint_of_four_ranks_goes_on_at_any_size(pool: ProcessWorld, tmp_path: Path, ownership: str) -> None:
    folder = str(tmp_path / "checkpoint")
    wanted = pool.run(saved_by, [0, 1, 2, 3], folder, ownership)[0]
    for ranks in ([0, 1], [4, 6, 5]):
        for found in pool.run(resumed_by, ranks, folder, ownership):
            if found is not None:
                torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    alone = make_model(None, ownership)
    optimizer: torch.optim.Optimizer = weft.optim.RowAdam(alone.table.parameters(), lr=0.05, weight_decay=0.1)
    resumed(alone, optimizer, folder, None)
    steps_on(alone, optimizer, range(6, 11), 1)
    torch.testing.assert_close(alone.table.full_weight().detach(), wanted, rtol=1e-12, atol=1e-12)
    plain = Model(nn.Embedding(101, 6, dtype=torch.float64))
    optimizer = torch.optim.AdamW(plain.table.parameters(), lr=0.05, weight_decay=0.1)
    resumed(plain, optimizer, folder, None)
    steps_on(plain, optimizer, range(6, 11), 1)
    torch.testing.assert_close(plain.table.weight.detach(), wanted, rtol=1e-12, atol=1e-12)


def beside(axis: weft.Axis, wrap: str) -> tuple[Tensor, Tensor, Tensor] | None:
    """One backward of a model whose head is wrapped and whose table is not: gradients of both, and their norm."""
    group = group_of(axis, [0, 1])
    if group is None:
        return None
    model = make_model(group)
    if wrap == "ddp":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["table.weight"])
        wrapped = DistributedDataParallel(model, process_group=group)
    else:
        mesh = DeviceMesh.from_group(group, "cpu")
        wrapped = fully_shard(model, mesh=mesh, ignored_params={model.table.weight})
    wrapped(ids_of(axis.rank, 1, 0)[0] % 101).backward()
    head = model.head.weight.grad
    head = head if wrap == "ddp" else head.full_tensor()
    places, rows = model.table.table.gradient()
    whole = torch.zeros(101, 6, dtype=torch.float64)
    whole[model.table.ownership.ids(axis.rank)][places] = rows
    dist.all_reduce(whole, group=group)
    norm = weft.clip_grad_norm_(model.parameters(), 1e9)
    return head, whole, norm


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_beside_ddp_and_fsdp2(pool: ProcessWorld, wrap: str) -> None:
    torch.manual_seed(1)
    plain = Model(nn.Embedding(101, 6, dtype=torch.float64))
    (sum(plain(ids_of(rank, 1, 0)[0] % 101) for rank in range(2)) / 2).backward()
    for found in pool.run(beside, wrap)[:2]:
        torch.testing.assert_close(found[0], plain.head.weight.grad, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found[1], plain.table.weight.grad, rtol=1e-12, atol=1e-12)
        wanted = torch.nn.utils.get_total_norm([parameter.grad for parameter in plain.parameters()])
        torch.testing.assert_close(found[2], wanted, rtol=1e-12, atol=0)


def large_table(axis: weft.Axis) -> int | None:
    """The most memory that 5 steps on a 4M x 16 table take beyond the table and its moments, in bytes."""
    group = group_of(axis, [0, 1])
    if group is None:
        return 0
    table = weft.ShardedEmbedding(4_000_000, 16, group=group)
    optimizer = weft.optim.RowAdam(table.parameters(), lr=0.01)
    for moment in (optimizer.state[table.weight][name] for name in ("exp_avg", "exp_avg_sq")):
        moment.fill_(1e-30).zero_()  # so that its pages count as the table's

    def step(number: int) -> None:
        ids = torch.randint(0, 4_000_000, (1000,), generator=torch.Generator().manual_seed(10 * number + axis.rank))
        table(ids).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return peak_memory(lambda: [step(number) for number in range(5)])


def test_memory_stays_small(pool: ProcessWorld) -> None:
    for peak in pool.run(large_table):
        assert peak is None or peak < 64 << 20, f"{peak / 2**20:.0f} MB"


def wrong_id(axis: weft.Axis) -> str:
    group = group_of(axis, [0, 1, 2])
    if group is None:
        return ""
    table = weft.ShardedEmbedding(10, 2, group=group)
    words = "no error"
    for _ in range(2):
        try:
            table(torch.tensor([10 if axis.rank == 1 else 3]))
        except IndexError as error:
            words = str(error)
    table(torch.tensor([1])).sum().backward()
    return words


def test_a_wrong_id_is_an_index_error_everywhere(pool: ProcessWorld) -> None:
    assert pool.run(wrong_id)[:3] == ["embedding: id 10 is not a row of 0..9 (rank 1)"] * 3


def run_example(axis: weft.Axis, path: str) -> list[float]:
    return runpy.run_path(path)["train"](axis, 20)


def test_the_example_learns(pool: ProcessWorld) -> None:
    path = Path(__file__).parents[3] / "examples" / "rows.py"
    assert len(path.read_text().splitlines()) < 60
    for losses in pool.run(run_example, str(path)):
        assert losses[-1] < 0.5 * losses[0]
    assert run_example(weft.Axis.of(None), str(path))[-1] < 1.5  # and without any process group
