"""The Triton kernels in Triton's interpreter against the fp64 recurrence, the torch kernels and over virtual ranks.

A case takes seconds there: a slice of the matrix runs with `make test`, all of it with `make soak`.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from interpreter import Interpreter
from test_chunk_kernels import DECAYS, GATES, Case, mild, mixed, resets, slow, strong, zero
from test_linear_attention import Case as RankCase
from test_linear_attention import cases as rank_cases
from test_linear_attention import check as check_ranks
from torch import Tensor

import weft
from weft.bench.linear_attention import gpu
from weft.ops.fused import tiling
from weft.ops.fused.tokens import readable
from weft.ops.linear_attention.chunk import ChunkBackward, ChunkForward
from weft.ops.linear_attention.fused.phases import FusedBackward, FusedForward
from weft.ops.scan import METHODS

FUSED = FusedForward, FusedBackward
TOLERANCE = {torch.float32: 2e-5, torch.float16: 6e-4}


@contextmanager
def small_blocks(programs: int = 512, piece: int = 2) -> Iterator[None]:
    """Pieces of two chunks, so that short sequences have several."""
    before = tiling.PROGRAMS, tiling.PIECE
    tiling.PROGRAMS, tiling.PIECE = programs, piece
    try:
        yield
    finally:
        tiling.PROGRAMS, tiling.PIECE = before


def strided(case: Case) -> None:
    """The same numbers as slices of a fused projection (q, k) and heads first (v, do, g)."""
    case.q, case.k = torch.cat([case.q, case.k, case.v[:, :, : case.q.shape[2]]], -1).split(
        [case.q.shape[-1], case.q.shape[-1], case.v.shape[-1]], -1
    )[:2]
    case.v = case.v.transpose(1, 2).contiguous().transpose(1, 2)
    case.do = case.do.transpose(1, 2).contiguous().transpose(1, 2)
    if case.g is not None and case.g.dim() > 1:
        case.g = case.g.transpose(1, 2).contiguous().transpose(1, 2)


def terms_of_gate(case: Case) -> Tensor:
    """How large the terms are that the gradient of a constant decay adds up, over all tokens; they cancel."""
    assert case.g is not None
    tokens = copy.copy(case)
    tokens.g = case.g.expand(*case.q.shape[:2], -1)
    return tokens.expected()["dg"].abs().sum((0, 1)).max()


def errors(shape: tuple, fill: Callable, chunk: int, dtype: torch.dtype, views: bool = False) -> dict[str, float]:
    """Of every result against the recurrence in fp64, relative to its largest entry, or what it adds up."""
    kind, b, lengths, h, hv, k, v, late = shape
    case = Case(kind, b, list(lengths), h, hv, k, v, fill, late)
    case.round(dtype)
    if views:
        strided(case)
    expected = case.expected()
    from kernel_watch import memory_is_safe, no_positive_exponent  # imports Triton, which must find its interpreter

    with small_blocks(), memory_is_safe(), no_positive_exponent() as exponents:
        actual = case.actual(chunk, dtype, FUSED)
    assert expected.keys() == actual.keys()
    assert (max(exponents, default=0.0) <= 0.0) and (kind == "none" or exponents or not sum(lengths))
    found = {}
    for name, want in expected.items():
        got = actual[name].double()
        assert got.shape == want.shape and torch.isfinite(got).all(), name
        if want.numel():
            size = terms_of_gate(case) if name == "dg" and kind.startswith("constant") else want.abs().max()
            least = torch.finfo(actual[name].dtype).tiny  # a gradient behind gates of -50 is below what fp16 holds
            found[name] = ((got - want).abs().max() / size.clamp(min=least)).item()
    if case.g is not None:
        assert (actual["dg"][torch.isinf(case.g)] == 0).all()
    return found


def check(
    interpreter: Interpreter, shape: tuple, fill: Callable, chunk: int, dtype: torch.dtype, views: bool = False
) -> None:
    found = interpreter.run(errors, shape, fill, chunk, dtype, views)
    worst = max(found, key=found.__getitem__)
    assert found[worst] <= TOLERANCE[dtype], f"{worst}: {found[worst]:.2e}"


def soaked(value: str) -> object:
    """A parameter for `make soak` alone."""
    return pytest.param(value, marks=pytest.mark.slow)


DENSE = (1, (35,), 1, 2, 24, 20, True)
PACKED = (1, (5, 0, 33, 1, 0), 1, 2, 8, 40, True)


@pytest.mark.parametrize(
    ("kind", "chunk", "dtype"),
    [
        ("none", 16, torch.float16),
        ("constant", 32, torch.float32),
        ("scalar_v", 16, torch.float16),
        ("vector", 32, torch.float32),
        ("vector_v", 16, torch.float16),
    ],
)
def test_uneven_lengths_and_shared_heads(interpreter: Interpreter, kind: str, chunk: int, dtype: torch.dtype) -> None:
    check(interpreter, (kind, *DENSE), mild, chunk, dtype)


@pytest.mark.parametrize("kind", ["constant_v", "vector"])
def test_packed_with_empty_documents(interpreter: Interpreter, kind: str) -> None:
    check(interpreter, (kind, *PACKED), mild, 32, torch.float32)


@pytest.mark.parametrize(("kind", "fill"), [("scalar", resets), ("vector", strong)])
def test_strong_gates(interpreter: Interpreter, kind: str, fill: Callable) -> None:
    check(interpreter, (kind, 1, (40,), 1, 1, 8, 8, True), fill, 32, torch.float32)


@pytest.mark.parametrize(("kind", "chunk", "fill"), [("scalar", 128, resets), ("vector", 64, mixed)])
def test_chunks_of_several_blocks(interpreter: Interpreter, kind: str, chunk: int, fill: Callable) -> None:
    """With a dozen resets in a chunk, whose large logs must not cost the small ones after them their digits."""
    check(interpreter, (kind, 1, (150,), 1, 1, 8, 8, True), fill, chunk, torch.float32)


@pytest.mark.parametrize("kind", ["scalar", "vector"])
def test_blocks_of_k_and_v(interpreter: Interpreter, kind: str) -> None:
    """More key and value dimensions than one block has."""
    check(interpreter, (kind, 1, (16,), 1, 1, 40, 50, True), mild, 16, torch.float32)


@pytest.mark.parametrize("kind", ["scalar"])
def test_strided_inputs(interpreter: Interpreter, kind: str) -> None:
    check(interpreter, (kind, 2, (14,), 2, 4, 8, 8, False), mild, 16, torch.float32, True)


def test_only_a_last_dimension_that_is_not_dense_is_copied() -> None:
    x = torch.randn(2, 3, 4, 5)
    heads_first = x.transpose(1, 2)
    assert readable(heads_first).data_ptr() == x.data_ptr() and readable(heads_first).stride() == heads_first.stride()
    assert readable(x.mT).is_contiguous() and torch.equal(readable(x.mT), x.mT)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("chunk", [16, 32, 64, 128])
@pytest.mark.parametrize("kind", DECAYS)
def test_every_shape(interpreter: Interpreter, kind: str, chunk: int, dtype: torch.dtype) -> None:
    for shape in (
        (2, (chunk * 3 - 5,), 2, 4, 24, 40, True),
        (1, (5, 0, chunk + 3, chunk, 1, 0), 1, 2, 40, 16, True),
        (1, (chunk + 1,), 1, 1, 130, 200, False),
        (1, (0,), 1, 1, 8, 8, True),
    ):
        check(interpreter, (kind, *shape), mild, chunk, dtype)
    check(interpreter, (kind, 1, (chunk + 9,), 1, 2, 16, 8, True), mild, chunk, dtype, True)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("fill", [slow, zero, strong, mixed, resets])
@pytest.mark.parametrize("kind", GATES)
def test_every_gate(interpreter: Interpreter, kind: str, fill: Callable) -> None:
    for chunk, dtype in ((16, torch.float32), (32, torch.float16), (64, torch.float32), (128, torch.float32)):
        length = 100 if dtype == torch.float16 else 230  # the gradient of a constant decay grows beyond fp16
        check(interpreter, (kind, 1, (length, 37), 1, 2, 16, 16, True), fill, chunk, dtype)


def same_bits(kind: str) -> None:
    case = Case(kind, 1, [33], 1, 1, 8, 8)
    with small_blocks(piece=1):
        first, again = (case.actual(16, torch.float32, FUSED) for _ in range(2))
    assert all(torch.equal(again[name], x) for name, x in first.items())


@pytest.mark.parametrize("kind", [soaked("scalar"), "vector"])
def test_same_inputs_same_bits(interpreter: Interpreter, kind: str) -> None:
    interpreter.run(same_bits, kind)


def reset_is_complete(kind: str) -> None:
    case = Case(kind, 1, [40], 1, 1, 8, 8)
    assert case.g is not None
    case.g[:, 21] = -math.inf
    one = case.actual(32, torch.float32, FUSED)
    case.v[:, :21] *= 1e3
    case.entering = None
    two = case.actual(32, torch.float32, FUSED)
    assert torch.equal(one["o"][:, 21:], two["o"][:, 21:]) and torch.equal(one["leaving"], two["leaving"])


@pytest.mark.parametrize("kind", [soaked("scalar"), "vector"])
def test_nothing_before_a_reset_shows_after_it(interpreter: Interpreter, kind: str) -> None:
    interpreter.run(reset_is_complete, kind)


def pieces_change_nothing(kind: str) -> float:
    case = Case(kind, 1, [70], 1, 1, 8, 8)
    results = []
    for programs, piece in ((1, 100), (512, 2)):
        with small_blocks(programs, piece):
            results.append(case.actual(16, torch.float32, FUSED))
    return max((other[name] - x).abs().max().item() for other in results[1:] for name, x in results[0].items())


@pytest.mark.parametrize("kind", [soaked("scalar"), "vector"])
def test_pieces_of_segments_change_nothing(interpreter: Interpreter, kind: str) -> None:
    assert 0 < interpreter.run(pieces_change_nothing, kind) < 2e-5


def over_ranks(decay: str, name: str, size: int, layout: str, methods: list[str]) -> None:
    """The check of `test_linear_attention` with backend="triton"."""
    before = weft.linear_attention
    weft.linear_attention = functools.partial(before, backend="triton")
    try:
        for method in methods:
            case: RankCase = rank_cases(size)[name]
            check_ranks(decay, case, layout, method, tolerance=2e-5, dtype=torch.float32, chunk_size=16)
    finally:
        weft.linear_attention = before


@pytest.mark.parametrize(
    ("decay", "name", "size", "layout", "method"),
    [
        ("none", "uneven", 2, "contiguous", "ring"),
        ("constant", "missing", 3, "contiguous", "gather"),
        ("scalar", "packed", 3, "zigzag", "doubling"),
        ("vector", "even", 2, "zigzag", "auto"),
    ],
)
def test_over_ranks(interpreter: Interpreter, decay: str, name: str, size: int, layout: str, method: str) -> None:
    interpreter.run(over_ranks, decay, name, size, layout, [method])


def in_other_modes() -> str:
    """Validation, then a step with autocast around it, then a penalty on its gradient."""
    x = torch.randn(1, 20, 2, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()

    def run() -> torch.Tensor:
        return weft.linear_attention(x, x, x, -x.abs(), backend="triton", chunk_size=16)[0]

    with torch.inference_mode():
        validated = run().clone()
    (wanted,) = torch.autograd.grad(run().square().sum(), x)
    with torch.autocast("cpu", torch.bfloat16):
        out = run()
        (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    assert torch.equal(out, validated) and torch.equal(grad, wanted)
    try:
        grad.square().sum().backward()
    except NotImplementedError as error:
        return str(error)
    return "nothing"


def test_modes_and_second_derivatives(interpreter: Interpreter) -> None:
    assert "linear_attention: second derivatives are not supported" in interpreter.run(in_other_modes)


LAYOUTS_AND_SIZES = [(layout, size) for layout in ("contiguous", "zigzag") for size in (2, 3)]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("turn", range(len(LAYOUTS_AND_SIZES)))
@pytest.mark.parametrize("name", ["even", "uneven", "missing", "packed", "one document"])
@pytest.mark.parametrize("decay", ["none", "constant", "scalar", "vector"])
def test_every_case_over_ranks(interpreter: Interpreter, decay: str, name: str, turn: int) -> None:
    """The schedules take turns: what a kernel computes does not depend on which one carries its maps."""
    layout, size = LAYOUTS_AND_SIZES[turn]
    method = list(METHODS)[(turn + len(decay) + len(name)) % len(METHODS)]
    interpreter.run(over_ranks, decay, name, size, layout, [method])


def backends_agree(decay: str, dtype: torch.dtype) -> float:
    """The whole operation, one process: Triton against torch, outputs and all gradients."""
    make = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=make).to(dtype)

    q, k, v, start = draw(1, 37, 1, 8), draw(1, 37, 1, 8), draw(1, 37, 2, 16), draw(1, 2, 8, 16).float()
    g = {"none": None, "constant": -draw(2).abs(), "scalar": -draw(1, 37, 1).abs(), "vector": -draw(1, 37, 2, 8).abs()}[
        decay
    ]
    inputs = [x.requires_grad_() for x in (q, k, v, g, start) if x is not None]
    found = []
    for backend in ("torch", "triton"):
        o, final = weft.linear_attention(
            q, k, v, g, initial_state=start, output_final_state=True, backend=backend, chunk_size=16
        )
        assert o.dtype == dtype and final.dtype == torch.float32
        loss = (o.float() * torch.linspace(-1, 1, o.numel()).view_as(o)).sum() + final.sum()
        found.append([o, final, *torch.autograd.grad(loss, inputs)])
    return max(((a - b).abs().max() / a.abs().max()).item() for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("decay", "dtype"),
    [
        ("none", torch.float16),
        ("constant", torch.float32),
        ("scalar", torch.bfloat16),
        ("vector", torch.float16),
    ],
)
def test_the_operation_agrees_with_torch(interpreter: Interpreter, decay: str, dtype: torch.dtype) -> None:
    """bf16 too: the interpreter loads, converts and stores it rightly, and there is no arithmetic in it."""
    tolerance = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 5e-6}
    assert interpreter.run(backends_agree, decay, dtype) < tolerance[dtype]


def maps_agree(kind: str, lengths: list[int]) -> None:
    """What goes to other ranks, log decay and state of each segment: Triton's against torch's, both ways."""
    case = Case(kind, 2 if len(lengths) == 1 else 1, lengths, 1, 2, 24, 8)
    inputs = [None if x is None else x.float() for x in (case.q, case.k, case.v, case.g)]
    common = (*inputs, 0.3, lengths, 16)
    with small_blocks():
        fused = FusedForward(*common), FusedBackward(*common, None, case.do.float())
    chunked = ChunkForward(*common), ChunkBackward(*common, None, case.do.float())
    for ours, theirs in zip(fused, chunked, strict=True):
        for got, want in zip(ours.maps, theirs.maps, strict=True):
            assert (got is None) == (want is None)
            if got is not None and want is not None:
                torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("kind", "lengths"),
    [
        ("scalar_v", [70]),
        ("vector", [5, 0, 37, 1]),
        *(
            pytest.param(kind, lengths, marks=pytest.mark.slow)
            for kind in DECAYS
            for lengths in ([70], [5, 0, 37, 1], [0])
        ),
    ],
)
def test_the_maps_that_travel_agree_with_torch(interpreter: Interpreter, kind: str, lengths: list[int]) -> None:
    interpreter.run(maps_agree, kind, lengths)


def gpu_rows_compute_the_same(decay: str) -> None:
    """The cases `weft bench linear-attention` measures on a GPU, small and here; fla's Triton kernel is only bound."""
    gpu.TOKENS, gpu.HEADS, gpu.DIM = 18, 1, 8
    cases = gpu.cases(decay, "cpu")
    assert set(cases) >= {"weft triton", "weft torch"}
    for got, want in zip(cases["weft triton"](), cases["weft torch"](), strict=True):
        assert got.dtype == want.dtype and got.abs().max() > 0
        assert (got - want).abs().max() <= 8e-3 * want.abs().max()
    if "fla" in cases:
        module, name, word = gpu.FLA[decay]
        taken = inspect.signature(getattr(importlib.import_module(module), name)).parameters
        assert {"q", "k", "v", word} <= set(taken)


@pytest.mark.slow
@pytest.mark.parametrize("decay", list(gpu.FLA))
def test_rows_of_the_benchmark_on_a_gpu(interpreter: Interpreter, decay: str) -> None:
    interpreter.run(gpu_rows_compute_the_same, decay)
