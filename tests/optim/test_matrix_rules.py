"""The rules Muon, NorMuon and SOAP, as functions: the updates of their equations, and the bits of torch's Muon."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import published_rules
import pytest
import torch
from torch import Tensor

from weft.optim.matrix.muon import MUON as muon
from weft.optim.matrix.muon import MuonSettings, advance_momentum, orthogonalize
from weft.optim.matrix.normuon import NORMUON as normuon
from weft.optim.matrix.normuon import NorMuonSettings
from weft.optim.matrix.rule import FactorSettings
from weft.optim.matrix.soap import SOAP_RULE as soap

SHAPES = [(6, 9), (12, 5), (16, 16), (1, 4), (4, 1)]
KINDS: dict[Any, type[Any]] = {muon: MuonSettings, normuon: NorMuonSettings, soap: FactorSettings}
JUDGES = {muon: published_rules.Muon, normuon: published_rules.NorMuon, soap: published_rules.SOAP}
CLOSE = {torch.float64: 1e-10, torch.float32: 2e-4}
EVERY = 4  # by then the factors have full rank: what a power iteration does with a null space is chance
FIVE = [(4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037), (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012)]  # fmt: skip


class Alone:
    """A rule on one matrix, as the engine calls it."""

    def __init__(self, rule: Any, weight: Tensor, lr: float = 0.02, decay: float = 0.0, method: str = "l2",
                 eps: float = 1e-8, betas: tuple[float, float] = (0.95, 0.95), every: int = EVERY,
                 **options: Any) -> None:  # fmt: skip
        own = {"shampoo_beta": 0.95, "max_factor_dim": 8192, "root_every": 10, "dense_steps": 0}
        options = (own if rule is soap else {"ns_dtype": torch.float32}) | options
        self.rule, self.weight, self.every, self.number = rule, weight.clone(), every, 0
        self.settings = KINDS[rule](lr, betas, eps, decay, method, False, **options)
        layout = rule.layout(tuple(weight.shape), weight.dtype, self.settings)
        self.state: dict[str, Any] = {
            name: torch.zeros(shape, dtype=dtype, device=weight.device) for name, (shape, dtype) in layout.items()
        }
        self.layout = layout
        rule.derive(self.state, (), zero=True)

    def advance(self, grad: Tensor, due: str | None = None) -> tuple[dict[str, Any], Tensor]:
        if due is None:
            due = "LR" if self.every and self.number % self.every == 0 else ""
        decays = self.settings.weight_decay_method == "l2" and self.settings.weight_decay != 0
        state = self.state | {"step": torch.tensor(float(self.number))}
        return self.rule.advance_here(state, grad, self.weight if decays else None, self.settings, due)

    def step(self, grad: Tensor, due: str | None = None) -> None:
        new, update = self.advance(grad, due)
        assert set(new) == set(self.layout)
        assert all((new[name].shape, new[name].dtype) == kind for name, kind in self.layout.items())
        assert all(value.is_contiguous() for value in (*new.values(), update))
        self.state, self.number = new, self.number + 1
        if self.settings.weight_decay_method == "decoupled":
            self.weight.mul_(1 - self.settings.lr * self.settings.weight_decay)
        self.weight.sub_(update, alpha=self.rule.rate(tuple(self.weight.shape), self.settings))


def gradients(shape: tuple[int, ...], count: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
    make = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=make, dtype=torch.float64).to(dtype) for _ in range(count)]


def follow(found: Alone, wanted: Any, grads: Sequence[Tensor], limit: float) -> None:
    """Both take the steps, and after each have moved the weight alike."""
    start = found.weight.clone()
    for grad in grads:
        found.step(grad)
        wanted.step(grad)
        assert torch.isfinite(found.weight).all()
        torch.testing.assert_close(found.weight - start, wanted.weight - start, rtol=limit, atol=limit)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("scale", ["original", "spectral", "rms"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("rule", [muon, normuon], ids=["muon", "normuon"])
def test_muon_and_normuon_are_their_equations(
    rule: Any, nesterov: bool, scale: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    weight, *grads = gradients(shape, 8, dtype)
    wanted = JUDGES[rule](weight, 0.02, nesterov=nesterov, scale=scale)
    follow(Alone(rule, weight, nesterov=nesterov, scale=scale), wanted, grads, CLOSE[dtype])


@pytest.mark.parametrize("shape", [(6, 9), (12, 5)])
@pytest.mark.parametrize("rule", [muon, normuon], ids=["muon", "normuon"])
def test_every_number_of_muon_counts(rule: Any, shape: tuple[int, int]) -> None:
    weight, *grads = gradients(shape, 6)
    for ours, theirs in [
        ({"momentum": 0.7}, {"momentum": 0.7}),
        ({"decay": 0.1}, {"decay": 0.1}),
        ({"ns_steps": 3}, {"coefficients": [published_rules.QUINTIC] * 3}),
        ({"ns_coefficients": (2.0, -1.5, 0.5)}, {"coefficients": [(2.0, -1.5, 0.5)] * 5}),
        ({"ns_coefficients": FIVE}, {"coefficients": FIVE}),
        ({"ns_coefficients": tuple(FIVE[:2])}, {"coefficients": FIVE[:2]}),
        ({"ns_eps": 50.0}, {"eps": 50.0}),
    ]:
        follow(Alone(rule, weight, **ours), JUDGES[rule](weight, 0.02, **theirs), grads, 1e-10)
    if rule is normuon:
        follow(Alone(rule, weight, beta2=0.5), JUDGES[rule](weight, 0.02, beta2=0.5), grads, 1e-10)
        follow(Alone(rule, weight, eps=0.3), JUDGES[rule](weight, 0.02, row_eps=0.3), grads, 1e-10)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {}),
        ({"decay": 0.1}, {"decay": 0.1}),
        ({"betas": (0.8, 0.99)}, {"betas": (0.8, 0.99)}),
        ({"shampoo_beta": 0.6}, {"beta": 0.6}),
        ({"eps": 0.1}, {"eps": 0.1}),
        ({"every": 0}, {"every": 0}),
    ],
    ids=["default", "l2", "betas", "shampoo_beta", "eps", "never due"],
)
def test_soap_is_its_equations(
    ours: dict[str, Any], theirs: dict[str, Any], dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    weight, *grads = gradients(shape, 14, dtype)
    wanted = published_rules.SOAP(weight, 0.02, **{"every": EVERY} | theirs)
    limit = {torch.float64: 1e-9, torch.float32: 3e-3}[dtype]
    follow(Alone(soap, weight, **ours), wanted, grads, limit)


@pytest.mark.parametrize(("longest", "sides"), [(5, "R"), (1, ""), (12, "LR")])
def test_soap_leaves_long_sides_alone(longest: int, sides: str) -> None:
    weight, *grads = gradients((12, 5), 10)
    found = Alone(soap, weight, max_factor_dim=longest)
    assert {"L", "R"} & set(found.state) == set(sides)
    follow(found, published_rules.SOAP(weight, 0.02, every=EVERY, sides=sides), grads, 1e-9)


def test_soap_follows_only_the_sides_that_are_due() -> None:
    """The momentum is carried along: outside of the bases it is the same whichever followed."""
    weight, *grads = gradients((6, 9), 9)
    found = Alone(soap, weight)
    for grad in grads[:6]:
        found.step(grad, "")
    wanted, _ = found.advance(grads[6], "")
    outside = found.state["Q_L"] @ wanted["exp_avg"] @ found.state["Q_R"].mT
    for due in ("", "L", "R", "LR"):
        new, _ = found.advance(grads[6], due)
        for side in "LR":
            assert torch.equal(new[f"Q_{side}"], found.state[f"Q_{side}"]) == (side not in due)
            ours = new[f"Q_{side}"]
            torch.testing.assert_close(ours.mT @ ours, torch.eye(len(ours), dtype=ours.dtype))
        torch.testing.assert_close(new["Q_L"] @ new["exp_avg"] @ new["Q_R"].mT, outside)
        assert torch.equal(new["exp_avg_sq"].flatten().sort()[0], wanted["exp_avg_sq"].flatten().sort()[0])


def test_soap_begins_with_eigenvectors_and_keeps_them_while_gradients_are_zero() -> None:
    weight, grad = gradients((6, 9), 2)
    found = Alone(soap, weight)
    found.step(grad)
    assert torch.equal(found.weight, weight)
    sizes = torch.linalg.svdvals(grad).square() * 0.05
    for side, dim in (("L", 6), ("R", 9)):
        turned = found.state[f"Q_{side}"].mT @ found.state[side] @ found.state[f"Q_{side}"]
        torch.testing.assert_close(turned, torch.cat([sizes, sizes.new_zeros(dim - 6)]).diag())
    zero = Alone(soap, weight, decay=0.1)
    zero.step(torch.zeros_like(grad))
    bases = [zero.state[f"Q_{side}"] for side in "LR"]
    zero.step(torch.zeros_like(grad), "LR")
    assert zero.state["exp_avg_sq"].all()  # by the decay
    assert all(torch.equal(zero.state[f"Q_{side}"], basis) for side, basis in zip("LR", bases, strict=True))


def test_normuon_measures_rows_of_what_bf16_made_in_fp32() -> None:
    weight, grad = gradients((12, 130), 2, torch.float32)
    found = Alone(normuon, weight, ns_dtype=torch.bfloat16)
    _, ahead = advance_momentum(found.state["momentum_buffer"], grad, None, found.settings)
    new, update = found.advance(grad)
    rows = orthogonalize(ahead, found.settings).double().square().mean(1, keepdim=True) * 0.05
    torch.testing.assert_close(new["second_momentum_buffer"].double(), rows, rtol=1e-6, atol=0)
    assert update.dtype == torch.float32 and orthogonalize(ahead, found.settings).dtype == torch.bfloat16


def test_power_iterations_find_the_eigenbasis() -> None:
    """On a factor that stays, the bases become its eigenvectors, in their order."""
    make = torch.Generator().manual_seed(3)
    grad = torch.linalg.qr(torch.randn(6, 6, generator=make, dtype=torch.float64))[0] * 2.0 ** torch.arange(6)
    found = Alone(soap, torch.zeros(6, 6, dtype=torch.float64))
    found.step(gradients((6, 6), 1, seed=4)[0])
    for _ in range(60):
        found.step(grad, "LR")
    turned = found.state["Q_L"].mT @ (grad @ grad.mT) @ found.state["Q_L"]
    torch.testing.assert_close(turned, (4.0 ** torch.arange(5, -1, -1, dtype=torch.float64)).diag(), atol=0.05, rtol=0)


@pytest.mark.parametrize("rule", KINDS, ids=["muon", "normuon", "soap"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_zero_gradient_is_one_like_others(shape: tuple[int, int], rule: Any) -> None:
    """At first it moves nothing, and makes bases that are as good as any."""
    weight, *grads = gradients(shape, 9)
    zero = torch.zeros_like(weight)
    options = {"every": 0} if rule is soap else {}
    found, wanted = Alone(rule, weight, **options), JUDGES[rule](weight, 0.02, **options)
    follow(found, wanted, [zero, zero], 0)
    assert torch.equal(found.weight, weight)
    follow(found, wanted, [*grads[:5], zero, *grads[5:]], 1e-9)


@pytest.mark.parametrize("rule", KINDS, ids=["muon", "normuon", "soap"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", CLOSE)
def test_rank_one_and_rows_of_zeros_make_finite_steps(dtype: torch.dtype, shape: tuple[int, int], rule: Any) -> None:
    weight, *grads = gradients(shape, 12, dtype)
    thin = grads[0][:, :1] @ grads[0][:1]
    holes = [grad.index_fill(0, torch.tensor([0]), 0.0) for grad in grads]
    for some in ([thin] * 6, holes, [torch.zeros_like(thin), *[thin] * 6]):
        ours, theirs = Alone(rule, weight), JUDGES[rule](weight, 0.02, **({"every": EVERY} if rule is soap else {}))
        for grad in some:
            ours.step(grad)
            theirs.step(grad)
            assert torch.isfinite(ours.weight).all() and torch.isfinite(theirs.weight).all()
            assert all(torch.isfinite(value).all() for value in ours.state.values())


@pytest.mark.parametrize("rule", KINDS, ids=["muon", "normuon", "soap"])
@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
def test_a_matrix_may_be_empty(shape: tuple[int, int], rule: Any) -> None:
    found = Alone(rule, torch.zeros(shape))
    for _ in range(3):
        found.step(torch.zeros(shape), "LR")


@pytest.mark.parametrize("rule", KINDS, ids=["muon", "normuon", "soap"])
@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("ns_dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_a_gradient_of_any_size_makes_the_same_step(rule: Any, dtype: torch.dtype, ns_dtype: torch.dtype) -> None:
    """Norms and squares would overflow; powers of two are taken out, and so the bits are the same."""
    weight, *grads = gradients((6, 9), 6, dtype)
    options = {} if rule is soap else {"ns_dtype": ns_dtype, "scale": "rms"}
    largest = torch.finfo(dtype).max
    for large in (2.0**45, 2.0**70, 2.0**120, 2.0**490, 2.0**1000):
        if large * 64 > largest:
            continue
        one, other = (Alone(rule, weight, eps=0.0, **options) for _ in range(2))
        for grad in grads:
            one.step(grad)
            other.step(grad * large)
        if rule is soap:  # what is large is cut down in each gradient by itself
            assert torch.isfinite(other.weight).all() and not torch.equal(other.weight, weight)
        else:
            assert torch.equal(one.weight, other.weight)
    other = Alone(rule, weight, **options)
    for grad in grads:
        other.step(grad.sign() * largest)
        assert all(torch.isfinite(value).all() for value in (other.weight, *other.state.values()))
    assert not torch.equal(other.weight, weight)
    for small in (1e-12, 1e-30, 1e-44):
        other = Alone(rule, weight, **options)
        for grad in grads:
            other.step(grad * small)
            assert torch.isfinite(other.weight).all()
    if rule is normuon and dtype == torch.float32:
        tiny = Alone(rule, torch.zeros_like(weight), ns_dtype=torch.float32)
        tiny.step(grads[0] * 1e-37)
        torch.testing.assert_close(tiny.weight.square().mean().sqrt(), torch.tensor(0.02 * 0.2))


@pytest.mark.parametrize("rule", KINDS, ids=["muon", "normuon", "soap"])
def test_a_step_that_is_dropped_leaves_no_trace(rule: Any) -> None:
    weight, *grads = gradients((6, 9), 8, torch.float32)
    found = Alone(rule, weight, decay=0.1)
    for grad in grads:
        before = copy.deepcopy((found.state, found.weight, grad))
        found.advance(grad)
        assert all(torch.equal(found.state[name], value) for name, value in before[0].items())
        assert torch.equal(found.weight, before[1]) and torch.equal(grad, before[2])
        found.step(grad)


@pytest.mark.parametrize("rule", KINDS, ids=["muon", "normuon", "soap"])
def test_what_is_loaded_goes_on_with_the_same_bits(rule: Any) -> None:
    weight, *grads = gradients((12, 5), 12, torch.float32)
    one = Alone(rule, weight)
    for number, grad in enumerate(grads):
        if number == 6:
            other = copy.copy(one)
            other.weight = one.weight.clone()
            other.state = {name: torch.tensor(value.tolist(), dtype=value.dtype) for name, value in one.state.items()}
            rule.derive(other.state, ())
        one.step(grad)
        if number >= 6:
            other.step(grad)
    assert torch.equal(one.weight, other.weight)
    assert all(torch.equal(one.state[name], other.state[name]) for name in one.state)


@pytest.mark.parametrize("shape", [*SHAPES, (64, 33), (48, 130)])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust", [None, "original", "match_rms_adamw"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_muon_has_the_bits_of_torch(
    dtype: torch.dtype, adjust: str | None, nesterov: bool, shape: tuple[int, int]
) -> None:
    weight, *grads = gradients(shape, 9, dtype)
    scale = "rms" if adjust == "match_rms_adamw" else "original"
    for size, options in [
        (1.0, {}), (1e-9, {}), (1e15, {}), (1.0, {"momentum": 0.4, "ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5)})
    ]:  # fmt: skip
        parameter = torch.nn.Parameter(weight.clone())
        theirs = torch.optim.Muon([parameter], 0.02, 0.1, nesterov=nesterov, adjust_lr_fn=adjust, **options)
        ours = Alone(
            muon, weight, decay=0.1, method="decoupled", nesterov=nesterov, scale=scale, ns_dtype=torch.bfloat16,
            **options,
        )  # fmt: skip
        for grad in grads:
            parameter.grad = (grad * size).clone()
            theirs.step()
            ours.step(grad * size)
            assert torch.equal(ours.state["momentum_buffer"], theirs.state[parameter]["momentum_buffer"])
            assert torch.equal(ours.weight, parameter.detach())


@pytest.mark.parametrize("rule", KINDS, ids=["muon", "normuon", "soap"])
@pytest.mark.parametrize("ns_dtype", [torch.bfloat16, torch.float32])
def test_on_a_device_the_host_waits_for_decompositions_only(rule: Any, ns_dtype: torch.dtype, sim: Any) -> None:
    weight, *grads = gradients((6, 5), 6, torch.float32)
    options: dict[str, Any] = {"decay": 0.1} if rule is soap else {"decay": 0.1, "ns_dtype": ns_dtype}
    on_cpu, on_sim = Alone(rule, weight, **options), Alone(rule, weight.to("sim"), **options)
    for number, grad in enumerate(grads):
        there = grad.to("sim")
        sim.host_syncs.clear()
        on_sim.step(there)
        assert sum(sim.host_syncs.values()) == (2 if rule is soap and number == 0 else 0)
        on_cpu.step(grad)
    assert torch.equal(on_sim.weight.cpu(), on_cpu.weight)
