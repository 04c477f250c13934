"""The chunked kernels against the token-by-token recurrence and its autograd."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from recurrence import reference
from torch import Tensor

from weft.comm import function
from weft.ops.linear_attention.chunk import ChunkBackward, ChunkForward
from weft.ops.scan import grid

DECAYS = ["none", "constant", "constant_v", "scalar", "scalar_v", "vector", "vector_v"]
GATES = DECAYS[1:]
SCALE = 0.3


def make_gate(
    kind: str, b: int, t: int, h: int, hv: int, k: int, fill: Callable[[tuple[int, ...]], Tensor]
) -> Tensor | None:
    heads = hv if kind.endswith("_v") else h
    shapes = {"constant": (heads,), "scalar": (b, t, heads), "vector": (b, t, heads, k)}
    return None if kind == "none" else fill(shapes[kind.removesuffix("_v")])


def mild(shape: tuple[int, ...]) -> Tensor:
    return -torch.rand(shape, dtype=torch.float64)


def slow(shape: tuple[int, ...]) -> Tensor:
    return -1e-3 * torch.rand(shape, dtype=torch.float64)


def zero(shape: tuple[int, ...]) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64)


def strong(shape: tuple[int, ...]) -> Tensor:
    return -50 - torch.rand(shape, dtype=torch.float64)


def mixed(shape: tuple[int, ...]) -> Tensor:
    """Mostly near one, now and then a gate that closes."""
    return torch.where(torch.rand(shape) < 0.1, -50.0, -1e-2).double() * torch.rand(shape, dtype=torch.float64)


def resets(shape: tuple[int, ...]) -> Tensor:
    return torch.where(torch.rand(shape) < 0.1, -math.inf, mild(shape))


class Case:
    """Random inputs in fp64, the reference's answers, and the kernels' answers in any dtype."""

    def __init__(
        self,
        kind: str,
        b: int,
        lengths: list[int],
        h: int,
        hv: int,
        k: int,
        v: int,
        fill: Callable = mild,
        late: bool = True,
    ) -> None:
        torch.manual_seed(sum(lengths) + 7 * h)
        t, self.lengths = sum(lengths), lengths
        f64 = {"dtype": torch.float64}
        self.q, self.k, self.v = (
            torch.randn(b, t, h, k, **f64),
            torch.randn(b, t, h, k, **f64),
            torch.randn(b, t, hv, v, **f64),
        )
        self.g = make_gate(kind, b, t, h, hv, k, fill)
        states = b * len(lengths), hv, k, v
        self.entering = torch.randn(states, **f64) if late else None
        self.grad_leaving = torch.randn(states, **f64) if late else None
        self.do = torch.randn(b, t, hv, v, **f64)

    def round(self, dtype: torch.dtype) -> None:
        """Inputs that ``dtype`` holds exactly."""
        for name in ("q", "k", "v", "g", "do"):
            x = getattr(self, name)
            setattr(self, name, None if x is None else x.to(dtype).double())

    def expected(self) -> dict[str, Tensor]:
        leaves = {n: getattr(self, n).clone().requires_grad_() for n in "qkvg" if getattr(self, n) is not None}
        entering = (
            torch.zeros(self.states_shape(), dtype=torch.float64) if self.entering is None else self.entering.clone()
        )
        leaves["entering"] = entering.requires_grad_()
        o, leaving = reference(
            leaves["q"], leaves["k"], leaves["v"], leaves.get("g"), SCALE, leaves["entering"], self.lengths
        )
        grad = torch.zeros_like(leaving) if self.grad_leaving is None else self.grad_leaving
        grads = torch.autograd.grad([o, leaving], list(leaves.values()), [self.do, grad], allow_unused=True)
        found = {"o": o.detach(), "leaving": leaving.detach()}
        for name, x in zip(leaves, grads, strict=True):
            found["d" + name] = torch.zeros_like(leaves[name]) if x is None else x
        return found

    def states_shape(self) -> tuple[int, ...]:
        b, _, _, k = self.q.shape
        return b * len(self.lengths), *self.v.shape[2:3], k, self.v.shape[3]

    def actual(
        self, chunk: int, dtype: torch.dtype = torch.float64, kernels: tuple = (ChunkForward, ChunkBackward)
    ) -> dict[str, Tensor]:
        def cast(x: Tensor | None, to: torch.dtype = dtype) -> Tensor | None:
            return None if x is None else x.to(to)

        state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        q, k, v, g, do = (cast(x) for x in (self.q, self.k, self.v, self.g, self.do))
        entering, grad_leaving = cast(self.entering, state_dtype), cast(self.grad_leaving, state_dtype)
        forward = kernels[0](q, k, v, g, SCALE, self.lengths, chunk)
        log, state = forward.maps
        forward.intra()
        o, leaving = forward.finish(entering)
        backward = kernels[1](q, k, v, g, SCALE, self.lengths, chunk, entering, do)
        backward.intra()
        dq, dk, dv, dg, dentering = backward.finish(grad_leaving)
        found = {"o": o, "leaving": leaving, "dq": dq, "dk": dk, "dv": dv, "dentering": dentering}
        for x, like in ((o, v), (dq, q), (dk, k), (dv, v)):
            assert x.dtype == like.dtype
            assert x.shape == like.shape
        for x in (state, leaving, dentering, backward.maps[1]):
            assert x.dtype == state_dtype
            assert x.shape == self.states_shape()
        if g is None:
            assert dg is None
            assert log is None
        else:
            assert dg.shape == g.shape
            assert dg.dtype == g.dtype
            assert log.shape == self.states_shape()[: 3 if g.dim() == 4 else 2]
            assert log.dtype == state_dtype
            found["dg"] = dg
        return found


def check(case: Case, chunk: int, tolerance: float, dtype: torch.dtype = torch.float64) -> None:
    expected, actual = case.expected(), case.actual(chunk, dtype)
    assert expected.keys() == actual.keys()
    for name, want in expected.items():
        got = actual[name].double()
        assert got.shape == want.shape
        if want.numel():
            assert torch.isfinite(got).all(), name
            error = ((got - want).abs().max() / want.abs().max().clamp(min=1e-290)).item()
            assert error <= tolerance, f"{name}: {error:.2e}"


@pytest.mark.parametrize("kind", DECAYS)
@pytest.mark.parametrize(
    ("b", "lengths", "h", "hv", "chunk"),
    [
        (2, [64], 2, 2, 16),
        (2, [61], 2, 4, 16),
        (3, [1], 1, 3, 64),
        (1, [0], 2, 2, 16),
        (2, [0], 2, 2, 16),
        (1, [5, 0, 33, 16, 1, 0], 2, 4, 16),
        (1, [0, 0, 40], 1, 1, 8),
        (1, [3, 1, 2, 2, 1, 5, 1, 1, 1, 4, 2] * 2, 2, 2, 64),
        (1, [32, 16, 48], 2, 2, 16),
        (1, [50], 2, 2, 1),
        (2, [50], 2, 2, 24),
    ],
)
@pytest.mark.parametrize("late", [True, False])
def test_fp64(kind: str, b: int, lengths: list[int], h: int, hv: int, chunk: int, late: bool) -> None:
    check(Case(kind, b, lengths, h, hv, 8, 6, late=late), chunk, 1e-12)


@pytest.mark.parametrize("kind", DECAYS)
def test_tiles(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results do not depend on where tiles end, batch rows included."""
    case = Case(kind, 3, [70], 2, 4, 8, 6)
    whole = case.actual(8)
    monkeypatch.setattr(grid, "TILE_ELEMENTS", 1)
    for name, x in case.actual(8).items():
        torch.testing.assert_close(x, whole[name], rtol=1e-12, atol=1e-12)
    monkeypatch.setattr(grid, "TILE_ELEMENTS", 8 * 8 * 4 * 2)
    check(case, 8, 1e-12)


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("fill", [mild, slow, zero, strong, mixed])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gates(kind: str, fill: Callable, dtype: torch.dtype) -> None:
    case = Case(kind, 1, [1100, 37], 1, 2, 16, 16, fill)
    case.round(torch.float32)
    check(case, 64, 2e-5 if dtype == torch.float32 else 1e-10, dtype)


@pytest.mark.parametrize("late", [True, False])
def test_none_fp32(late: bool) -> None:
    case = Case("none", 2, [1100], 1, 2, 16, 16, late=late)
    case.round(torch.float32)
    check(case, 64, 2e-5, torch.float32)


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_resets(kind: str, dtype: torch.dtype) -> None:
    """A gate of -inf forgets everything, without NaN, and has a gradient of exactly zero."""
    case = Case(kind, 1, [130, 20], 2, 2, 8, 8, resets)
    case.round(torch.float32)
    check(case, 32, 2e-5 if dtype == torch.float32 else 1e-10, dtype)
    assert case.g is not None
    assert (case.actual(32, dtype)["dg"][torch.isinf(case.g)] == 0).all()


@pytest.mark.parametrize("kind", ["scalar", "vector"])
def test_reset_is_complete(kind: str) -> None:
    """Nothing before a reset shows after it, to the last bit."""
    case = Case(kind, 1, [90], 2, 2, 8, 8)
    assert case.g is not None
    case.g[:, 37] = -math.inf
    one = case.actual(32, torch.float32)
    case.v[:, :37] *= 1e3
    case.entering = None
    two = case.actual(32, torch.float32)
    assert torch.equal(one["o"][:, 37:], two["o"][:, 37:])
    assert torch.equal(one["leaving"], two["leaving"])


@pytest.mark.parametrize("kind", ["constant", "scalar", "vector"])
@pytest.mark.parametrize("value", [-math.inf, -1e30, -1e4])
def test_all_closed(kind: str, value: float) -> None:
    check(
        Case(kind, 1, [70], 2, 2, 8, 8, lambda shape: torch.full(shape, value, dtype=torch.float64)),
        16,
        2e-6,
        torch.float32,
    )


@pytest.mark.parametrize("kind", DECAYS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 4e-3), (torch.float16, 5e-4)])
def test_half(kind: str, dtype: torch.dtype, tolerance: float) -> None:
    """Half precision costs the rounding of inputs and results, nothing in between."""
    case = Case(kind, 1, [200, 57], 2, 4, 16, 16)
    case.round(dtype)
    check(case, 64, tolerance, dtype)


@pytest.mark.parametrize("kind", DECAYS)
def test_maps(kind: str) -> None:
    """maps applied to any state is what finish returns."""
    case = Case(kind, 1, [40, 0, 13], 2, 4, 8, 6)
    forward = ChunkForward(case.q, case.k, case.v, case.g, SCALE, case.lengths, 16)
    backward = ChunkBackward(case.q, case.k, case.v, case.g, SCALE, case.lengths, 16, case.entering, case.do)
    want = case.expected()
    for maps, arrived, name in (
        (forward.maps, case.entering, "leaving"),
        (backward.maps, case.grad_leaving, "dentering"),
    ):
        log, state = maps
        assert arrived is not None
        factor = torch.ones(()) if log is None else log.exp().view(*log.shape[:2], -1, 1)
        torch.testing.assert_close(state + factor * arrived, want[name], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", DECAYS)
def test_deterministic_and_independent(kind: str) -> None:
    """Same bits again, also with another call in flight and with garbage in the memory reused between calls."""
    case, other = Case(kind, 1, [150], 2, 2, 16, 16), Case(kind, 1, [80], 2, 2, 16, 16)
    first = case.actual(32, torch.float32)
    q, k, v, g = (None if x is None else x.float() for x in (case.q, case.k, case.v, case.g))
    forward = ChunkForward(q, k, v, g, SCALE, case.lengths, 32)
    other.actual(32, torch.float32)
    forward.intra()
    other.actual(64, torch.float32)
    o, leaving = forward.finish(case.entering.float())
    assert torch.equal(o, first["o"])
    assert torch.equal(leaving, first["leaving"])
    for held in [*function._memory._named.values(), *function._memory._spare]:
        held.fill_(math.nan)
    for name, x in case.actual(32, torch.float32).items():
        assert torch.equal(x, first[name]), name


def test_garbage_in_tiny_products() -> None:
    case = Case("scalar", 1, [7], 1, 1, 2, 2)
    case.actual(2)
    for held in [*function._memory._named.values(), *function._memory._spare]:
        held.fill_(math.nan)
    check(case, 2, 1e-12)


@pytest.mark.parametrize("kind", DECAYS)
def test_strided_inputs(kind: str) -> None:
    """Inputs may be views: heads first, or a slice of a fused projection."""
    case = Case(kind, 2, [64], 2, 2, 8, 8)
    want = case.actual(16)
    fused = torch.cat([case.q, case.k, case.v], -1)
    case.q, case.k, case.v = fused.split(8, -1)
    case.do = case.do.transpose(1, 2).contiguous().transpose(1, 2)
    for name, x in case.actual(16).items():
        assert torch.equal(x, want[name]), name


def test_inputs_survive() -> None:
    case = Case("vector", 1, [64], 2, 2, 8, 8)
    names = ("q", "k", "v", "g", "do", "entering", "grad_leaving")
    before = {name: getattr(case, name).clone() for name in names}
    case.actual(16)
    assert all(torch.equal(getattr(case, name), x) for name, x in before.items())


def test_results_are_not_reused_memory() -> None:
    """What one call returned, the next does not write to."""
    case = Case("scalar", 1, [64], 2, 2, 8, 8, late=False)
    first = case.actual(16)
    kept = {name: x.clone() for name, x in first.items()}
    case.v = case.v * 3
    case.actual(16)
    assert all(torch.equal(first[name], x) for name, x in kept.items())


def test_rejects() -> None:
    q = torch.zeros(2, 8, 2, 4)
    with pytest.raises(ValueError, match="do not cut"):
        ChunkForward(q, q, q, None, 1.0, [7], 4)
    with pytest.raises(ValueError, match="batch of 1"):
        ChunkForward(q, q, q, None, 1.0, [4, 4], 4)
    with pytest.raises(ValueError, match="multiple"):
        ChunkForward(q, q, torch.zeros(2, 8, 3, 4), None, 1.0, [8], 4)
