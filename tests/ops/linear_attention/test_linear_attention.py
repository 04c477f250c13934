"""The distributed operation against the token-by-token recurrence: outputs, final states and every gradient."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import EVERY_LAYOUT, runs_of
from recurrence import reference
from torch import Tensor
from worlds import every, virtual_world

import weft
from weft.ops.scan import METHODS
from weft.ops.sequence.layout import LAYOUTS

DECAYS = ("none", "constant", "scalar", "vector")
BATCH, HEADS, VALUE_HEADS, KEYS, VALUES = 2, 1, 2, 3, 2
pytestmark = pytest.mark.usefixtures("every_network")


@dataclass(frozen=True)
class Case:
    """What the ranks hold, and the documents if it is packed."""

    lengths: tuple[int, ...]
    bounds: tuple[int, ...] | None = None

    @property
    def total(self) -> int:
        return sum(self.lengths)

    @property
    def states(self) -> int:
        return BATCH if self.bounds is None else len(self.bounds) - 1


def cases(size: int) -> dict[str, Case]:
    uneven = tuple((3 * rank + 2) % 7 + 1 for rank in range(size))
    missing = tuple(0 if rank == size // 2 else 4 + rank % 3 for rank in range(size)) if size > 1 else (0,)
    packed = tuple((5 * rank + 3) % 8 for rank in range(size))
    total = sum(packed)
    # A long document, an empty one, short ones, one that ends with a rank, an empty one at the end.
    inner = sorted({min(total, cut) for cut in (0, total // 2, total // 2 + 1, packed[0], total - 1 if total else 0)})
    bounds = tuple(sorted([*inner, total // 2, total, total]))
    return {
        "even": Case((6,) * size),
        "uneven": Case(uneven),
        "missing": Case(missing),
        "packed": Case(packed, bounds),
        "one document": Case(packed, (0, total)),
    }


def slice_of(x: Tensor, case: Case, layout: str, rank: int) -> Tensor:
    runs = [run for run in runs_of(case.lengths, layout, case.bounds) if run.rank == rank]
    return torch.cat([x.detach()[:, run.offset : run.offset + run.length] for run in runs], dim=1)


@functools.lru_cache(maxsize=32)
def problem(decay: str, case: Case, size: int, strength: float = 0.02):
    """Inputs, weights of the loss, and what autograd says of the recurrence on the whole sequence."""
    make = torch.Generator().manual_seed(len(decay) + case.total)
    batch = BATCH if case.bounds is None else 1

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=make, dtype=torch.float64)

    q, k = draw(batch, case.total, HEADS, KEYS), draw(batch, case.total, HEADS, KEYS)
    v = draw(batch, case.total, VALUE_HEADS, VALUES)
    shape = {"constant": (VALUE_HEADS,), "scalar": (batch, case.total, HEADS), "vector": (*v.shape[:3], KEYS)}
    g = None if decay == "none" else -strength * draw(*shape[decay]).abs()
    start = draw(case.states, VALUE_HEADS, KEYS, VALUES)
    leaves = {
        name: x.requires_grad_()
        for name, x in zip(("q", "k", "v", "g", "start"), (q, k, v, g, start), strict=True)
        if x is not None
    }
    lengths = [case.total] if case.bounds is None else [b - a for a, b in pairwise(case.bounds)]
    o, final = reference(q, k, v, g, 0.7, start, lengths)
    weight, final_weights = draw(*o.shape), [draw(*final.shape) for _ in range(size)]
    loss = (o * weight).sum() + (final * sum(final_weights)).sum()
    grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()), allow_unused=True), strict=True))
    grads = {name: torch.zeros_like(leaves[name]) if grad is None else grad for name, grad in grads.items()}
    return leaves, weight, final_weights, o.detach(), final.detach(), grads


def worst(pairs: list[tuple[Tensor, Tensor]]) -> float:
    error = 0.0
    for got, wanted in pairs:
        assert got.shape == wanted.shape and got.isfinite().all()
        if got.numel():
            error = max(error, ((got - wanted).abs().max() / wanted.abs().max().clamp(min=1)).item())
    return error


def check(decay: str, case: Case, layout: str, method: str, tolerance: float = 1e-10, strength: float = 0.02,
          dtype: torch.dtype = torch.float64, chunk_size: int = 4) -> None:  # fmt: skip
    size = len(case.lengths)
    leaves, weight, final_weights, o, final, grads = problem(decay, case, size, strength)
    whole = {"start"} | ({"g"} if decay == "constant" else set())

    def program(axis: weft.Axis):
        def mine(x: Tensor) -> Tensor:
            return slice_of(x, case, layout, axis.rank)

        local = {name: (x.detach().clone() if name in whole else mine(x)).to(dtype).requires_grad_()
                 for name, x in leaves.items()}  # fmt: skip
        out, end = weft.linear_attention(
            local["q"], local["k"], local["v"], local.get("g"), scale=0.7, initial_state=local["start"],
            output_final_state=True, cu_seqlens=None if case.bounds is None else torch.tensor(case.bounds),
            layout=layout, group=axis, method=method, chunk_size=chunk_size,
        )  # fmt: skip
        assert out.dtype == dtype and end.dtype == torch.promote_types(dtype, torch.float32)
        loss = (out * mine(weight)).sum() + (end * final_weights[axis.rank]).sum()
        got = dict(zip(local, torch.autograd.grad(loss, list(local.values())), strict=True))
        pairs = [(out.detach(), mine(o)), (end.detach(), final)]
        pairs += [(got[name], mine(grads[name])) for name in got if name not in whole]
        return worst([(a.double(), b.double()) for a, b in pairs]), {name: got[name].double() for name in whole}

    results = virtual_world(size).run(program).results
    assert max(error for error, _ in results) <= tolerance
    for name in whole:
        assert worst([(sum(shares[name] for _, shares in results), grads[name])]) <= tolerance, name
    # The gradient of an initial state is on the rank where its document begins, and nowhere else.
    held = torch.stack([shares["start"].flatten(1).abs().sum(1) > 0 for _, shares in results])
    assert (held.sum(0) <= 1).all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layout", EVERY_LAYOUT)
@pytest.mark.parametrize("decay", DECAYS)
def test_every_case_and_world_size(decay: str, layout: str, method: str) -> None:
    for case in every([case for size in (1, 2, 3, 4, 8) for case in cases(size).values()]):
        check(decay, case, layout, method)


@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    cuts=st.none() | st.lists(st.integers(0, 54), max_size=6),
    decay=st.sampled_from(DECAYS),
    layout=st.sampled_from(LAYOUTS),
    method=st.sampled_from(["auto", *METHODS]),
    chunk_size=st.sampled_from([1, 2, 8, 64]),
)
def test_random_splits_and_documents(lengths, cuts, decay, layout, method, chunk_size) -> None:
    total = sum(lengths)
    bounds = None if cuts is None else tuple(sorted([0, *(min(cut, total) for cut in cuts), total]))
    check(decay, Case(tuple(lengths), bounds), layout, method, chunk_size=chunk_size)


@pytest.mark.parametrize("layout", EVERY_LAYOUT)
@pytest.mark.parametrize("decay", DECAYS)
def test_fp32_and_slow_decay_over_many_ranks(decay: str, layout: str) -> None:
    check(decay, Case((9,) * 24), layout, "doubling", tolerance=2e-5, strength=1e-4, dtype=torch.float32)
    check(decay, Case((5, 0, 9, 2) * 4), layout, "transpose", tolerance=2e-5, strength=1e-4, dtype=torch.float32)


@pytest.mark.parametrize("strength", [50.0, float("inf")])
@pytest.mark.parametrize("decay", DECAYS[1:])
def test_strong_gates_give_no_nan(decay: str, strength: float) -> None:
    check(decay, cases(3)["uneven"], "zigzag", "tree", strength=strength)
    check(decay, cases(3)["packed"], "contiguous", "pipeline", strength=strength)


def test_bf16_is_as_good_as_in_one_process() -> None:
    case, alone = Case((16,) * 8), Case((128,))
    leaves, *_ = problem("scalar", alone, 1)
    inputs = {name: leaves[name].detach().bfloat16() for name in ("q", "k", "v", "g")}
    exact = reference(*(inputs[n].double() for n in ("q", "k", "v", "g")), 0.7, None, [128])[0]
    single = weft.linear_attention(*inputs.values(), scale=0.7)[0]
    run = virtual_world(8).run(
        lambda axis: weft.linear_attention(
            *(slice_of(x, case, "contiguous", axis.rank) for x in inputs.values()), scale=0.7, group=axis
        )[0]
    )
    together = torch.cat(run.results, dim=1)
    assert together.dtype == torch.bfloat16
    assert (together - exact).abs().max() <= 1.05 * (single - exact).abs().max()


def test_packed_costs_no_more_than_dense_and_nothing_between_documents() -> None:
    size = 4

    def sent(bounds: tuple[int, ...] | None, method: str) -> list[int]:
        def program(axis: weft.Axis) -> int:
            q = torch.randn(1, 8, 2, 4, requires_grad=True)
            sequence = weft.sequence(8, cu_seqlens=bounds, group=axis)  # the one exchange of lengths of a batch
            with weft.record() as ledger:
                weft.linear_attention(q, q, q, method=method, sequence=sequence)[0].sum().backward()
            return ledger.bytes_sent

        return virtual_world(size).run(program).results

    for method in METHODS:
        dense = sent(None, method)
        assert sum(sent((0, 32), method)) == sum(dense) > 0
        assert sum(sent((0, 5, 20, 32), method)) <= sum(dense)
        assert sent((0, 8, 16, 24, 32), method) == [0, 0, 0, 0]
        first, *inner, last = sent((0, 8, 20, 24, 32), method)  # one document spans two ranks
        assert first == last == 0 < min(inner)


def test_one_exchange_each_way_and_it_starts_before_the_intra_chunk_work() -> None:
    """On a machine where the scan takes less than the local work, it adds nothing to the elapsed time."""

    def program(axis: weft.Axis) -> None:
        q = torch.empty(1, 512, 4, 32, device="meta").requires_grad_()
        g = torch.empty(1, 512, 4, device="meta").requires_grad_()
        o, _ = weft.linear_attention(q, q, q, g, group=axis, method="doubling")
        o.backward(torch.empty_like(o))

    local = weft.world.VirtualWorld(8, weft.world.Machine(0.0, float("inf"), flops=1e9)).run(program).elapsed
    free = weft.world.VirtualWorld(8, weft.world.Machine(local / 100, float("inf"), flops=1e9)).run(program)
    assert free.elapsed == pytest.approx(local, rel=1e-9)
    alone = weft.world.VirtualWorld(1, weft.world.Machine(0.0, float("inf"), flops=1e9)).run(program).elapsed
    assert local <= 1.01 * alone


@pytest.mark.parametrize("decay", DECAYS)
def test_gradcheck(decay: str) -> None:
    leaves, *_ = problem(decay, Case((6,)), 1)
    names = [name for name in ("q", "k", "v", "g", "start") if name in leaves]

    def run(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        given = dict(zip(names, tensors, strict=True))
        g = given.get("g")
        return weft.linear_attention(
            given["q"], given["k"], given["v"], None if g is None else -g.abs(), initial_state=given["start"],
            output_final_state=True, chunk_size=2,
        )  # fmt: skip

    inputs = [leaves[name].detach().clone().requires_grad_() for name in names]
    assert torch.autograd.gradcheck(run, inputs)


class InAWorld(torch.autograd.Function):
    """The whole sequence through a virtual world of 3, as one function for gradcheck."""

    CASE = Case((2, 1, 2))

    @staticmethod
    def program(layout: str, tensors: tuple[Tensor, ...], grad: Tensor | None):
        def run(axis: weft.Axis):
            local = [slice_of(x, InAWorld.CASE, layout, axis.rank).requires_grad_() for x in tensors]
            with torch.enable_grad():
                out, _ = weft.linear_attention(*local, layout=layout, group=axis, chunk_size=2)
                if grad is None:
                    return out.detach()
                return torch.autograd.grad(out, local, slice_of(grad, InAWorld.CASE, layout, axis.rank))

        return virtual_world(3).run(run).results

    @staticmethod
    def whole(slices, layout: str) -> Tensor:
        runs = runs_of(InAWorld.CASE.lengths, layout)
        return torch.cat([slices[run.rank][:, run.start : run.start + run.length] for run in runs], dim=1)

    @staticmethod
    def forward(ctx, layout: str, *tensors: Tensor) -> Tensor:
        ctx.layout = layout
        ctx.save_for_backward(*tensors)
        return InAWorld.whole(InAWorld.program(layout, tensors, None), layout)

    @staticmethod
    def backward(ctx, grad: Tensor):
        results = InAWorld.program(ctx.layout, ctx.saved_tensors, grad)
        return None, *(InAWorld.whole([r[i] for r in results], ctx.layout) for i in range(len(ctx.saved_tensors)))


@pytest.mark.parametrize("layout", EVERY_LAYOUT)
def test_gradcheck_in_a_virtual_world(layout: str, every_network: str) -> None:
    leaves, *_ = problem("scalar", Case((5,)), 1)
    inputs = [leaves[name].detach()[:1].clone().requires_grad_() for name in ("q", "k", "v", "g")]
    fast = every_network != "ideal"  # there a program runs twice
    assert torch.autograd.gradcheck(lambda *t: InAWorld.apply(layout, *t[:3], -t[3].abs()), inputs, fast_mode=fast)


def test_activation_checkpointing_changes_nothing() -> None:
    from torch.utils.checkpoint import checkpoint

    leaves, *_ = problem("scalar", Case((16,) * 3), 3)

    def program(axis: weft.Axis) -> bool:
        names = ("q", "k", "v", "g")
        grads = []
        for wrapped in (False, True):
            local = [slice_of(leaves[n], Case((16,) * 3), "contiguous", axis.rank).requires_grad_() for n in names]
            run = lambda *t: weft.linear_attention(*t, group=axis)[0].square().sum()  # noqa: E731
            loss = checkpoint(run, *local, use_reentrant=False) if wrapped else run(*local)
            grads.append(torch.autograd.grad(loss, local))
        return all(torch.equal(a, b) for a, b in zip(*grads, strict=True))

    assert all(virtual_world(3).run(program).results)


def test_compile_changes_nothing() -> None:
    leaves, *_ = problem("scalar", Case((20,)), 1)
    inputs = [leaves[name].detach().float() for name in ("q", "k", "v", "g")]

    def model(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        return weft.linear_attention(torch.sin(q), k, v, g)[0].square().sum()

    grads = []
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        local = [x.clone().requires_grad_() for x in inputs]
        loss = run(*local)
        grads.append((loss.detach(), *torch.autograd.grad(loss, local)))
    assert all(torch.allclose(a, b, rtol=1e-6, atol=1e-6) for a, b in zip(*grads, strict=True))


def test_gradients_of_inputs_that_do_not_ask_for_them_are_left_out() -> None:
    q = torch.randn(1, 4, 1, 2, requires_grad=True)
    o, state = weft.linear_attention(q, q.detach(), q.detach(), output_final_state=True)
    state.sum().backward()
    assert q.grad is not None and q.grad.abs().sum() == 0 and o.shape == (1, 4, 1, 2)
