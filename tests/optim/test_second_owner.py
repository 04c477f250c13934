"""Second owners: one factor of a very large matrix is another rank's work, with the bits of one process."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any

import pytest
import torch
from sharded_run import Kind, assert_same, make, train_alone, train_over
from test_matrix import rows_and_columns
from torch import Tensor
from worlds import place, virtual_world

import weft
from weft import optim
from weft.optim.matrix import exact, planner, rule, stable

FEW = (Kind((7, 5), 0), Kind((6, 10), 1), Kind((5,), None))
OPTIONS: dict[str, dict[str, Any]] = {
    "exact": {"rule": "exact"},
    "stable": {"rule": "stable"},
    "stable, dense at first": {"rule": "stable, rare"},
}


@pytest.fixture(autouse=True)
def small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "LARGE", 1)


@pytest.fixture
def decomposed_by(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """The sizes of what each thread, and so each virtual rank, decomposes from now on."""
    found: dict[str, list[int]] = defaultdict(list)

    def noted(factor: Tensor) -> tuple[Tensor, Tensor]:
        found[threading.current_thread().name].append(len(factor))
        return rule.decompose(factor)

    for module in (exact, stable):
        monkeypatch.setattr(module, "decompose", noted)
    return found


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("variant", OPTIONS)
def test_the_bits_of_one_process(variant: str, size: int, uneven: bool) -> None:
    wanted = train_alone(6, kinds=FEW, **OPTIONS[variant])
    found = virtual_world(size).run(lambda axis: train_over(axis, 6, uneven, kinds=FEW, **OPTIONS[variant])).results
    assert_same(wanted, found, uneven, FEW)


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize(("data", "tensor"), [(2, 2), (3, 2), (2, 3)])
def test_over_data_and_tensor_ranks(data: int, tensor: int) -> None:
    """Factors travel along both axes."""
    wanted = train_alone(5, data, kinds=FEW, rule="exact")

    def program(axis: weft.Axis) -> tuple[list[Tensor], bool]:
        over_data, over_tensor = rows_and_columns(axis, data, tensor)
        parts = train_over(over_tensor, 5, True, over_data, kinds=FEW, rule="exact")
        optimizer = make([{"params": parts[:1], "partition_dim": 0}], group=over_tensor, data_group=over_data)
        (plan,) = optimizer._plans[parts[0]]
        return parts, plan.second["R"] != plan.route.owner

    runs = virtual_world(data * tensor).run(program).results
    assert all(apart for _, apart in runs)
    for row in range(data):
        assert_same(wanted, [parts for parts, _ in runs[row * tensor : (row + 1) * tensor]], True, FEW)


def test_both_ranks_decompose(decomposed_by: dict[str, list[int]]) -> None:
    def program(axis: weft.Axis) -> None:
        parameter = torch.nn.Parameter(torch.ones(6, 9))
        optimizer = make([parameter], "exact", group=axis)
        for step in range(3):
            parameter.grad = torch.randn(6, 9, generator=torch.Generator().manual_seed(step))
            optimizer.step()

    weft.world.VirtualWorld(2).run(program)
    assert sorted(decomposed_by.values()) == [[6] * 3, [9] * 3]


def test_only_where_another_rank_has_less_to_do() -> None:
    """Not with as many matrices as ranks, not where factors take turns, not of small ones."""

    def seconds(axis: weft.Axis, matrices: int, **options: Any) -> int:
        parameters = [place(torch.nn.Parameter(torch.ones(6, 6))) for _ in range(matrices)]
        optimizer = optim.REKLS(parameters, lr=0.01, group=axis, **options)
        return sum(bool(plan.second) for plans in optimizer._plans.values() for plan in plans)

    def program(axis: weft.Axis) -> list[int]:
        found = [seconds(axis, matrices, variant="exact") for matrices in (1, 2, 3, 4)]
        return [*found, seconds(axis, 1, root_every=2), seconds(axis, 1, root_every=1)]

    assert virtual_world(4).run(program).results == [[1, 2, 1, 0, 0, 1]] * 4
    planner.LARGE = 7
    assert virtual_world(4).run(lambda axis: seconds(axis, 1, variant="exact")).results == [0] * 4


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize("side", [5, 7])
def test_a_decomposition_that_fails_with_either_owner(side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same error on every rank, nothing changed, and the next step can be made."""
    broken: list[int] = []

    def decompose(factor: Tensor) -> tuple[Tensor, Tensor]:
        if len(factor) in broken:
            raise rule.EigenError("no convergence")
        return rule.decompose(factor)

    monkeypatch.setattr(exact, "decompose", decompose)

    def program(axis: weft.Axis) -> tuple[str, bool, bool]:
        parameter = torch.nn.Parameter(torch.ones(7, 5))
        optimizer = make([parameter], "exact", group=axis)
        parameter.grad = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
        broken.append(side)
        before = parameter.detach().clone()
        with pytest.raises(RuntimeError) as caught:
            optimizer.step()
        kept = torch.equal(parameter, before)
        weft.mean_loss(torch.tensor(1.0), torch.tensor(1), group=axis)  # all have failed
        broken.clear()
        optimizer.step()
        return str(caught.value), kept, bool((parameter != before).all())

    words, kept, goes_on = zip(*virtual_world(3).run(program).results, strict=True)
    assert set(words) == {words[0]} and "could not be computed" in words[0]
    assert all(kept) and all(goes_on)


@pytest.mark.usefixtures("every_network")
def test_a_state_is_that_of_one_owner() -> None:
    """It loads where there is no second owner, and the run goes on to the bit."""
    grads = [torch.randn(7, 5, generator=torch.Generator().manual_seed(step)) for step in range(4)]

    def train(optimizer: Any, parameter: Tensor, some: list[Tensor]) -> None:
        for grad in some:
            parameter.grad = place(grad.clone())
            optimizer.step()

    def program(axis: weft.Axis) -> bool:
        ends = []
        for loads in (False, True):
            parameter = place(torch.nn.Parameter(torch.ones(7, 5)))
            optimizer = make([parameter], "exact", group=axis)
            train(optimizer, parameter, grads[:2])
            if loads:
                alone = make([parameter], "exact", group=axis.subset([axis.rank]))
                alone.load_state_dict(optimizer.state_dict())
                optimizer = alone
            train(optimizer, parameter, grads[2:])
            ends.append(parameter.detach())
        return torch.equal(*ends)

    assert all(virtual_world(3).run(program).results)
