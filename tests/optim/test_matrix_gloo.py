"""Matrix optimizers on real Gloo processes: plain shards, DTensors of every placement, checkpoints at another size."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import two_by_two
from sharded_run import KINDS, RULES, assert_same, gradients, groups_of, make, part_of, train_alone, train_over, weights
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import weft
from weft import optim
from weft.world.launch import ProcessWorld


def over(axis: weft.Axis, ranks: list[int], steps: int, uneven: bool, options: dict[str, Any]) -> list[Tensor] | None:
    group = dist.new_group(ranks)
    return train_over(weft.Axis.of(group), steps, uneven, **options) if axis.rank in ranks else None


@pytest.mark.parametrize(
    ("ranks", "rule"), [([0, 1], "stable"), ([5, 0, 3, 2], "exact"), *(([1, 4, 2], rule) for rule in RULES)]
)
def test_over_processes_it_has_the_bits_of_one(pool: ProcessWorld, ranks: list[int], rule: str) -> None:
    found = pool.run(over, ranks, 10, True, {"rule": rule})
    assert_same(train_alone(10, rule=rule), [found[rank] for rank in sorted(ranks)], True)


def on_mesh(axis: weft.Axis, order: str) -> list[Tensor] | None:
    data, tensor = two_by_two(axis, order)
    return None if tensor is None else train_over(weft.Axis.of(tensor), 10, True, weft.Axis.of(data))


@pytest.mark.parametrize("order", ["data first", "tensor first"])
def test_data_by_tensor_on_processes(pool: ProcessWorld, order: str) -> None:
    found = pool.run(on_mesh, order)
    rows = [[0, 1], [2, 3]] if order == "data first" else [[0, 2], [1, 3]]
    for row in rows:
        assert_same(train_alone(10, 2), [found[rank] for rank in row], True)


class Weights(nn.Module):
    """Parameters with names, as checkpoints want them."""

    def __init__(self, parameters: list[Tensor]) -> None:
        super().__init__()
        for index, parameter in enumerate(parameters):
            self.register_parameter(f"p{index}", nn.Parameter(parameter))


class Layers(nn.Module):
    """What `parallelize_module` and `fully_shard` know how to cut: sizes that four ranks share unevenly."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 10), nn.Linear(10, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


MESHES = {"tensor": (4,), "fsdp": (4,), "hsdp": (2, 2), "fsdp + tensor": (2, 2)}


def cut_layers(kind: str) -> nn.Module:
    """The layers on the ranks of a mesh over all of WORLD."""
    model = Layers()
    size = dist.get_world_size()
    shape = (size,) if len(MESHES[kind]) == 1 else (2, size // 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])
    if "tensor" in kind:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh if len(shape) == 1 else mesh["b"], plan)
    if kind == "hsdp":
        fully_shard(model, mesh=mesh)
    elif "fsdp" in kind:
        fully_shard(model, mesh=mesh if len(shape) == 1 else mesh["a"])
    return model


def gradients_of(model: nn.Module, step: int) -> None:
    """The same whole gradients whatever the placement: those of the exact update must have the same bits."""
    make = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        whole = torch.randn(parameter.shape, generator=make)
        if isinstance(parameter, DTensor):
            whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.grad = whole


def whole(model: nn.Module) -> list[Tensor]:
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]


def train_layers(axis: weft.Axis, kind: str, rule: str) -> tuple[list[Tensor], set[str], int]:
    model = cut_layers(kind)
    optimizer = make(model.parameters(), rule)
    for step in range(10):
        gradients_of(model, step)
        optimizer.step()
    placements = {str(p.placements) for p in model.parameters() if isinstance(p, DTensor)}
    mine = sum(plan.is_mine and not plan.is_split for plans in optimizer._plans.values() for plan in plans)
    return [p.detach() for p in whole(model)], placements, mine


@pytest.mark.processes
@pytest.mark.parametrize(
    "rule", [rule if rule == "exact" else pytest.param(rule, marks=pytest.mark.slow) for rule in RULES]
)
@pytest.mark.parametrize("kind", MESHES)
def test_dtensors_of_every_placement(four: ProcessWorld, kind: str, rule: str) -> None:
    model = Layers()
    optimizer = make(model.parameters(), rule)
    for step in range(10):
        gradients_of(model, step)
        optimizer.step()
    found = four.run(train_layers, kind, rule)
    assert sum(mine for _, _, mine in found) == 2  # each of two matrices has one owner
    assert any("StridedShard" in one for one in found[0][1]) == (kind == "fsdp + tensor")
    for parameters, _, _ in found:
        for mine, wanted in zip(parameters, whole(model), strict=True):
            assert torch.equal(mine, wanted)


def train_for_real(axis: weft.Axis, kind: str, rule: str) -> list[Tensor]:
    """Forward, backward and step; ranks of a data group have a batch each, those of a tensor group the same."""
    model = Layers() if kind in ("ddp", "data group", "alone") else cut_layers(kind)
    wrapped = DistributedDataParallel(model) if kind == "ddp" else model
    data = axis if kind == "data group" else None
    group = axis.subset([axis.rank]) if kind == "data group" else None
    optimizer = make(model.parameters(), rule, group=group, data_group=data)
    for step in range(5):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        mine = x if kind in ("tensor", "alone") else x.tensor_split(axis.size)[axis.rank]
        optimizer.zero_grad()
        (wrapped(mine) - mine).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in whole(model)]


@pytest.mark.processes
@pytest.mark.parametrize("rule", ["stable, rare", pytest.param("stable", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["ddp", "data group", "tensor", "fsdp"])
def test_training_follows_one_process(four: ProcessWorld, two: ProcessWorld, kind: str, rule: str) -> None:
    world = two if kind == "tensor" else four  # torch's own forward wants even shards
    wanted, found = train_for_real(weft.Axis.of(None), "alone", rule), world.run(train_for_real, kind, rule)
    for parameters in found:
        for one, other, first in zip(parameters, wanted, found[0], strict=True):
            assert torch.equal(one, first)
            torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-6)


def sums_to_be_made(axis: weft.Axis) -> tuple[Tensor, Tensor]:
    """A replicated parameter whose gradient torch leaves as a sum over the mesh (sequence-parallel norms do that)."""
    mesh = init_device_mesh("cpu", (axis.size,))
    parameter = nn.Parameter(distribute_tensor(torch.ones(3, 5), mesh, [Replicate()]))
    optimizer = optim.REKLS([parameter], lr=0.1, variant="stable")
    parts = torch.randn(axis.size, 3, 5, generator=torch.Generator().manual_seed(0))
    parameter.grad = DTensor.from_local(parts[axis.rank], mesh, [Partial()])
    optimizer.step()
    alone = nn.Parameter(torch.ones(3, 5))
    alone.grad = parts.sum(0)
    optim.REKLS([alone], lr=0.1, variant="stable", group=axis.subset([axis.rank])).step()
    return parameter.to_local().detach(), alone.detach()


@pytest.mark.processes
def test_gradients_that_are_sums_still_to_be_made(four: ProcessWorld) -> None:
    for found, wanted in four.run(sums_to_be_made):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def norms_over_two_meshes(axis: weft.Axis) -> tuple[float, float]:
    """The norm of gradients that lie on two meshes over the same ranks, and the true one."""
    grads = [torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    first, second = (init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")) for _ in range(2))
    parameters = []
    for grad, mesh in zip(grads, (first, second["a"], second), strict=True):
        placements = [Shard(0), Shard(1)][: mesh.ndim]
        parameters.append(nn.Parameter(distribute_tensor(torch.ones(4, 6), mesh, placements)))
        parameters[-1].grad = distribute_tensor(grad, mesh, placements)
    rekls = optim.REKLS([{"params": parameters, "algorithm": "adamw"}], lr=0.1)
    step = optim.OverlappedStep([rekls], clip=1.0)
    step.step()
    assert step.norm is not None
    return step.norm, float(torch.stack(grads).norm())


@pytest.mark.processes
def test_meshes_over_the_same_ranks_are_one(four: ProcessWorld) -> None:
    """Each element counts once in a norm. What is made on the second mesh torch lays on the first, or not."""
    for found, wanted in four.run(norms_over_two_meshes):
        assert found == pytest.approx(wanted, rel=1e-6)


# Checkpoints: 5 steps, save, 5 more; elsewhere: load, 5 more.


def steps_on(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, size: int, steps: range) -> None:
    for step in steps:
        for parameter, kind, grad in zip(model.parameters(), KINDS, gradients(step), strict=True):
            parameter.grad = part_of(grad, kind, rank, size, True)
        optimizer.step()
        optimizer.zero_grad()


def parts_of(whole: list[Tensor], axis: weft.Axis) -> Weights:
    return Weights([part_of(one, kind, axis.rank, axis.size, True) for one, kind in zip(whole, KINDS, strict=True)])


def over_mesh(axis: weft.Axis, mesh: str) -> tuple[weft.Axis, weft.Axis | None]:
    """(tensor axis, data axis): all ranks, or 2 x 2. Every data rank has the same gradients."""
    if mesh == "tensor":
        return axis, None
    data, tensor = two_by_two(axis, "data first")
    return weft.Axis.of(tensor), weft.Axis.of(data)


def save_parts(axis: weft.Axis, folder: str, rule: str, mesh: str) -> None:
    tensor, data = over_mesh(axis, mesh)
    model = parts_of(weights(), tensor)
    optimizer = make(groups_of(list(model.parameters())), rule, group=tensor, data_group=data)
    steps_on(model, optimizer, tensor.rank, tensor.size, range(5))
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder)


def go_on_with_parts(
    axis: weft.Axis, folder: str, rule: str, start: list[Tensor], alone: bool, mesh: str = "tensor"
) -> list[Tensor]:
    axis, data = over_mesh(axis, mesh)
    model = parts_of(start, axis)
    optimizer = make(groups_of(list(model.parameters())), rule, lr=0.5, group=axis, data_group=data)
    content = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(content, checkpoint_id=folder, no_dist=alone)
    set_optimizer_state_dict(model, optimizer, optim_state_dict=content["optimizer"])
    steps_on(model, optimizer, axis.rank, axis.size, range(5, 10))
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.processes
@pytest.mark.parametrize("mesh", ["tensor", "data x tensor"])
@pytest.mark.parametrize(
    "rule",
    [rule if rule in ("exact, rare", "stable, rare") else pytest.param(rule, marks=pytest.mark.slow) for rule in RULES],
)
def test_a_checkpoint_of_four_goes_on_at_any_size(
    four: ProcessWorld, two: ProcessWorld, tmp_path: Path, rule: str, mesh: str
) -> None:
    wanted, middle = train_alone(10, rule=rule), train_alone(5, rule=rule)
    four.run(save_parts, str(tmp_path), rule, mesh)
    for world in (four, two):
        assert_same(wanted, world.run(go_on_with_parts, str(tmp_path), rule, middle, False), True)
    other = "tensor" if mesh != "tensor" else "data x tensor"
    rows = four.run(go_on_with_parts, str(tmp_path), rule, middle, False, other)
    for row in [rows] if other == "tensor" else [rows[:2], rows[2:]]:
        assert_same(wanted, row, True)
    alone = go_on_with_parts(weft.Axis.of(None), str(tmp_path), rule, middle, True)
    assert_same(wanted, [alone], True)


def save_layers(axis: weft.Axis, kind: str, folder: str) -> None:
    model = cut_layers(kind)
    optimizer = make(model.parameters(), lr=0.01)
    for step in range(5):
        gradients_of(model, step)
        optimizer.step()
    states = get_state_dict(model, optimizer)
    dcp.save(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=folder)


def go_on_with_layers(axis: weft.Axis, kind: str, folder: str) -> list[Tensor]:
    model = Layers() if kind == "alone" else cut_layers(kind)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    optimizer = make(model.parameters(), lr=0.5)
    content = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(content, checkpoint_id=folder, no_dist=kind == "alone")
    set_state_dict(model, optimizer, model_state_dict=content["model"], optim_state_dict=content["optimizer"])
    for step in range(5, 10):
        gradients_of(model, step)
        optimizer.step()
    return [parameter.detach() for parameter in whole(model)]


@pytest.mark.processes
@pytest.mark.parametrize(("saved", "resumed"), [("tensor", "tensor"), ("fsdp + tensor", "fsdp"), ("hsdp", "tensor")])
def test_a_checkpoint_of_dtensors_goes_on_at_any_size(
    four: ProcessWorld, two: ProcessWorld, tmp_path: Path, saved: str, resumed: str
) -> None:
    model = Layers()
    optimizer = make(model.parameters(), lr=0.01)
    for step in range(10):
        gradients_of(model, step)
        optimizer.step()
    four.run(save_layers, saved, str(tmp_path))
    found = two.run(go_on_with_layers, resumed, str(tmp_path))
    found.append(go_on_with_layers(weft.Axis.of(None), "alone", str(tmp_path)))
    for parameters in found:
        for mine, wanted in zip(parameters, whole(model), strict=True):
            assert torch.equal(mine, wanted)


def run_example(axis: weft.Axis, path: str) -> list[float]:
    return runpy.run_path(path)["train"](axis, 20)


@pytest.mark.processes
def test_the_example_follows_one_process(two: ProcessWorld) -> None:
    path = Path(__file__).parents[2] / "examples" / "rekls.py"
    assert len(path.read_text().splitlines()) < 60
    alone = run_example(weft.Axis.of(None), str(path))
    assert alone[-1] < 0.5 * alone[0]
    for losses in two.run(run_example, str(path)):
        assert losses == pytest.approx(alone, rel=1e-5)
