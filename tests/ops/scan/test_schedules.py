"""Every schedule against the serial fold, over many ranks in one process: outputs and all gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from serial import KINDS, as_arguments, random_maps, relative_error, serial_scan
from worlds import every, virtual_world

import weft
from weft.ops.scan import METHODS

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 16, 17, 24, 33)  # `make soak` takes all from 1 to 33
pytestmark = pytest.mark.usefixtures("every_network")


def check(
    kind: str, size: int, shape: tuple[int, ...], decay: str, method: str, reverse: bool, blocks: int | None = None
) -> None:
    states, decays = random_maps(kind, size, shape, decay, seed=size)
    leaves = states + [d for d in decays if d is not None]
    weights = [torch.randn_like(state) for state in states]

    wanted = serial_scan(kind, states, decays, reverse)
    loss = sum((w * out).sum() for w, out in zip(weights, wanted, strict=True))
    grads = torch.autograd.grad(loss, leaves, allow_unused=True) if size > 1 else [None] * len(leaves)

    def rank_program(axis: weft.Axis) -> tuple[torch.Tensor, list[torch.Tensor]]:
        state = states[axis.rank].detach().requires_grad_()
        decay_here = decays[axis.rank]
        decay_here = None if decay_here is None else decay_here.detach().requires_grad_()
        out = weft.exclusive_scan(
            state, **as_arguments(kind, decay_here), group=axis, method=method, reverse=reverse, blocks=blocks
        )
        mine = [state] if decay_here is None else [state, decay_here]
        return out.detach(), list(torch.autograd.grad((weights[axis.rank] * out).sum(), mine))

    run = virtual_world(size).run(rank_program)
    for rank, (out, got) in enumerate(run.results):
        assert relative_error(out, wanted[rank].detach()) <= 1e-12, (kind, size, decay, method, reverse, rank)
        for grad, leaf in zip(got, [states, decays], strict=False):
            index = next(i for i, one in enumerate(leaves) if one is leaf[rank])
            true = grads[index] if grads[index] is not None else torch.zeros_like(leaves[index])
            assert relative_error(grad, true) <= 1e-12, (kind, size, decay, method, reverse, rank)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_world_size_both_directions_with_gradients(method: str, kind: str) -> None:
    # The gradient of a scan is the other one by the same schedule, so each check runs both directions; which of
    # them is the output takes turns here, and `make soak` runs all of it.
    for size in every(SIZES):
        check(kind, size, (2, 3, 2), "slow", method, reverse=bool(size % 2))
    for size in every((2, 3, 7, 8, 12, 33)):
        check(kind, size, (2, 3, 2), "slow", method, reverse=not size % 2)


@pytest.mark.parametrize("decay", ["one", "fast", "zero"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["scalar", "vector", "dense"])
def test_decays_that_hide_nothing_or_everything(method: str, kind: str, decay: str) -> None:
    for size, reverse in every([(2, False), (5, True), (8, False), (13, True), (13, False), (8, True), (5, False)]):
        check(kind, size, (2, 3, 2), decay, method, reverse)


@given(
    method=st.sampled_from(list(METHODS)),
    kind=st.sampled_from(KINDS),
    size=st.integers(1, 20),
    lead=st.lists(st.integers(1, 3), max_size=2),
    keys=st.integers(1, 6),
    values=st.integers(1, 5),
    blocks=st.integers(1, 9),
    reverse=st.booleans(),
    decay=st.sampled_from(["one", "slow", "fast", "zero"]),
)
def test_random_worlds_shapes_and_blocks(method, kind, size, lead, keys, values, blocks, reverse, decay) -> None:
    check(kind, size, (*lead, keys, values), decay, method, reverse, blocks if method == "pipeline" else None)


@pytest.mark.parametrize("method", METHODS)
def test_half_precision_is_summed_in_fp32(method: str) -> None:
    states, decays = random_maps("scalar", 9, (2, 4, 4), "slow", seed=1, dtype=torch.bfloat16)
    wanted = serial_scan("scalar", [s.double() for s in states], [d.double() for d in decays if d is not None], False)
    run = virtual_world(9).run(
        lambda axis: weft.exclusive_scan(
            states[axis.rank].detach(), log_decay=decays[axis.rank].detach(), method=method, group=axis
        )
    )
    for got, true in zip(run.results, wanted, strict=True):
        assert got.dtype == torch.bfloat16
        assert torch.equal(got, true.float().bfloat16()) or relative_error(got, true) < 2**-8


@pytest.mark.parametrize("method", METHODS)
def test_empty_states_and_second_derivatives(method: str) -> None:
    run = virtual_world(3).run(lambda axis: weft.exclusive_scan(torch.ones(0, 4, 2), method=method).shape)
    assert run.results == [torch.Size([0, 4, 2])] * 3

    def curvature(axis: weft.Axis) -> torch.Tensor:
        state = torch.full((1, 2), 0.5, dtype=torch.float64).requires_grad_()
        log = torch.full((1,), -0.3, dtype=torch.float64).requires_grad_()
        out = weft.exclusive_scan(state, log_decay=log, method=method)
        (slope,) = torch.autograd.grad(out.square().sum(), log, create_graph=True)
        return torch.autograd.grad(slope.sum(), state)[0]

    logs = [torch.full((1,), -0.3, dtype=torch.float64).requires_grad_() for _ in range(3)]
    states = [torch.full((1, 2), 0.5, dtype=torch.float64).requires_grad_() for _ in range(3)]
    outs = serial_scan("vector", states, logs, reverse=False)
    slopes = torch.autograd.grad(sum(out.square().sum() for out in outs), logs, create_graph=True, allow_unused=True)
    true = torch.autograd.grad(sum(slope.sum() for slope in slopes if slope is not None), states, allow_unused=True)
    for got, wanted in zip(virtual_world(3).run(curvature).results, true, strict=True):
        assert relative_error(got, torch.zeros(1, 2) if wanted is None else wanted) < 1e-12


@pytest.mark.parametrize("method", METHODS)
def test_same_inputs_same_bits(method: str) -> None:
    states, decays = random_maps("vector", 6, (2, 4, 4), "slow", seed=3, dtype=torch.float32)

    def program(axis: weft.Axis) -> torch.Tensor:
        return weft.exclusive_scan(states[axis.rank].detach(), log_decay=decays[axis.rank].detach(), method=method)

    first, second = (virtual_world(6).run(program).results for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_subset_of_ranks_in_any_order_is_an_axis_of_its_own() -> None:
    def program(axis: weft.Axis) -> list[float]:
        mine = [1, 4, 2] if axis.rank in (1, 4, 2) else [5, 0, 3]
        sub = axis.subset(mine)
        outs = [weft.exclusive_scan(torch.full((1, 1), float(axis.rank)), group=sub, method=m) for m in METHODS]
        return [out.item() for out in outs]

    results = virtual_world(6).run(program).results
    entering = {1: 0.0, 4: 1.0, 2: 5.0, 5: 0.0, 0: 5.0, 3: 5.0}
    assert results == [[entering[rank]] * len(METHODS) for rank in range(6)]


def test_a_world_of_one_needs_no_process_group_and_sends_nothing() -> None:
    with weft.record() as ledger:
        state = torch.randn(2, 3, 4, requires_grad=True)
        for method in METHODS:
            out = weft.exclusive_scan(state, log_decay=torch.zeros(2), method=method)
            out.sum().backward()
            assert out.abs().max() == 0 and state.grad is not None and state.grad.abs().max() == 0
    assert ledger.events == []
