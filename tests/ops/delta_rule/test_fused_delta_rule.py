"""The delta rule's Triton kernels in Triton's interpreter against the torch kernels in fp64 and over virtual ranks.

A case takes seconds there: a slice of the matrix runs with `make test`, all of it with `make soak`.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import pytest
import torch
from interpreter import Interpreter
from test_delta_rule import GATES
from test_delta_rule import check as check_ranks
from test_linear_attention import cases as rank_cases
from test_linear_attention_on_device import compare_backends
from torch import Tensor
from worlds import simulated_device

import weft
from weft.ops.delta_rule.backward import ChunkBackward
from weft.ops.delta_rule.chunk import ChunkForward, Inputs
from weft.ops.delta_rule.fused.phases import FusedBackward, FusedForward
from weft.ops.scan import METHODS

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}
NAMES = ("map", "final", "o", "left", "map^T", "left^T do", "dq", "dk", "dv", "dbeta", "dg", "dstart")


@dataclass(frozen=True)
class Shape:
    """One run: ``enters``, its state comes from another one. ``fill``: how strong gates are; ``alike``: the keys."""

    gate: str
    lengths: tuple[int, ...] = (37,)
    keys: int = 24
    values: int = 20
    chunk: int = 16
    batch: int = 1
    heads: int = 1
    value_heads: int = 2
    enters: bool = True
    fill: str = "mild"
    alike: bool = False
    dtype: torch.dtype = torch.float32
    strided: bool = False


def make(shape: Shape) -> tuple[Inputs, Tensor, Tensor, Tensor]:
    """Inputs, the entering states, do and the gradient of the leaving states, in fp64 but of ``dtype``."""
    draws = torch.Generator().manual_seed(sum(shape.lengths))
    tokens, segments = sum(shape.lengths), shape.batch * len(shape.lengths)

    def draw(*dims: int) -> Tensor:
        return torch.randn(dims, generator=draws).to(shape.dtype).double()

    q, k = (draw(shape.batch, tokens, shape.heads, shape.keys) for _ in range(2))
    k = k[:, :1].expand_as(k) if shape.alike else k
    k = torch.nn.functional.normalize(k, dim=-1).to(shape.dtype).double()
    v, do = (draw(shape.batch, tokens, shape.value_heads, shape.values) for _ in range(2))
    beta = (2 * draw(*v.shape[:3]).sigmoid()).to(shape.dtype).double()
    g = None if shape.gate == "none" else -0.1 * draw(*v.shape[:3], *([shape.keys] * (shape.gate == "vector"))).abs()
    if g is not None and shape.fill == "resets":
        g[:, 3::7] = -math.inf
    elif g is not None and shape.fill == "strong":  # one channel, or some tokens
        if shape.gate == "vector":
            g[..., 1] = -320.0
        g[:, 5::6] *= 3000.0
    g = None if g is None else g.to(shape.dtype).double()
    states = [draw(segments, shape.value_heads, shape.keys, shape.values).float().double() for _ in range(2)]
    if shape.strided:
        q, k = torch.cat([q, k], -1).split(shape.keys, -1)
        v, do, beta = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (v, do, beta))
    return Inputs(q, k, v, beta, g), states[0], do, states[1]


def run(shape: Shape, dtype: torch.dtype, fused: bool) -> dict[str, Tensor | None]:
    """All that the two classes give, from inputs in ``dtype``."""
    forward, backward = (FusedForward, FusedBackward) if fused else (ChunkForward, ChunkBackward)
    inputs, start, do, leaving = make(shape)
    q, k, v, beta, g = (
        None if x is None else x.to(dtype) for x in (inputs.q, inputs.k, inputs.v, inputs.beta, inputs.g)
    )
    inputs, lengths = Inputs(q, k, v, beta, g), list(shape.lengths)
    one = forward(inputs, 0.3, lengths, shape.chunk, None if shape.enters else start, shape.enters, shape.enters)
    one.intra()
    o = one.finish(start if shape.enters else None)
    other = backward(inputs, 0.3, lengths, shape.chunk, start, do.to(dtype), one.left, one.maps[0])
    maps = other.maps
    other.intra()
    return dict(zip(NAMES, (*one.maps, o, one.left, *maps, *other.finish(leaving)), strict=True))


def errors(shape: Shape) -> dict[str, float]:
    """Of every result against the torch kernels in fp64, relative to its largest entry."""
    from kernel_watch import memory_is_safe, no_positive_exponent  # imports Triton, which must find its interpreter

    wanted = run(shape, torch.float64, fused=False)
    with memory_is_safe(), no_positive_exponent() as exponents:
        got = run(shape, shape.dtype, fused=True)
    assert max(exponents, default=0.0) <= 0.0 and (shape.gate == "none" or exponents or not sum(shape.lengths))
    found = {}
    for name, want in wanted.items():
        result = got[name]
        assert (result is None) == (want is None), name
        if want is not None and result is not None and want.numel():
            assert result.shape == want.shape and torch.isfinite(result).all(), name
            found[name] = ((result - want).abs().max() / want.abs().max().clamp(min=1e-6)).item()
    for name in ("o", "dq", "dk", "dv", "dbeta", "dg"):
        assert got[name] is None or got[name].dtype == shape.dtype
    gate = make(shape)[0].g
    assert gate is None or got["dg"] is None or (got["dg"][torch.isinf(gate)] == 0).all()
    return found


def check(interpreter: Interpreter, shape: Shape) -> None:
    found = interpreter.run(errors, shape)
    worst = max(found, key=found.__getitem__)
    assert found[worst] <= TOLERANCE[shape.dtype], f"{worst}: {found[worst]:.2e}"


@pytest.mark.parametrize("gate", GATES)
def test_uneven_lengths_and_shared_heads(interpreter: Interpreter, gate: str) -> None:
    check(interpreter, Shape(gate))


@pytest.mark.parametrize("gate", ["scalar", "vector"])
def test_packed_with_empty_documents(interpreter: Interpreter, gate: str) -> None:
    check(interpreter, Shape(gate, (5, 0, 19, 1, 0), 16, 24, chunk=32, enters=False))


@pytest.mark.parametrize(("gate", "fill"), [("scalar", "resets"), ("vector", "strong")])
def test_strong_gates(interpreter: Interpreter, gate: str, fill: str) -> None:
    check(interpreter, Shape(gate, (40,), 16, 16, chunk=32, value_heads=1, fill=fill))


@pytest.mark.parametrize("gate", ["none", "vector"])
def test_keys_that_are_all_alike(interpreter: Interpreter, gate: str) -> None:
    """In a chunk of four blocks, with beta up to 2: a series of powers of A would lose every digit here."""
    check(interpreter, Shape(gate, (64,), 16, 16, chunk=64, value_heads=1, alike=True))


def test_more_keys_than_one_product_holds(interpreter: Interpreter) -> None:
    """The recurrence holds all of K, and takes its products with the state in parts."""
    check(interpreter, Shape("vector", (17,), 130, 16, value_heads=1))


def test_strided_inputs(interpreter: Interpreter) -> None:
    check(interpreter, Shape("scalar", (18,), 16, 16, batch=2, heads=2, enters=False, strided=True))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("chunk", [16, 32, 64])
@pytest.mark.parametrize("gate", GATES)
def test_every_shape(interpreter: Interpreter, gate: str, chunk: int, dtype: torch.dtype) -> None:
    base = Shape(gate, chunk=chunk, dtype=dtype)
    for shape in (
        replace(base, batch=2, lengths=(chunk * 3 - 5,), heads=2, value_heads=4, keys=24, values=40),
        replace(base, lengths=(5, 0, chunk + 3, chunk, 1, 0), keys=40, values=16, enters=False),
        replace(base, lengths=(chunk + 1,), value_heads=1, keys=130, values=200),
        replace(base, lengths=(19,), value_heads=1, keys=256, values=256),
        replace(base, lengths=(3,), keys=16, values=16),
        replace(base, lengths=(0,), keys=16, values=16),
        replace(base, lengths=(chunk + 9,), keys=16, values=24, strided=True),
    ):
        check(interpreter, shape)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("fill", ["mild", "strong", "resets"])
@pytest.mark.parametrize("gate", GATES)
def test_every_gate(interpreter: Interpreter, gate: str, fill: str) -> None:
    for chunk, alike in ((16, False), (32, True), (64, False), (64, True)):
        shape = Shape(gate, (150, 37), 16, 16, chunk, value_heads=1, enters=False, fill=fill, alike=alike)
        check(interpreter, shape)
        check(interpreter, replace(shape, lengths=(100,), enters=True))


def same_bits(gate: str) -> None:
    shape = Shape(gate, (20,), 16, 16)
    first, again = (run(shape, torch.float32, fused=True) for _ in range(2))
    for name, x in first.items():
        other = again[name]
        assert (x is None and other is None) or (x is not None and other is not None and torch.equal(x, other)), name


def test_same_inputs_same_bits(interpreter: Interpreter) -> None:
    interpreter.run(same_bits, "vector")


def over_ranks(gate: str, name: str, size: int, layout: str, method: str) -> None:
    """The check of `test_delta_rule` with backend="triton"."""
    before = weft.delta_rule
    weft.delta_rule = functools.partial(before, backend="triton")
    try:
        case = rank_cases(size)[name]
        check_ranks(gate, case, layout, method, tolerance=2e-5, dtype=torch.float32, chunk_size=16)
    finally:
        weft.delta_rule = before


@pytest.mark.parametrize(
    ("gate", "name", "size", "layout", "method"),
    [
        ("none", "missing", 3, "contiguous", "gather"),
        ("scalar", "packed", 3, "zigzag", "ring"),
        ("vector", "uneven", 2, "contiguous", "doubling"),
    ],
)
def test_over_ranks(interpreter: Interpreter, gate: str, name: str, size: int, layout: str, method: str) -> None:
    interpreter.run(over_ranks, gate, name, size, layout, method)


LAYOUTS_AND_SIZES = [(layout, size) for layout in ("contiguous", "zigzag") for size in (2, 3)]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("turn", range(len(LAYOUTS_AND_SIZES)))
@pytest.mark.parametrize("name", ["even", "uneven", "missing", "packed", "one document"])
@pytest.mark.parametrize("gate", GATES)
def test_every_case_over_ranks(interpreter: Interpreter, gate: str, name: str, turn: int) -> None:
    """The schedules take turns: what a kernel computes does not depend on which one carries its maps."""
    layout, size = LAYOUTS_AND_SIZES[turn]
    method = list(METHODS)[(turn + len(gate) + len(name)) % len(METHODS)]
    interpreter.run(over_ranks, gate, name, size, layout, method)


def backends_agree(gate: str, dtype: torch.dtype) -> float:
    """The whole operation, one process: Triton against torch, outputs and all gradients; g and beta are fp32."""
    inputs, start, _, _ = make(Shape(gate, (21,), 16, 16, dtype=dtype))
    given = [inputs.q.to(dtype), inputs.k.to(dtype), inputs.v.to(dtype), inputs.beta.float()]
    given += [] if inputs.g is None else [inputs.g.float()]
    leaves = [x.requires_grad_() for x in (*given, start.float())]
    found = []
    for backend in ("torch", "triton"):
        o, final = weft.delta_rule(
            *leaves[:-1], initial_state=leaves[-1], output_final_state=True, backend=backend, chunk_size=16
        )
        assert o.dtype == dtype and final.dtype == torch.float32
        loss = (o.float() * torch.linspace(-1, 1, o.numel()).view_as(o)).sum() + final.sum()
        found.append([o, final, *torch.autograd.grad(loss, leaves)])
    return max(((a - b).abs().max() / a.abs().max()).item() for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(("gate", "dtype"), [("scalar", torch.bfloat16), ("vector", torch.float16)])
def test_the_operation_agrees_with_torch(interpreter: Interpreter, gate: str, dtype: torch.dtype) -> None:
    """bf16 too: the interpreter loads, converts and stores it rightly, and there is no arithmetic in it."""
    assert interpreter.run(backends_agree, gate, dtype) < {torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]


def backends_agree_on_device(gate: str, layout: str, method: str) -> float:
    """Triton's kernels against those of torch, on 2 ranks: the worst error, of results and all gradients."""
    simulated = simulated_device()

    def step(axis: weft.Axis, backend: str) -> list[Tensor]:
        inputs, start, _, _ = make(Shape(gate, ((21, 16)[axis.rank],), 16, 16))
        given = [x for x in (inputs.q, inputs.k, inputs.v, inputs.beta, inputs.g) if x is not None]
        leaves = [x.float().to("sim").requires_grad_() for x in (*given, torch.ones_like(start))]
        with simulated.no_host_sync():
            o, final = weft.delta_rule(
                *leaves[:-1], initial_state=leaves[-1], output_final_state=True, backend=backend, layout=layout,
                method=method, chunk_size=16, group=axis,
            )  # fmt: skip
            assert final is not None and o.device.type == "sim"
            (o.square().sum() + final.sum()).backward()
        gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
        return [x.detach().cpu() for x in (o, final, *gradients)]

    return compare_backends(step)


@pytest.mark.parametrize(
    ("gate", "layout", "method"), [("scalar", "zigzag", "doubling"), ("vector", "contiguous", "ring")]
)
def test_on_the_simulated_device(interpreter: Interpreter, gate: str, layout: str, method: str) -> None:
    """Their launches are operators of the device: ordered by streams, on memory of its own, and never waited for."""
    assert interpreter.run(backends_agree_on_device, gate, layout, method) <= 2e-5
