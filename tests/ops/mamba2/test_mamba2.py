"""Mamba-2 over ranks against the token-by-token recurrence: outputs, final states and every gradient."""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import EVERY_LAYOUT
from ssm_recurrence import ssm_reference
from test_linear_attention import BATCH, Case, cases, slice_of, worst
from torch import Tensor
from worlds import every, virtual_world

import weft
from weft.ops.scan import METHODS
from weft.ops.sequence.layout import LAYOUTS

HEADS, GROUPS, DIM, STATES = 4, 2, 3, 2
WHOLE = ("A", "D", "dt_bias", "initial_states")  # on every rank; the others are cut
# What a layer asks for: everything as mamba's own, only the scan, and a D for each channel with bounded steps.
LAYERS: dict[str, dict[str, Any]] = {
    "full": {"dt_softplus": True},
    "scan": {},
    "bounded": {"dt_softplus": True, "dt_limit": (0.4, 1.1)},
}
pytestmark = pytest.mark.usefixtures("every_network")


def draw_inputs(batch: int, tokens: int, states: int, layer: str) -> dict[str, Tensor]:
    make = torch.Generator().manual_seed(tokens + len(layer))

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=make, dtype=torch.float64)

    leaves = {
        "x": draw(batch, tokens, HEADS, DIM), "dt": draw(batch, tokens, HEADS),
        "A": -draw(HEADS).abs() / 10, "B": draw(batch, tokens, GROUPS, STATES),
        "C": draw(batch, tokens, GROUPS, STATES), "D": draw(HEADS), "z": draw(batch, tokens, HEADS, DIM),
        "dt_bias": draw(HEADS), "initial_states": draw(states, HEADS, DIM, STATES),
    }  # fmt: skip
    if layer == "bounded":
        leaves["D"] = draw(HEADS, DIM)
    if layer == "scan":
        leaves = {name: x for name, x in leaves.items() if name not in ("D", "z", "dt_bias")}
    return leaves


@functools.lru_cache(maxsize=32)
def problem(layer: str, case: Case, size: int):
    """Inputs, weights of the loss, and what autograd says of the recurrence on the whole sequence."""
    batch = BATCH if case.bounds is None else 1
    leaves = {name: x.requires_grad_() for name, x in draw_inputs(batch, case.total, case.states, layer).items()}
    lengths = [case.total] if case.bounds is None else [b - a for a, b in pairwise(case.bounds)]
    options = LAYERS[layer]
    y, final = ssm_reference(
        *(leaves.get(name) for name in ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states")), lengths,
        options.get("dt_softplus", False), options.get("dt_limit", (0.0, float("inf"))),
    )  # fmt: skip
    make = torch.Generator().manual_seed(size)
    weight = torch.randn(y.shape, generator=make, dtype=torch.float64)
    final_weights = [torch.randn(final.shape, generator=make, dtype=torch.float64) for _ in range(size)]
    loss = (y * weight).sum() + (final * sum(final_weights)).sum()
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return leaves, weight, final_weights, y.detach(), final.detach(), dict(zip(leaves, found, strict=True))


def check(layer: str, case: Case, layout: str, method: str, tolerance: float = 1e-10, chunk_size: int = 4,
          dtype: torch.dtype = torch.float64, with_sequence: bool = False) -> None:  # fmt: skip
    size = len(case.lengths)
    leaves, weight, final_weights, y, final, grads = problem(layer, case, size)

    def program(axis: weft.Axis):
        def mine(x: Tensor) -> Tensor:
            return slice_of(x, case, layout, axis.rank)

        local = {name: (x.detach().clone() if name in WHOLE else mine(x)).to(dtype).requires_grad_()
                 for name, x in leaves.items()}  # fmt: skip
        where = {"cu_seqlens": None if case.bounds is None else torch.tensor(case.bounds), "layout": layout}
        where = {"sequence": weft.sequence(local["x"].shape[1], **where, group=axis)} if with_sequence else {
            **where, "group": axis}  # fmt: skip
        out, end = weft.mamba2(
            **local, **LAYERS[layer], **where, method=method, chunk_size=chunk_size, return_final_states=True
        )
        assert out.dtype == dtype and end.dtype == torch.promote_types(dtype, torch.float32)
        loss = (out * mine(weight)).sum() + (end * final_weights[axis.rank]).sum()
        got = dict(zip(local, torch.autograd.grad(loss, list(local.values())), strict=True))
        pairs = [(out.detach(), mine(y)), (end.detach(), final)]
        pairs += [(got[name], mine(grads[name])) for name in got if name not in WHOLE]
        shares = {name: got[name].double() for name in WHOLE if name in got}
        return worst([(a.double(), b.double()) for a, b in pairs]), shares

    results = virtual_world(size).run(program).results
    assert max(error for error, _ in results) <= tolerance
    for name in results[0][1]:
        assert worst([(sum(shares[name] for _, shares in results), grads[name])]) <= tolerance, name
    # The gradient of an initial state is on the rank where its document begins, and nowhere else.
    held = torch.stack([shares["initial_states"].flatten(1).abs().sum(1) > 0 for _, shares in results])
    assert (held.sum(0) <= 1).all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layout", EVERY_LAYOUT)
def test_every_case_and_world_size(layout: str, method: str) -> None:
    for number, case in enumerate(every([case for size in (1, 2, 3, 5, 8) for case in cases(size).values()])):
        check(list(LAYERS)[number % 3], case, layout, method, with_sequence=number % 2 == 0)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["auto", *METHODS])
@pytest.mark.parametrize("layout", EVERY_LAYOUT)
@pytest.mark.parametrize("layer", LAYERS)
def test_every_layer_case_and_world_size(layer: str, layout: str, method: str) -> None:
    for case in every([case for size in (1, 2, 3, 5, 8) for case in cases(size).values()]):
        check(layer, case, layout, method)


@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    cuts=st.none() | st.lists(st.integers(0, 54), max_size=6),
    layer=st.sampled_from(list(LAYERS)),
    layout=st.sampled_from(LAYOUTS),
    method=st.sampled_from(["auto", *METHODS]),
    chunk_size=st.sampled_from([1, 2, 8, 64]),
)
def test_random_splits_and_documents(lengths, cuts, layer, layout, method, chunk_size) -> None:
    total = sum(lengths)
    bounds = None if cuts is None else tuple(sorted([0, *(min(cut, total) for cut in cuts), total]))
    check(layer, Case(tuple(lengths), bounds), layout, method, chunk_size=chunk_size)


@pytest.mark.parametrize("layer", LAYERS)
def test_fp32(layer: str) -> None:
    check(layer, cases(5)["uneven"], "zigzag", "doubling", dtype=torch.float32, tolerance=3e-5)
