"""`broadcast_parameters`, and `REKLS` with nothing but a data group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from worlds import place, virtual_world

import weft
from weft import optim
from weft.world.launch import ProcessWorld


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 3).bfloat16(), nn.Linear(3, 0))
    net[0].weight.data = net[0].weight.data.t().contiguous().t()  # not contiguous
    net[1].num_batches_tracked.fill_(seed)
    return net


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize("source", [0, 2])
def test_every_rank_gets_parameters_and_buffers_of_the_source(source: int) -> None:
    def program(axis: weft.Axis) -> tuple[dict[str, Tensor], int]:
        net = place(model(axis.rank))
        table = place(weft.ShardedEmbedding(7, 2, group=axis))
        rows = table.weight.detach().clone()
        net.table = table
        with weft.record() as ledger:
            weft.broadcast_parameters(net, group=axis, source=source)
        assert torch.equal(table.weight, rows)
        del net.table
        sent = sum(not event.operation.endswith(".metadata") and bool(event.sends) for event in ledger.events)
        return net.state_dict(), sent

    wanted = model(source).state_dict()
    for rank, (found, sent) in enumerate(virtual_world(3).run(program).results):
        assert sent == (rank == source)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.usefixtures("every_network")
def test_what_one_rank_has_wrong_is_raised_on_all() -> None:
    def program(axis: weft.Axis, given: Any, source: Any) -> str:
        good, given = place([torch.ones(2)]), place(given)
        try:
            weft.broadcast_parameters(
                given if axis.rank == 1 else good, group=axis, source=source if axis.rank == 1 else 0
            )
        except (ValueError, TypeError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    for given, source, words in [
        ([torch.ones(2)], 3, "ValueError: broadcast_parameters: source 3 is not one of 3 ranks (rank 1)"),
        ([torch.ones(2)], "a", "TypeError: broadcast_parameters: source must be an integer, got 'a' (str) (rank 1)"),
        ([4], 0, "TypeError: broadcast_parameters: takes a module, a tensor or tensors, not int (rank 1)"),
        (None, 0, "TypeError: broadcast_parameters: takes a module, a tensor or tensors, not NoneType (rank 1)"),
        ([torch.ones(3)], 0, "DisagreementError: broadcast_parameters: the ranks disagree"),
        ([torch.ones(2), torch.ones(1)], 0, "DisagreementError: broadcast_parameters: the ranks disagree"),
    ]:
        found = virtual_world(3).run(lambda axis, given=given, source=source: program(axis, given, source)).results
        assert len(set(found)) == 1 and found[0].startswith(words), found


def over_meshes(axis: weft.Axis) -> list[Any]:
    """Two data by two tensor ranks; DTensors whole and cut."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    own = torch.full((4, 2), float(axis.rank))

    def made(*placements: Any, on: Any = mesh) -> Tensor:
        return nn.Parameter(distribute_tensor(own.clone(), on, placements, src_data_rank=None))

    found: list[Any] = []
    cut, whole, plain = made(Shard(0), on=mesh["tensor"]), made(Replicate(), on=mesh["tensor"]), own.clone()
    weft.broadcast_parameters([cut, whole, plain], group=mesh["data"])
    found.append([float(t.flatten()[0]) for t in (cut.to_local(), whole.to_local(), plain)])
    weft.broadcast_parameters([cut, whole, plain], group=mesh["tensor"])
    found.append([float(t.flatten()[0]) for t in (cut.to_local(), whole.to_local(), plain)])
    try:
        weft.broadcast_parameters([made(Replicate(), Shard(0))])
        found.append("")
    except ValueError as error:
        found.append(str(error))
    return found


@pytest.mark.processes
def test_shards_are_not_broadcast_over_the_axis_that_cuts_them(four: ProcessWorld) -> None:
    for rank, (over_data, over_tensor, words) in enumerate(four.run(over_meshes)):
        column = float(rank % 2)
        assert over_data == [column] * 3
        assert over_tensor == [column, 0.0, 0.0]
        assert words == (
            "broadcast_parameters: a DTensor [4, 2] has 2 different shards on the 4 ranks of group; pass the group of "
            "those ranks that have the same shard"
        )


def grads_of(parameters: list[nn.Parameter], rank: int) -> None:
    for at, parameter in enumerate(parameters):
        grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(10 * at + rank))
        parameter.grad = place(grad)


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize("named", [False, True])
def test_rekls_takes_a_data_group_alone(named: bool) -> None:
    """Matrices and vectors; also where ``group`` names the same ranks."""

    def program(axis: weft.Axis, alone: bool) -> list[Tensor]:
        torch.manual_seed(0)
        parameters = place([nn.Parameter(torch.randn(shape)) for shape in ((4, 3), (3,), (5, 2), ())])
        options = {"group": axis} if named else {}
        if alone:
            options = {"group": axis.subset([axis.rank])}
        optimizer = optim.REKLS(parameters, lr=0.1, variant="stable", data_group=axis, **options)
        for _ in range(2):
            grads_of(parameters, axis.rank)
            optimizer.step()
        return [p.detach() for p in parameters]

    wanted = virtual_world(3).run(lambda axis: program(axis, True)).results[0]
    for found in virtual_world(3).run(lambda axis: program(axis, False)).results:
        assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


@pytest.mark.usefixtures("every_network")
def test_rekls_tells_all_that_is_wrong_at_once() -> None:
    def program(axis: weft.Axis) -> str:
        params = place([torch.ones(2, 2, 2), torch.ones(3, 3), torch.ones(2, dtype=torch.int64)])
        table = place(weft.ShardedEmbedding(7, 2, group=axis)).weight
        group = {"params": [*params, table], "partition_dim": 0}
        try:
            optim.REKLS([group], lr=-1.0, betas=(2.0, 0.9), variant="fast", data_group=axis)
        except ValueError as error:
            return str(error).replace("(rank 0)", "").replace("(rank 1)", "")
        return ""

    found = virtual_world(2).run(program).results
    assert found[0] == found[1]
    for words in (
        "lr, eps",
        "betas must",
        "variant 'fast'",
        "pass both: group=",
        "flatten=True",
        "torch.int64",
        "RowAdam",
    ):
        assert words in found[0], (words, found[0])
