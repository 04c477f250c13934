"""Short convolutions over ranks against one token at a time: outputs, states and every gradient."""

from __future__ import annotations

import functools
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import EVERY_LAYOUT
from ranks import errors_of
from test_linear_attention import BATCH, Case, cases, slice_of, worst
from torch import Tensor
from worlds import every, virtual_world

import weft
from weft.ops.sequence.layout import LAYOUTS

DIM = 3
pytestmark = pytest.mark.usefixtures("every_network")


def conv_reference(x: Tensor, weight: Tensor, bias: Tensor, start: Tensor, lengths: list[int], silu: bool):
    """Token by token; start and the returned states [B*N, D, k-1]."""
    batch, taps = len(x), weight.shape[1]
    states = start.unflatten(0, (batch, len(lengths)))
    outputs, leaving, t = [], [], 0
    for s, length in enumerate(lengths):
        seen = states[:, s]
        for _ in range(length):
            seen = torch.cat([seen, x[:, t, :, None]], dim=-1)
            outputs.append((seen[..., -taps:] * weight).sum(-1) + bias)
            t += 1
        leaving.append(seen[..., seen.shape[-1] - (taps - 1) :])
    y = torch.stack(outputs, 1) if outputs else x * 1
    return (torch.nn.functional.silu(y) if silu else y), torch.stack(leaving, 1).flatten(0, 1)


@functools.lru_cache(maxsize=32)
def problem(case: Case, size: int, taps: int, silu: bool):
    make = torch.Generator().manual_seed(taps + case.total)
    batch = BATCH if case.bounds is None else 1

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=make, dtype=torch.float64)

    leaves = {"x": draw(batch, case.total, DIM), "weight": draw(DIM, taps), "bias": draw(DIM),
              "start": draw(case.states, DIM, taps - 1)}  # fmt: skip
    leaves = {name: x.requires_grad_() for name, x in leaves.items()}
    lengths = [case.total] if case.bounds is None else [b - a for a, b in pairwise(case.bounds)]
    y, final = conv_reference(*leaves.values(), lengths, silu)
    weight, final_weights = draw(*y.shape), [draw(*final.shape) for _ in range(size)]
    loss = (y * weight).sum() + (final * sum(final_weights)).sum()
    grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()), allow_unused=True), strict=True))
    grads = {name: torch.zeros_like(leaves[name]) if grad is None else grad for name, grad in grads.items()}
    return leaves, weight, final_weights, y.detach(), final.detach(), grads


def check(case: Case, layout: str, taps: int, silu: bool = True, with_sequence: bool = False,
          dtype: torch.dtype = torch.float64, tolerance: float = 1e-12) -> None:  # fmt: skip
    leaves, weight, final_weights, y, final, grads = problem(case, len(case.lengths), taps, silu)
    whole = ("weight", "bias", "start")

    def program(axis: weft.Axis):
        def mine(x: Tensor) -> Tensor:
            return slice_of(x, case, layout, axis.rank)

        local = {name: (x.detach().clone() if name in whole else mine(x)).to(dtype).requires_grad_()
                 for name, x in leaves.items()}  # fmt: skip
        where = {"cu_seqlens": None if case.bounds is None else torch.tensor(case.bounds), "layout": layout}
        where = {"sequence": weft.sequence(local["x"].shape[1], **where, group=axis)} if with_sequence else {
            **where, "group": axis}  # fmt: skip
        out, end = weft.short_conv(
            local["x"], local["weight"], local["bias"], "silu" if silu else None, initial_state=local["start"],
            output_final_state=True, **where,
        )  # fmt: skip
        assert out.dtype == end.dtype == dtype
        loss = (out * mine(weight)).sum() + (end * final_weights[axis.rank]).sum()
        got = dict(zip(local, torch.autograd.grad(loss, list(local.values())), strict=True))
        pairs = [(out.detach(), mine(y)), (end.detach(), final), (got["x"], mine(grads["x"]))]
        return worst([(a.double(), b.double()) for a, b in pairs]), {name: got[name].double() for name in whole}

    results = virtual_world(len(case.lengths)).run(program).results
    assert max(error for error, _ in results) <= tolerance
    for name in whole:
        assert worst([(sum(shares[name] for _, shares in results), grads[name])]) <= tolerance, name


@pytest.mark.parametrize("layout", EVERY_LAYOUT)
@pytest.mark.parametrize("taps", [1, 2, 4, 9])
def test_every_case_and_world_size(layout: str, taps: int) -> None:
    """Of 9 tokens a rank needs those of two or three ranks before it."""
    for number, case in enumerate(every([case for size in (1, 2, 3, 5, 8) for case in cases(size).values()])):
        check(case, layout, taps, silu=number % 2 == 0, with_sequence=number % 3 == 0)


@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    cuts=st.none() | st.lists(st.integers(0, 30), max_size=6),
    layout=st.sampled_from(LAYOUTS),
    taps=st.integers(1, 12),
    with_sequence=st.booleans(),
)
def test_random_splits_and_documents(lengths, cuts, layout, taps, with_sequence) -> None:
    total = sum(lengths)
    bounds = None if cuts is None else tuple(sorted([0, *(min(cut, total) for cut in cuts), total]))
    check(Case(tuple(lengths), bounds), layout, taps, with_sequence=with_sequence)


def test_fp32() -> None:
    check(cases(5)["uneven"], "zigzag", 4, dtype=torch.float32, tolerance=2e-6)


def test_without_a_state_or_a_bias_it_is_torchs_convolution() -> None:
    make = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=make, dtype=torch.float64) for shape in ((2, 20, 6), (6, 4)))
    padded = torch.nn.functional.pad(x.mT, (3, 0))
    wanted = torch.nn.functional.conv1d(padded, weight.unsqueeze(1), groups=6).mT

    def program(axis: weft.Axis) -> Tensor:
        y, state = weft.short_conv(weft.shard(x, 1, group=axis), weight, group=axis)
        assert state is None
        return y

    torch.testing.assert_close(torch.cat(virtual_world(3).run(program).results, dim=1), wanted)


def test_only_the_halo_travels_and_nothing_across_documents() -> None:
    def sent(bounds: tuple[int, ...] | None) -> list[int]:
        def program(axis: weft.Axis) -> int:
            x = torch.randn(1, 8, 5, requires_grad=True)
            sequence = weft.sequence(8, cu_seqlens=bounds, group=axis)
            with weft.record() as ledger:
                weft.short_conv(x, torch.ones(5, 4), sequence=sequence)[0].sum().backward()
            return ledger.bytes_sent

        return virtual_world(3).run(program).results

    tokens = 3 * 5 * 4  # bytes of a halo, and of its gradient
    assert sent(None) == [tokens, 2 * tokens, tokens]
    assert sent((0, 8, 16, 24)) == [0, 0, 0]
    assert sent((0, 7, 24)) == [tokens // 3, tokens + tokens // 3, tokens]


def test_the_halo_travels_under_the_local_part() -> None:
    """Forward and backward, where a message takes less than the work beside it; lengths are known."""

    def elapsed(latency: float) -> float:
        def program(axis: weft.Axis) -> None:
            x = torch.empty(1, 4096, 8, device="meta", requires_grad=True)
            sequence = weft.Sequence(axis, "contiguous", (4096,) * 8, None)
            y, _ = weft.short_conv(x, torch.empty(8, 4, device="meta"), activation="silu", sequence=sequence)
            y.backward(torch.empty_like(y))

        machine = weft.world.Machine(latency, float("inf"), memory_bandwidth=1e9)
        return weft.world.VirtualWorld(8, machine).run(program).elapsed

    local = elapsed(0.0)
    assert elapsed(local / 50) == pytest.approx(local, rel=1e-9)
    assert elapsed(local) > 1.5 * local  # which is what waiting at once would show


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x": torch.ones(6, 4)}, "x must be [B, T, D], got [6, 4] (rank 1)"),
        ({"weight": torch.ones(5, 4)}, "weight must be [D, k] with D = 4, got [5, 4] (rank 1)"),
        ({"bias": torch.ones(3)}, "bias must be [4], got [3] (rank 1)"),
        ({"activation": "relu"}, "activation 'relu' is not one of silu (rank 1)"),
        ({"initial_state": torch.ones(1, 4, 4)}, "initial_state must be [1, 4, 2], got [1, 4, 4] (rank 1)"),
        ({"cu_seqlens": torch.tensor([0, 17])}, "short_conv(cu_seqlens=(0, 17))"),
        ({"activation": "silu"}, "rank 1 called short_conv(activation=silu)"),
    ],
)
def test_a_rank_that_differs_raises_everywhere(changes, words) -> None:
    def program(axis: weft.Axis) -> None:
        right = {"x": torch.ones(1, 6, 4), "weight": torch.ones(4, 3)}
        weft.short_conv(**{**right, **(changes if axis.rank == 1 else {})}, group=axis)

    caught = errors_of(program)
    assert len(caught) == 3 and len(set(caught)) == 1 and words in caught[0], caught
