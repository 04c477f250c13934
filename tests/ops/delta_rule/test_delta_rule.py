"""The delta rule over ranks against the token-by-token recurrence: outputs, final states and every gradient."""

from __future__ import annotations

import functools
import threading
from itertools import pairwise

import pytest
import torch
from delta_recurrence import delta_reference
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import EVERY_LAYOUT
from test_linear_attention import BATCH, HEADS, KEYS, VALUE_HEADS, VALUES, Case, cases, slice_of, worst
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from worlds import every, virtual_world

import weft
from weft.ops.delta_rule.chunk import ChunkForward, ChunkStates, TileTokens
from weft.ops.scan import METHODS
from weft.ops.sequence.layout import LAYOUTS

GATES = ("none", "scalar", "vector")
NAMES = ("q", "k", "v", "beta", "g", "start")
pytestmark = pytest.mark.usefixtures("every_network")


@functools.lru_cache(maxsize=32)
def problem(gate: str, case: Case, size: int, strength: float = 0.02, alike: bool = False, has_final: bool = True):
    """Inputs, weights of the loss, and what autograd says of the recurrence on the whole sequence.

    Keys have length 1 and beta goes up to 2; ``alike``: keys are the same for all tokens; ``has_final``: final states
    are part of the loss.
    """
    make = torch.Generator().manual_seed(len(gate) + case.total)
    batch = BATCH if case.bounds is None else 1

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=make, dtype=torch.float64)

    q, k = (draw(batch, case.total, HEADS, KEYS) for _ in range(2))
    if alike:
        k = draw(1, 1, HEADS, KEYS).expand_as(k).clone()
    k = torch.nn.functional.normalize(k, dim=-1)
    v = draw(batch, case.total, VALUE_HEADS, VALUES)
    beta = 2 * draw(*v.shape[:3]).sigmoid()
    shape = {"scalar": v.shape[:3], "vector": (*v.shape[:3], KEYS)}
    g = None if gate == "none" else -strength * draw(*shape[gate]).abs()
    start = draw(case.states, VALUE_HEADS, KEYS, VALUES)
    given = zip(NAMES, (q, k, v, beta, g, start), strict=True)
    leaves = {name: x.requires_grad_() for name, x in given if x is not None}
    lengths = [case.total] if case.bounds is None else [b - a for a, b in pairwise(case.bounds)]
    o, final = delta_reference(q, k, v, beta, g, 0.7, start, lengths)
    weight, final_weights = draw(*o.shape), [draw(*final.shape) * has_final for _ in range(size)]
    loss = (o * weight).sum() + (final * sum(final_weights)).sum()
    grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()), allow_unused=True), strict=True))
    grads = {name: torch.zeros_like(leaves[name]) if grad is None else grad for name, grad in grads.items()}
    return leaves, weight, final_weights, o.detach(), final.detach(), grads


def check(gate: str, case: Case, layout: str, method: str, tolerance: float = 1e-10, strength: float = 0.02,
          dtype: torch.dtype = torch.float64, chunk_size: int = 4, alike: bool = False,
          has_final: bool = True, has_sequence: bool = False) -> None:  # fmt: skip
    size = len(case.lengths)
    leaves, weight, final_weights, o, final, grads = problem(gate, case, size, strength, alike, has_final)
    bounds = None if case.bounds is None else torch.tensor(case.bounds)

    def program(axis: weft.Axis):
        def mine(x: Tensor) -> Tensor:
            return slice_of(x, case, layout, axis.rank)

        local = {name: (x.detach().clone() if name == "start" else mine(x)).to(dtype).requires_grad_()
                 for name, x in leaves.items()}  # fmt: skip
        where = {"layout": layout, "cu_seqlens": bounds, "group": axis}
        if has_sequence:
            where = {"sequence": weft.sequence(len(local["q"][0]), **where)}
        out, end = weft.delta_rule(
            local["q"], local["k"], local["v"], local["beta"], local.get("g"), scale=0.7, **where, method=method,
            initial_state=local["start"], output_final_state=has_final, chunk_size=chunk_size,
        )  # fmt: skip
        assert out.dtype == dtype and (end is not None) == has_final
        loss, pairs = (out * mine(weight)).sum(), [(out.detach(), mine(o))]
        if end is not None:
            assert end.dtype == torch.promote_types(dtype, torch.float32)
            loss = loss + (end * final_weights[axis.rank]).sum()
            pairs.append((end.detach(), final))
        got = dict(zip(local, torch.autograd.grad(loss, list(local.values())), strict=True))
        pairs += [(got[name], mine(grads[name])) for name in got if name != "start"]
        return worst([(a.double(), b.double()) for a, b in pairs]), got["start"].double()

    results = virtual_world(size).run(program).results
    assert max(error for error, _ in results) <= tolerance
    assert worst([(sum(start for _, start in results), grads["start"])]) <= tolerance
    # The gradient of an initial state is on the rank where its document begins, and nowhere else.
    held = torch.stack([start.flatten(1).abs().sum(1) > 0 for _, start in results])
    assert (held.sum(0) <= 1).all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layout", EVERY_LAYOUT)
@pytest.mark.parametrize("gate", GATES)
def test_every_case_and_world_size(gate: str, layout: str, method: str) -> None:
    for case in every([case for size in (1, 2, 3, 5, 8) for case in cases(size).values()]):
        check(gate, case, layout, method)


@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    cuts=st.none() | st.lists(st.integers(0, 54), max_size=6),
    gate=st.sampled_from(GATES),
    layout=st.sampled_from(LAYOUTS),
    method=st.sampled_from(["auto", *METHODS]),
    chunk_size=st.sampled_from([1, 2, 8, 64]),
)
def test_random_splits_and_documents(lengths, cuts, gate, layout, method, chunk_size) -> None:
    total = sum(lengths)
    bounds = None if cuts is None else tuple(sorted([0, *(min(cut, total) for cut in cuts), total]))
    check(gate, Case(tuple(lengths), bounds), layout, method, chunk_size=chunk_size)


@pytest.mark.parametrize("layout", EVERY_LAYOUT)
@pytest.mark.parametrize("gate", GATES)
def test_fp32_and_slow_decay_over_many_ranks(gate: str, layout: str) -> None:
    check(gate, Case((9,) * 16), layout, "doubling", tolerance=3e-5, strength=1e-4, dtype=torch.float32)


@pytest.mark.parametrize("strength", [50.0, float("inf")])
@pytest.mark.parametrize("gate", GATES[1:])
def test_strong_gates_give_no_nan(gate: str, strength: float) -> None:
    check(gate, cases(3)["uneven"], "zigzag", "tree", strength=strength)
    check(gate, cases(3)["packed"], "contiguous", "pipeline", strength=strength)


@pytest.mark.parametrize("gate", GATES)
def test_keys_that_are_all_alike(gate: str) -> None:
    """With beta up to 2: a series of powers of the triangle would lose every digit here."""
    check(gate, Case((40, 30, 26)), "contiguous", "gather", chunk_size=64, alike=True)
    check(gate, Case((40, 30, 26)), "contiguous", "doubling", tolerance=3e-4, chunk_size=64, alike=True,
          dtype=torch.float32)  # fmt: skip


def test_the_exchange_runs_under_the_local_work() -> None:
    """On a machine where the scan takes less than the work beside it, it adds nothing to the elapsed time."""

    def program(axis: weft.Axis) -> None:
        q = torch.empty(1, 512, 4, 32, device="meta").requires_grad_()
        beta = torch.empty(1, 512, 4, device="meta").requires_grad_()
        o, _ = weft.delta_rule(q, q, q, beta, beta, group=axis, method="doubling")
        o.backward(torch.empty_like(o))

    local = weft.world.VirtualWorld(8, weft.world.Machine(0.0, float("inf"), flops=1e9)).run(program).elapsed
    free = weft.world.VirtualWorld(8, weft.world.Machine(local / 100, float("inf"), flops=1e9)).run(program)
    assert free.elapsed == pytest.approx(local, rel=1e-9)


@pytest.mark.parametrize("gate", GATES)
def test_no_decay_is_of_a_positive_power_and_nothing_divides(gate: str) -> None:
    """In the forward and the backward; gates of -320 and -inf among mild ones."""

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func.overloadpacket.__name__
            seen.add(name)
            if name in ("exp", "exp_", "exp2", "exp2_"):
                assert args[0].max() <= 0, name
            assert not name.startswith(("div", "reciprocal")), name
            return func(*args, **(kwargs or {}))

    seen: set[str] = set()
    make = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 40, 2, 4, generator=make) for _ in range(3))
    g = -torch.rand((1, 40, 2, 4)[: 3 if gate == "scalar" else 4], generator=make)
    g[:, 7], g[:, 9] = -320.0, -torch.inf
    beta = torch.rand(1, 40, 2, generator=make)
    leaves = [x.requires_grad_() for x in (q, k, v, beta, *([] if gate == "none" else [g]))]
    weight = torch.randn(v.shape, generator=make)
    with Watch():
        o, _ = weft.delta_rule(*leaves, scale=0.5, chunk_size=16)
        grads = torch.autograd.grad(o, leaves, weight)
    assert all(grad.isfinite().all() for grad in grads)
    assert bool(seen & {"exp2", "exp2_"}) == (gate != "none") and "linalg_solve_triangular" in seen


def test_local_work_is_done_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank solves its chunks and goes through its recurrence before it waits, and not again after the exchange."""
    steps: list[tuple[int, str]] = []

    def note(kind: type, name: str) -> None:
        work = getattr(kind, name)

        def noted(self, *args):
            steps.append((threading.get_ident(), name))
            return work(self, *args)

        monkeypatch.setattr(kind, name, noted)

    for kind, name in (
        (TileTokens, "solve"), (ChunkStates, "advance"), (ChunkForward, "intra"), (ChunkForward, "finish")
    ):  # fmt: skip
        note(kind, name)

    def program(axis: weft.Axis) -> list[str]:
        q, beta = torch.randn(1, 9, 2, 4), torch.rand(1, 9, 2)
        weft.delta_rule(q, q, q, beta, group=axis, method="doubling")
        return [name for thread, name in steps if thread == threading.get_ident()]

    found = weft.world.VirtualWorld(3).run(program).results
    assert found[0] == ["solve", "advance", "intra", "finish"]
    assert found[1] == found[2] == ["solve", "advance", "advance", "intra", "finish"]  # and the columns of its map
