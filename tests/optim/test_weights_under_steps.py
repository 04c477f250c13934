"""Weights that change under an optimizer, differ between ranks, or are stepped inside other modes of torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from mixed_model import Mixed, backward, overlapped
from torch import Tensor, nn
from worlds import place, virtual_world

import weft
from weft import optim

pytestmark = pytest.mark.usefixtures("every_network")
SHAPES = ((5, 3), (4,), (7,))


def made(dtype: torch.dtype) -> list[nn.Parameter]:
    make = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(shape, generator=make, dtype=torch.float32).to(dtype)) for shape in SHAPES]


def sharded(parameters: list[nn.Parameter], axis: weft.Axis) -> torch.optim.Optimizer:
    return optim.ShardedAdamW(parameters, lr=1e-3, weight_decay=0.1, group=axis, bucket_bytes=40)


def in_a_step(parameters: list[nn.Parameter], axis: weft.Axis) -> torch.optim.Optimizer:
    alone = axis.subset([axis.rank])
    parts = [optim.REKLS(parameters[:1], lr=1e-3, variant="stable", group=alone, data_group=axis),
             optim.ShardedAdamW(parameters[1:], lr=1e-3, weight_decay=0.1, group=axis)]  # fmt: skip
    return optim.OverlappedStep(parts, overlap_backward=True)


def step_on(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], rank: int, number: int) -> None:
    make = torch.Generator().manual_seed(10 * number + rank)
    loss = sum((p.float() * place(torch.randn(p.shape, generator=make))).sum() for p in parameters)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def filled(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.fill_(5.0)


@torch.no_grad()
def clamped(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.clamp_(-0.25, 0.25)


def loaded(parameters: list[nn.Parameter]) -> None:
    holder = nn.ParameterList(parameters)
    holder.load_state_dict({str(at): torch.full_like(p, -3.0) for at, p in enumerate(parameters)})


@torch.no_grad()
def edited(parameters: list[nn.Parameter]) -> None:
    parameters[0][1, 2] = 2.0
    parameters[2][-2:] = -4.0


def replaced(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.data = torch.ones_like(parameter)


@pytest.mark.parametrize("kind", [sharded, in_a_step])
@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        *(pytest.param(other, marks=pytest.mark.slow) for other in (torch.float16, torch.float32, torch.float64)),
    ],
)
@pytest.mark.parametrize("change", [filled, clamped, loaded, edited, replaced])
def test_masters_follow_weights_that_were_changed(change: Callable, dtype: torch.dtype, kind: Callable) -> None:
    """One step moves a weight by about lr: what was set stays. What was not changed has the bits of a run alone."""

    def program(axis: weft.Axis) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
        parameters, others = place((made(dtype), made(dtype)))
        one, other = kind(parameters, axis), kind(others, axis)
        for number in range(2):
            step_on(one, parameters, axis.rank, number), step_on(other, others, axis.rank, number)
        before = [p.detach().clone() for p in parameters]
        change(parameters)
        after = [p.detach().clone() for p in parameters]
        step_on(one, parameters, axis.rank, 2), step_on(other, others, axis.rank, 2)
        return before, after, [p.detach() for p in parameters], [p.detach() for p in others]

    world = virtual_world(3)
    first = None
    for before, after, now, other in world.run(program).results:
        for one, two, three, four in zip(before, after, now, other, strict=True):
            assert ((three - two).abs() <= 0.01 + 0.01 * two.abs()).all(), (two, three)
            same = one == two
            assert torch.equal(three[same], four[same])
        first = first or now
        assert all(torch.equal(*pair) for pair in zip(first, now, strict=True))


def test_masters_keep_what_bf16_cannot() -> None:
    """Where nothing is changed, small steps add up in them: 1000 steps of 1e-5 are 0.01."""
    parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = optim.ShardedAdamW([parameter], lr=1e-5, weight_decay=0.0)
    for _ in range(1000):
        parameter.grad = torch.ones(3, dtype=torch.bfloat16)
        optimizer.step()
    assert torch.equal(parameter.detach(), torch.full((3,), 0.99).to(torch.bfloat16))


def errors_over(program: Callable[[weft.Axis], Any], size: int) -> list[str]:
    def run(axis: weft.Axis) -> str:
        try:
            program(axis)
        except ValueError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    return virtual_world(size).run(run).results


def matrices(parameters: list[nn.Parameter], axis: weft.Axis) -> torch.optim.Optimizer:
    return optim.REKLS(parameters, lr=0.1, group=axis.subset([axis.rank]), data_group=axis)


def replicated(parameters: list[nn.Parameter], axis: weft.Axis) -> torch.optim.Optimizer:
    return optim.REKLS(parameters, lr=0.1, group=axis)


@pytest.mark.parametrize(
    ("kind", "label", "name"),
    [
        (sharded, "ShardedAdamW", "parameter 1 of group 0"),
        (matrices, "REKLS", "parameter 1 of group 0"),
        (replicated, "REKLS", "parameter 1 of group 0"),
        (in_a_step, "OverlappedStep", "parameter 0 of group 0 (ShardedAdamW)"),
    ],
)
@pytest.mark.parametrize("when", ["first", "loaded"])
def test_ranks_that_differ_are_noticed(kind: Callable, label: str, name: str, when: str) -> None:
    """On all ranks, with the way out, and nothing is changed; then all goes on."""

    def program(axis: weft.Axis) -> tuple[str, bool, list[Tensor]]:
        parameters, words = place(made(torch.float32)), ""
        optimizer = kind(parameters, axis)

        def step() -> None:
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            optimizer.zero_grad(set_to_none=False)
            sum((p * p.detach().sign()).sum() for p in parameters).backward()
            optimizer.step()

        if when == "loaded":
            step()
            optimizer.load_state_dict(optimizer.state_dict())
        if axis.rank in (1, 3):
            parameters[1].data[2] += 1e-6
        before = [p.detach().clone() for p in parameters]
        try:
            step()
        except ValueError as error:
            words = str(error)
        same = all(torch.equal(*pair) for pair in zip(before, parameters, strict=True))
        weft.broadcast_parameters(parameters, group=axis)
        step()
        return words, same, [p.detach() for p in parameters]

    results = virtual_world(4).run(program).results
    for words, same, after in results:
        assert words == (
            f"{label}: {name} has other weights on ranks 1, 3 of 4 than on rank 0; make the model the same on all "
            f"ranks, or call weft.broadcast_parameters(model, group=...) before the first step"
        )
        assert same and all(torch.equal(*pair) for pair in zip(after, results[0][2], strict=True))


def test_ranks_that_differ_on_one_line_of_a_mesh_are_noticed_on_all() -> None:
    """Data by tensor ranks: shards differ over the tensor axis, and must not over the data axis."""

    def program(axis: weft.Axis, spoilt: int | None) -> None:
        row, column = divmod(axis.rank, 2)
        tensor, data = axis.subset([2 * row, 2 * row + 1]), axis.subset([column, column + 2])
        shard = place(nn.Parameter(torch.full((3, 4), float(column))))
        whole, vector = place((nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(7))))
        step = optim.OverlappedStep([
            optim.REKLS([{"params": [shard], "partition_dim": 0}, {"params": [whole]}], lr=0.1, group=tensor,
                       data_group=data),
            optim.ShardedAdamW([vector], group=data),
        ])  # fmt: skip
        if axis.rank == spoilt:
            shard.data[0, 0] = 9.0
        for parameter in (shard, whole, vector):
            parameter.grad = torch.ones_like(parameter)
        step.step()

    assert errors_over(lambda axis: program(axis, None), 4) == [""] * 4
    for spoilt in range(4):
        found = errors_over(lambda axis, spoilt=spoilt: program(axis, spoilt), 4)
        assert len(set(found)) == 1 and "parameter 0 of group 0 (REKLS) has other weights on rank 1 of 2" in found[0]


def test_weights_are_compared_once() -> None:
    def program(axis: weft.Axis) -> list[int]:
        parameters = place(made(torch.float32))
        optimizer, counts = sharded(parameters, axis), []
        for number in range(3):
            with weft.record() as ledger:
                step_on(optimizer, parameters, axis.rank, number)
            counts.append(sum("weights.metadata" in event.operation for event in ledger.events))
        return counts

    assert virtual_world(3).run(program).results == [[1, 0, 0]] * 3


def train_mixed(axis: weft.Axis, around: Any, **options: Any) -> list[Tensor]:
    model = Mixed(axis)
    step = overlapped(model, axis, **options)
    for number in range(3):
        backward(model, axis, number, 1)
        with around():
            step.step()
        step.zero_grad()
    kept = [value for state in step.state.values() for value in state.values()]
    return [*model.values(), *kept]


def bf16_everywhere() -> Any:
    """In a rank."""
    return torch.autocast(place(torch.ones(())).device.type, torch.bfloat16)


@pytest.mark.parametrize("options", [{}, {"clip": 0.5}, {"overlap_backward": True, "bucket_bytes": 100}])
def test_a_step_inside_autocast_is_the_same(options: dict) -> None:
    plain = virtual_world(3).run(lambda axis: train_mixed(axis, nullcontext, **options)).results
    inside = virtual_world(3).run(lambda axis: train_mixed(axis, bf16_everywhere, **options)).results
    for one, other in zip(plain, inside, strict=True):
        assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("variant", ["exact", "stable"])
def test_rekls_inside_autocast_is_the_same(variant: str) -> None:
    """Alone, its state loaded inside autocast, and clipped by `clip_grad_norm_`."""

    def train(around: Any) -> list[Tensor]:
        parameters = made(torch.float32)
        optimizer = optim.REKLS(parameters, lr=0.1, variant=variant)
        for number in range(4):
            make = torch.Generator().manual_seed(number)
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=make)
            with around():
                weft.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
                optimizer.load_state_dict(optimizer.state_dict())
        return [*(p.detach() for p in parameters), *(v for s in optimizer.state.values() for v in s.values())]

    for one, other in zip(train(nullcontext), train(lambda: torch.autocast("cpu", torch.bfloat16)), strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


def test_a_backward_inside_autocast_sends_the_same() -> None:
    """Hooks of overlap_backward run inside the autocast of a backward."""

    def train(axis: weft.Axis, around: Any) -> list[Tensor]:
        parameters = place(made(torch.float32))
        step = in_a_step(parameters, axis)
        for number in range(3):
            make = torch.Generator().manual_seed(10 * number + axis.rank)
            loss = sum((p * place(torch.randn(p.shape, generator=make))).sum() for p in parameters)
            with around():
                loss.backward()
                step.step()
            step.zero_grad()
        return [*(p.detach() for p in parameters), *(v for s in step.state.values() for v in s.values())]

    plain = virtual_world(2).run(lambda axis: train(axis, nullcontext)).results
    inside = virtual_world(2).run(lambda axis: train(axis, bf16_everywhere)).results
    for one, other in zip(plain, inside, strict=True):
        assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16, torch.float64])
def test_states_do_not_follow_the_default_dtype(default: torch.dtype) -> None:
    """Steps are counted beyond 256, where bf16 ends; moments, factors and weights have the same bits."""

    def train() -> list[Tensor]:
        parameters = made(torch.float32)
        optimizers = [
            optim.ShardedAdamW(parameters[1:]),
            optim.REKLS(parameters[:1], lr=0.01, variant="stable"),
        ]
        step = optim.OverlappedStep(optimizers, clip=3.0)
        for number in range(300):
            make = torch.Generator().manual_seed(number)
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=make, dtype=torch.float32)
            step.step()
            if number == 150:
                step.load_state_dict(step.state_dict())
        return [*(p.detach() for p in parameters), *(v for s in step.state.values() for v in s.values())]

    plain = train()
    torch.set_default_dtype(default)
    try:
        other = train()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(plain, other, strict=True))
    assert 300.0 in [float(value) for value in other if value.ndim == 0]
