"""Backwards of equal calls in another order on one rank: each meets its own, or all ranks say the same. Never mixed."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from every_operation import OPERATIONS, tokens, weights_like
from torch import Tensor
from worlds import place, virtual_world

import weft
from weft.errors import DisagreementError
from weft.world.launch import ProcessWorld

NAMES = (
    "linear_attention scalar", "linear_attention zigzag", "attention gather", "attention ring", "attention ulysses",
    "delta_rule scalar", "mamba2", "selective_scan", "short_conv zigzag", "exclusive_scan none",
    "exclusive_scan dense", "unshard",
)  # fmt: skip


def in_another_order(axis: weft.Axis, name: str, compared: bool) -> list[tuple[Tensor, Tensor]]:
    """Gradients of two equal calls, the last rank's backwards in the other order, with those in the same order.

    ``compared``: the backward is the first of its kind, so that the ranks compare it.
    """
    run = OPERATIONS[name]

    def forward() -> tuple[list[Tensor], list[Tensor]]:
        leaves = [tokens(axis.rank), tokens(10 + axis.rank)]
        outs = [run(axis, leaf) for leaf in leaves]
        return leaves, [(weights_like(out) * out.square()).sum() for out in outs]

    def backward(order: list[int]) -> list[Tensor]:
        leaves, losses = forward()
        for number in order:
            losses[number].backward()
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    wanted = [] if compared else backward([0, 1])
    got = backward([1, 0] if axis.rank == axis.size - 1 else [0, 1])
    return list(zip(got, wanted, strict=True))


def words_or_gradients(axis: weft.Axis, name: str, compared: bool) -> str:
    """One of "right", "wrong", or what was raised."""
    try:
        pairs = in_another_order(axis, name, compared)
    except DisagreementError as error:
        return str(error)
    return "right" if all(torch.equal(got, wanted) for got, wanted in pairs) else "wrong"


def heard_in(size: int, program: Callable[[weft.Axis], str]) -> list[str]:
    """Of a virtual world; where its ranks wait for each other it ends with one error for all of them."""
    try:
        return virtual_world(size).run(program).results
    except DisagreementError as error:
        return ["right" if "the ranks disagree at call " in str(error) and "of_call=" in str(error) else str(error)]


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_right_or_the_ranks_disagree(name: str, size: int) -> None:
    assert set(heard_in(size, lambda axis: words_or_gradients(axis, name, compared=False))) == {"right"}


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize("name", NAMES)
def test_the_first_backward_is_compared_before_anything_is_sent(name: str) -> None:
    heard = virtual_world(2).run(lambda axis: words_or_gradients(axis, name, compared=True)).results
    assert heard[0] == heard[1]
    assert ".backward: the ranks disagree at call 3: rank 0 called " in heard[0]
    assert "(of_call=1); rank 1 called " in heard[0] and "(of_call=2); every" in heard[0]


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize("late", [False, True])
def test_gradients_of_two_lookups_in_another_order(late: bool) -> None:
    def program(axis: weft.Axis) -> str:
        torch.manual_seed(0)
        table = place(weft.ShardedEmbedding(12, 2))
        table.table.collects_late = late
        found = []
        for order in ([0, 1], [1, 0] if axis.rank == 1 else [0, 1]):
            table.weight.grad = None
            ids = place([torch.tensor([axis.rank, 4, 5]), torch.tensor([axis.rank + 1, 6, 7])])
            losses = [(rows * weights_like(rows) * (number + 1)).sum() for number, rows in enumerate(map(table, ids))]
            for number in order:
                losses[number].backward()
            table.table.collect()
            found.append(table.weight.grad.to_dense())
        return "right" if torch.allclose(found[0], found[1], atol=1e-6) else "wrong"

    assert set(heard_in(3, program)) == {"right"}


def on_gloo(axis: weft.Axis, name: str, compared: bool) -> str:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=20))  # of its own: it may be closed
    return words_or_gradients(weft.Axis.of(group), name, compared)


@pytest.mark.processes
@pytest.mark.parametrize("compared", [True, False])
@pytest.mark.parametrize("name", ["linear_attention scalar", "attention gather", "exclusive_scan dense", "unshard"])
def test_on_gloo_all_ranks_raise_the_same(two: ProcessWorld, name: str, compared: bool) -> None:
    """Where the first backward has been compared, a wait that does not end tells: the group is closed then."""
    heard = two.run(on_gloo, name, compared)
    assert "wrong" not in heard
    assert len(set(heard)) == 1
    assert heard[0] == "right" or (".backward: the ranks disagree at call " in heard[0] and "of_call=" in heard[0])
    assert not compared or heard[0] != "right"
