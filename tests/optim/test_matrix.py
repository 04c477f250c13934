"""Matrix optimizers on virtual ranks: the bits of one process; those of `REKLS` are the bits of its equations."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from published import Published
from sharded_run import CUT_KINDS, RULES, assert_same, train_alone, train_over
from torch import Tensor
from worlds import virtual_world

import weft
from weft import optim
from weft.optim.matrix import engine
from weft.optim.matrix.rule import DECAY_METHODS


@pytest.fixture(autouse=True)
def many_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices as small as these would travel all at once."""
    monkeypatch.setattr(engine, "BUCKET_BYTES", 64)


@pytest.mark.parametrize("shape", [(6, 9), (12, 5), (16, 16), (1, 4), (4, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", DECAY_METHODS)
def test_alone_it_is_the_published_update(method: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(shape, dtype=dtype))
    wanted = Published(parameter.detach(), 0.01, method=method, decay=0.1)
    optimizer = optim.REKLS([parameter], 0.01, weight_decay=0.1, weight_decay_method=method, variant="exact")
    for _ in range(10):
        grad = torch.randn(shape, dtype=dtype)
        parameter.grad = grad.clone()
        optimizer.step()
        wanted.step(grad)
    assert torch.equal(parameter.detach(), wanted.weight)
    assert torch.equal(optimizer.state[parameter]["L"], wanted.L)


def cases_of(*rows: Any, quick: Any) -> list[Any]:
    """Every rule with every row; in `make test` the published update with all, one rule of each kind with ``quick``."""
    brief = ("stable, rare", "Muon", "SOAP")
    return [
        pytest.param(rule, *row, marks=[] if rule == "exact" or (rule in brief and row == quick) else pytest.mark.slow)
        for rule in RULES
        for row in rows
    ]


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize(
    ("rule", "size", "uneven"),
    cases_of(*itertools.product((1, 2, 3, 4), (False, True)), quick=(3, True)),
)
def test_over_ranks_it_has_the_bits_of_one(rule: str, size: int, uneven: bool) -> None:
    wanted = train_alone(10, rule=rule)
    found = virtual_world(size).run(lambda axis: train_over(axis, 10, uneven, rule=rule)).results
    assert_same(wanted, found, uneven)


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize("rule", [
    rule if rule in ("stable, rare", "Muon") else pytest.param(rule, marks=pytest.mark.slow) for rule in RULES
])  # fmt: skip
def test_parts_of_matrices_over_ranks_have_the_bits_of_one(rule: str) -> None:
    wanted = train_alone(5, 2, kinds=CUT_KINDS, rule=rule)

    def program(axis: weft.Axis) -> list[Tensor]:
        over_data, over_tensor = rows_and_columns(axis, 2, 3)
        return train_over(over_tensor, 5, True, over_data, kinds=CUT_KINDS, rule=rule)

    found = virtual_world(6).run(program).results
    for row in (found[:3], found[3:]):
        assert_same(wanted, row, True, CUT_KINDS)


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize("method", DECAY_METHODS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rule", ["exact", pytest.param("Muon", marks=pytest.mark.slow)])
def test_every_weight_decay_and_dtype(rule: str, method: str, dtype: torch.dtype) -> None:
    options = {"rule": rule, "weight_decay_method": method, "weight_decay": 0.1, "dtype": dtype}
    wanted = train_alone(6, **options)
    assert all(weight.dtype == dtype for weight in wanted)
    assert_same(wanted, virtual_world(3).run(lambda axis: train_over(axis, 6, True, **options)).results, True)


def rows_and_columns(axis: weft.Axis, data: int, tensor: int) -> tuple[weft.Axis, weft.Axis]:
    """(data axis, tensor axis) of a mesh in which the ranks of a tensor axis are neighbours."""
    row, column = divmod(axis.rank, tensor)
    return (
        axis.subset([column + tensor * other for other in range(data)]),
        axis.subset([row * tensor + other for other in range(tensor)]),
    )


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize(
    ("rule", "data", "tensor", "method"),
    cases_of(*itertools.product((2, 3), (1, 2), ("decoupled", "l2")), (2, 3, "l2"), quick=(3, 2, "decoupled")),
)
def test_data_by_tensor_is_one_on_averaged_gradients(rule: str, data: int, tensor: int, method: str) -> None:
    options = {"rule": rule, "weight_decay_method": method}
    wanted = train_alone(10, data, **options)

    def program(axis: weft.Axis) -> list[Tensor]:
        over_data, over_tensor = rows_and_columns(axis, data, tensor)
        return train_over(over_tensor, 10, True, over_data, **options)

    found = virtual_world(data * tensor).run(program).results
    for row in range(data):
        assert_same(wanted, found[row * tensor : (row + 1) * tensor], True)
