"""The distributed operation against plain softmax on the whole sequence: outputs, lse and every gradient."""

from __future__ import annotations

import itertools
import os
import zlib
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import EVERY_LAYOUT
from test_attention_reference import Case, distance, plain, problem, slice_of
from torch import Tensor
from worlds import current_rules, every, virtual_world

import weft
from weft.comm.wire import Pending
from weft.ops.attention import attention, gather, kv_exchange, plan
from weft.ops.attention.distributed import METHODS
from weft.ops.sequence.layout import ANY_LENGTHS, LAYOUTS
from weft.world.virtual_wire import VirtualWire

NAMES = ("out", "lse", "dq", "dk", "dv")
pytestmark = pytest.mark.usefixtures("every_network")


def lengths_of(kind: str, size: int) -> tuple[int, ...]:
    if kind == "even":
        return (4,) * size
    if kind == "uneven":
        return tuple((3 * rank + 2) % 7 + 1 for rank in range(size))
    return tuple(0 if rank == size // 2 else 3 + rank % 3 for rank in range(size))  # one rank has nothing


def bounds_of(total: int) -> tuple[int, ...]:
    """A long document, an empty one, one of a single token, and the rest."""
    cuts = sorted({min(total, cut) for cut in (0, total // 2, total // 2 + 1, total)})
    return tuple(sorted([*cuts, total // 2]))


def run(
    axis: weft.Axis, case: Case, lengths: tuple[int, ...], layout: str, dtype: torch.dtype, **options: object
) -> dict[str, Tensor]:
    q, k, v, grad = (slice_of(x, lengths, layout, axis.rank, case.bounds).to(dtype) for x in problem(case)[0])
    leaves = [x.requires_grad_() for x in (q, k, v)]
    where = {} if "sequence" in options else {"layout": layout, "group": axis}
    options = {**case.options, **where, **options}
    if "sequence" in options:
        del options["cu_seqlens"]
    out, lse = attention(*leaves, return_lse=True, **options)
    grads = torch.autograd.grad(out, leaves, grad)
    assert out.dtype == dtype and all(g.dtype == dtype for g in grads) and lse.requires_grad
    return dict(zip(NAMES, (out.detach(), lse.detach(), *grads), strict=True))


def faults(
    axis: weft.Axis,
    case: Case,
    lengths: tuple[int, ...],
    layout: str,
    dtype: torch.dtype = torch.float64,
    **options: object,
) -> list[str]:
    """What is wrong on this rank, in words."""
    limit = 1e-10 if dtype == torch.float64 else 2e-5
    got = run(axis, case, lengths, layout, dtype, **options)
    wanted = dict(zip(NAMES, problem(case)[1], strict=True))
    true = {name: slice_of(wanted[name], lengths, layout, axis.rank, case.bounds) for name in NAMES}
    found = {name: distance(got[name], true[name]) for name in NAMES}
    worst = {name: far for name, far in found.items() if far > limit}
    return [f"{case} {lengths} {layout} {options} rank {axis.rank}: {worst}"] if worst else []


def combinations(size: int, kind: str, method: str) -> Iterator[Case]:
    lengths = lengths_of(kind, size)
    total = sum(lengths)
    kinds = (
        [(2, 2), (4, 2), (2, 1)] if method != "ulysses" else [(size, size), (2 * size, size)]
    )  # uneven: test_ulysses
    for (heads, kv_heads), causal, windowed, packed in itertools.product(kinds, (False, True), (False, True), (0, 1)):
        window = ((3, -1) if causal else (2, 3)) if windowed else None
        bounds = bounds_of(total) if packed else None
        yield Case(total, heads, kv_heads, 2 if size < 4 else 1, causal, window, bounds)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, pytest.param(5, marks=pytest.mark.slow), 8])
def test_every_combination(size: int, method: str) -> None:
    splits = [*itertools.product(("even", "uneven", "missing"), ANY_LENGTHS), ("uneven", "balanced")]
    if size == 8 and "WEFT_SOAK" not in os.environ:
        splits = [("even", "zigzag"), ("uneven", "contiguous"), ("missing", "zigzag")]
    for kind, layout in splits:
        lengths = lengths_of(kind, size)

        def program(axis: weft.Axis) -> list[str]:
            return [
                fault
                for case in every(combinations(size, kind, method))  # noqa: B023
                for fault in faults(axis, case, lengths, layout, method=method)  # noqa: B023
            ]

        found = [fault for rank in virtual_world(size).run(program).results for fault in rank]
        assert not found, "\n".join(found[:5])


@pytest.mark.parametrize("method", METHODS)
def test_single_precision(method: str) -> None:
    size = 4
    for kind, layout in (*itertools.product(("even", "missing"), ANY_LENGTHS), ("missing", "balanced")):
        lengths = lengths_of(kind, size)

        def program(axis: weft.Axis) -> list[str]:
            return [
                fault
                for case in list(combinations(size, kind, method))[:8]  # noqa: B023
                for fault in faults(axis, case, lengths, layout, torch.float32, method=method)  # noqa: B023
            ]

        found = [fault for rank in virtual_world(size).run(program).results for fault in rank]
        assert not found, "\n".join(found[:5])


@st.composite
def drawn(draw: st.DrawFn) -> tuple[Case, tuple[int, ...], str, dict[str, object]]:
    size = draw(st.integers(1, 6))
    lengths = tuple(draw(st.lists(st.integers(0, 9), min_size=size, max_size=size)))
    total = sum(lengths)
    method = draw(st.sampled_from(["auto", *METHODS]))
    kv_heads = draw(st.integers(1, 12 if method == "ulysses" else 5))
    heads = kv_heads * draw(st.integers(1, 3))
    bounds = None
    if draw(st.booleans()):
        cuts = draw(st.lists(st.integers(0, total), max_size=5))
        bounds = (0, *sorted(cuts), total)
    window = draw(st.none() | st.tuples(st.integers(-1, 8), st.integers(-1, 8)))
    options: dict[str, object] = {"method": method}
    if method in ("gather", "auto"):
        options["strides"] = draw(st.none() | composition(kv_heads))
        options["backward"] = draw(st.sampled_from([None, "ring"]))
        if options["backward"] is None:
            options["backward_strides"] = draw(st.none() | composition(kv_heads))
    case = Case(total, heads, kv_heads, draw(st.integers(1, 2)), draw(st.booleans()), window, bounds)
    return case, lengths, draw(st.sampled_from(LAYOUTS)), options


@st.composite
def composition(draw: st.DrawFn, whole: int) -> tuple[int, ...]:
    steps: list[int] = []
    while sum(steps) < whole:
        steps.append(draw(st.integers(1, whole - sum(steps))))
    return tuple(steps)


@pytest.fixture(params=["usual tiles", "tiles of 3"], scope="module")
def tiles(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tiles are for windows over long sequences; small ones bring their borders into short sequences."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "tiles of 3":
            patch.setattr(plan, "SMALLEST_TILE", 1)
            patch.setattr(plan, "LARGEST_TILE", 3)
            plan.plan_attention.cache_clear()
        yield
    plan.plan_attention.cache_clear()


@pytest.mark.usefixtures("tiles")
@settings(max_examples=40)
@given(drawn())
def test_drawn_combinations(drawn: tuple[Case, tuple[int, ...], str, dict[str, object]]) -> None:
    if current_rules() == "sim" and "WEFT_SOAK" not in os.environ and zlib.crc32(repr(drawn).encode()) % 4:
        return  # an operator there costs a hundred times as much: `make test` takes a quarter of them
    case, lengths, layout, options = drawn
    results = virtual_world(len(lengths)).run(lambda axis: faults(axis, case, lengths, layout, **options)).results
    assert not any(results), results


@pytest.mark.parametrize("layout", EVERY_LAYOUT)
def test_every_composition_of_six_heads(layout: str) -> None:
    lengths, heads = (3, 5, 0, 4), 6
    case = Case(sum(lengths), heads, heads, 1, causal=True)
    cuts = [c for n in range(heads) for c in itertools.combinations(range(1, heads), n)]
    patterns = [tuple(b - a for a, b in itertools.pairwise((0, *cut, heads))) for cut in cuts]
    assert len(patterns) == 32 and all(sum(pattern) == heads for pattern in patterns)

    def program(axis: weft.Axis) -> list[str]:
        return [
            fault
            for strides, backward in every(zip(patterns, reversed(patterns), strict=True))
            for fault in faults(
                axis, case, lengths, layout, method="gather", strides=strides, backward_strides=backward
            )
        ]  # fmt: skip

    assert not any(virtual_world(4).run(program).results)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("causal", "window"), [(True, (40, 0)), (False, (30, 50)), (False, (0, 200)), (True, (300, -1))]
)
def test_windows_over_many_tiles(method: str, causal: bool, window: tuple[int, int]) -> None:
    """Long enough that queries are cut into tiles, with full, banded and fully masked parts."""
    lengths = (300, 211)
    case = Case(sum(lengths), 2, 2, 1, causal, window)
    for layout in LAYOUTS:
        run = virtual_world(2).run(lambda axis: faults(axis, case, lengths, layout, method=method))  # noqa: B023
        assert not any(run.results), run.results


LONG = (150,) * 4, (0, 260, 270, 560, 600)  # a balanced deal of these documents brings keys out of order


@pytest.mark.parametrize("causal", [False, True])
def test_keys_that_arrive_out_of_order(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, bounds = LONG
    case, rearranged = Case(sum(lengths), 8, 4, 1, causal, None, bounds), []

    def rearrange(*args: object) -> Tensor:
        rearranged.append(args)
        return kv_exchange.rearrange(*args)

    monkeypatch.setattr(gather, "rearrange", rearrange)
    found = virtual_world(4).run(lambda axis: faults(axis, case, lengths, "balanced", method="gather")).results
    assert not any(found), found
    assert rearranged


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wire", ["default", "half"])
def test_half_precision_is_as_good_as_one_process(
    method: str, dtype: torch.dtype, wire: str, every_network: str
) -> None:
    """At 8 ranks, against the kernel of SDPA on the whole: at most 1.2 times its error (root of mean square).

    A device's operator gives each block's result in half precision, and their sum is rounded again: two roundings, as
    large as each other, where one process has one.
    """
    bound = 2**0.5 if every_network == "sim" else 1.2
    case, lengths = Case(256, 8, 8, 1, causal=True, dim=16), (32,) * 8
    (q, k, v, grad), _ = problem(case)
    grad_dtype = None if wire == "default" else dtype
    exact = [x.to(dtype).double().requires_grad_() for x in (q, k, v)]
    out, _ = plain(*exact, case)
    true = [out.detach(), *torch.autograd.grad(out, exact, grad.to(dtype).double())]
    local = [x.to(dtype).requires_grad_() for x in (q, k, v)]
    flash = torch.nn.functional.scaled_dot_product_attention
    one = flash(*(x.transpose(1, 2) for x in local), is_causal=True, scale=0.7).transpose(1, 2)
    single = [one.detach(), *torch.autograd.grad(one, local, grad.to(dtype))]
    for layout in LAYOUTS:

        def program(axis: weft.Axis) -> list[Tensor]:
            got = run(axis, case, lengths, layout, dtype, method=method, grad_dtype=grad_dtype)  # noqa: B023
            assert got["lse"].dtype == torch.float32
            whole = [got[name] for name in NAMES if name != "lse"]
            return [weft.unshard(x, 1, layout=layout, group=axis) for x in whole]  # noqa: B023

        for got, by_one, exactly in zip(virtual_world(8).run(program).results[0], single, true, strict=True):
            far, near = ((x.double() - exactly).square().mean().sqrt().item() for x in (got, by_one))
            assert far <= bound * near, (layout, far / near)


@pytest.mark.parametrize("method", METHODS)
def test_gradients_are_no_aliases(method: str) -> None:
    def program(axis: weft.Axis) -> bool:
        q, k, v = (torch.randn(1, 3, 2, 4, requires_grad=True) for _ in range(3))
        out = attention(q, k, v, causal=False, method=method, group=axis)
        upstream = torch.ones_like(out)
        grads = torch.autograd.grad(out, (q, k, v), upstream)
        memories = {x.untyped_storage().data_ptr() for x in (q, k, v, out, upstream)}
        return all(g.untyped_storage().data_ptr() not in memories for g in grads)

    for size in (1, 2):
        assert all(virtual_world(size).run(program).results)


@pytest.mark.parametrize("method", METHODS)
def test_same_inputs_same_bits(method: str) -> None:
    case, lengths = Case(26, 8, 4, 2, causal=True), (5, 9, 7, 5)

    def program(axis: weft.Axis) -> bool:
        first, second = (run(axis, case, lengths, "zigzag", torch.float32, method=method) for _ in range(2))
        return all(torch.equal(first[name], second[name]) for name in NAMES)

    assert all(virtual_world(4).run(program).results)


@pytest.mark.parametrize("method", METHODS)
def test_activation_checkpointing(method: str) -> None:
    from torch.utils.checkpoint import checkpoint

    case, lengths = Case(20, 6, 3, 2, causal=True), (7, 6, 7)

    def program(axis: weft.Axis) -> bool:
        outcomes = []
        for wrap in (False, True):
            local = [slice_of(x, lengths, "zigzag", axis.rank).requires_grad_() for x in problem(case)[0][:3]]

            def layer(*tensors: Tensor) -> Tensor:
                return attention(*tensors, causal=True, layout="zigzag", method=method, group=axis)

            out = checkpoint(layer, *local, use_reentrant=False) if wrap else layer(*local)
            outcomes.append((out.detach(), *torch.autograd.grad(out.square().sum(), local)))
        return all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))

    assert all(virtual_world(3).run(program).results)


@pytest.mark.parametrize("method", METHODS)
def test_strided_inputs_and_an_expanded_gradient(method: str) -> None:
    """Vectors whose elements are not neighbours, for which the CPU operator alone gives garbage."""
    case, lengths = Case(12, 4, 2, 2, causal=True), (7, 5)

    def program(axis: weft.Axis) -> float:
        outcomes = []
        for turned in (True, False):
            local = [slice_of(x, lengths, "zigzag", axis.rank) for x in problem(case)[0][:3]]
            leaves = [(x.mT.contiguous().mT if turned else x).requires_grad_() for x in local]
            out = attention(*leaves, causal=True, layout="zigzag", method=method, group=axis)
            outcomes.append((out, *torch.autograd.grad(out.sum(), leaves)))
        return max(distance(a, b) for a, b in zip(*outcomes, strict=True))

    assert max(virtual_world(2).run(program).results) < 1e-10


def test_only_some_inputs_need_gradients() -> None:
    case, lengths = Case(12, 2, 2, 1), (6, 6)

    def program(axis: weft.Axis) -> float:
        q, k, v, grad = (slice_of(x, lengths, "contiguous", axis.rank) for x in problem(case)[0])
        v.requires_grad_()
        (dv,) = torch.autograd.grad(attention(q, k, v, causal=False, scale=0.7, method="gather", group=axis), v, grad)
        return distance(dv, slice_of(problem(case)[1][4], lengths, "contiguous", axis.rank))

    assert max(virtual_world(2).run(program).results) < 1e-10


@pytest.mark.parametrize("method", METHODS)
def test_sharp_scores(method: str) -> None:
    """Scores of hundreds: whoever holds the largest wins, and nothing overflows when blocks are merged."""
    case, lengths = Case(24, 4, 4, 1, causal=True), (5, 8, 7, 4)
    q, k, v, grad = (x.clone() for x in problem(case)[0])
    q *= 300
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = plain(*leaves, case)
    wanted = (out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, grad))
    for dtype, limit in ((torch.float64, 1e-10), (torch.float32, 1e-3)):

        def program(axis: weft.Axis) -> float:
            local = [slice_of(x.detach(), lengths, "zigzag", axis.rank).to(dtype).requires_grad_() for x in leaves]  # noqa: B023
            out, lse = attention(
                *local, causal=True, scale=0.7, layout="zigzag", method=method, return_lse=True, group=axis
            )
            grads = torch.autograd.grad(out, local, slice_of(grad, lengths, "zigzag", axis.rank).to(dtype))  # noqa: B023
            return max(
                distance(got, slice_of(true, lengths, "zigzag", axis.rank))
                for got, true in zip((out, lse, *grads), wanted, strict=True)
            )

        assert max(virtual_world(4).run(program).results) < limit


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", METHODS)
def test_nobody_writes_to_what_is_travelling(method: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual world copies messages as they leave, so reuse of memory that is too early is looked for here."""
    original = VirtualWire.exchange
    checked = []

    def exchange(self, record, sends, expected):
        pending, before = original(self, record, sends, expected), [tensor._version for _, _, tensor in sends]

        def finish() -> None:
            assert [tensor._version for _, _, tensor in sends] == before, "written to while it travels"
            checked.extend(before)
            pending.wait()

        return Pending(finish)

    monkeypatch.setattr(VirtualWire, "exchange", exchange)
    for lengths, bounds in (((5, 4, 6), None), LONG):
        case = Case(sum(lengths), 12, 12, 1, causal=True, bounds=bounds)
        for options in ({}, {"grad_dtype": torch.bfloat16}):
            virtual_world(len(lengths)).run(
                lambda axis: run(axis, case, lengths, layout, torch.float32, method=method, **options)  # noqa: B023
            )
    assert checked
