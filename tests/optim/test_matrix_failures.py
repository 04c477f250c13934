"""What goes wrong in a step of a matrix optimizer: found before anything is changed, the same on every rank."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from sharded_run import KINDS, OF_REKLS, RULES, gradients, groups_of, make, part_of, parts_of_rank
from torch import Tensor
from worlds import place, virtual_world

import weft
from weft.optim.matrix import engine, rule

pytestmark = pytest.mark.usefixtures("every_network")


@pytest.fixture(autouse=True)
def many_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices as small as these would travel all at once."""
    monkeypatch.setattr(engine, "BUCKET_BYTES", 64)


@pytest.fixture(
    autouse=True,
    params=[rule if rule in ("exact", "Muon") else pytest.param(rule, marks=pytest.mark.slow) for rule in RULES],
)
def label(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the optimizer of every rule in turn is called; `Run` has it."""
    monkeypatch.setattr(Run, "rule", request.param)
    return type(make([torch.nn.Parameter(torch.ones(1))], request.param)).__name__


class Run:
    """This rank's parts and their optimizer, after two good steps; then what they were is kept."""

    rule = ""

    def __init__(self, axis: weft.Axis, **options) -> None:
        self.axis = axis
        self.parameters = parts_of_rank(axis, True)
        self.optimizer = make(groups_of(self.parameters), self.rule, group=axis, **options)
        for step in range(2):
            self.give(step)
            self.optimizer.step()
        self.before = self.now()

    def give(self, step: int, changed: dict[int, Tensor | None] | None = None) -> None:
        """Gradients of a step, some of them changed."""
        for index, (kind, grad) in enumerate(zip(KINDS, gradients(step), strict=True)):
            self.parameters[index].grad = place(part_of(grad, kind, self.axis.rank, self.axis.size, True))
            if changed and index in changed:
                self.parameters[index].grad = place(changed[index])

    def now(self) -> list[Tensor]:
        states = (self.optimizer.state[parameter] for parameter in self.parameters)
        tensors = [value.clone() for state in states for value in state.values() if isinstance(value, Tensor)]
        return [parameter.detach().clone() for parameter in self.parameters] + tensors

    def is_as_before(self) -> bool:
        return all(torch.equal(*pair) for pair in zip(self.now(), self.before, strict=True))

    def goes_on(self) -> Tensor:
        """A good step, as if nothing had happened."""
        self.give(2)
        self.optimizer.step()
        return torch.cat([parameter.detach().flatten() for parameter in self.parameters])


def undisturbed(size: int, **options) -> list[Tensor]:
    return virtual_world(size).run(lambda axis: Run(axis, **options).goes_on()).results


def outcomes(program, size: int = 3) -> list[tuple[str, bool, Tensor]]:
    """(error, nothing changed, weights after another step) of each rank."""

    def run(axis: weft.Axis) -> tuple[str, bool, Tensor]:
        made = Run(axis)
        try:
            program(made)
            words = ""
        except (ValueError, RuntimeError) as error:
            words = f"{type(error).__name__}: {error}"
        return words, made.is_as_before(), made.goes_on()

    return virtual_world(size).run(run).results


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("index", [0, 2, 4, 6])
def test_a_gradient_that_is_not_finite(index: int, value: float, label: str) -> None:
    def program(made: Run) -> None:
        bad = torch.full_like(made.parameters[index], value)
        made.give(2, {index: bad} if made.axis.rank == 1 else None)
        made.optimizer.step()

    good = undisturbed(3)
    for rank, (words, kept, after) in enumerate(outcomes(program)):
        assert words == (
            f"RuntimeError: {label}: the gradient of parameter 0 of group {index} is not finite on rank 1 of 3; "
            f"weights and state are as before"
        )
        assert kept and torch.equal(after, good[rank])


def test_a_step_that_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    def program(axis: weft.Axis) -> tuple[bool, Tensor]:
        made = Run(axis, on_nonfinite="skip")
        made.give(2, {2: torch.full((8, 8), math.nan)} if axis.rank == 2 else None)
        made.optimizer.step()
        return made.is_as_before(), made.goes_on()

    good = undisturbed(3)
    with caplog.at_level(logging.WARNING):
        for rank, (kept, after) in enumerate(virtual_world(3).run(program).results):
            assert kept and torch.equal(after, good[rank])
    assert "not finite on rank 2 of 3; weights and state are as before: the step is skipped (rank 0)" in caplog.text


@pytest.mark.parametrize("index", [0, 2, 3])
def test_a_gradient_that_is_missing_on_some_ranks(index: int, label: str) -> None:
    def program(made: Run) -> None:
        made.give(2, {index: None} if made.axis.rank in (0, 2) else None)
        made.optimizer.step()

    good = undisturbed(3)
    for rank, (words, kept, after) in enumerate(outcomes(program)):
        assert f"ValueError: {label}: parameter 0 of group {index} has no gradient on ranks 0, 2 of 3, but on" in words
        assert kept and torch.equal(after, good[rank])


def _has_moved(weight: Tensor) -> bool:
    """From ones, and a gradient that is the same everywhere: which way its null space goes is chance for some rules.

    SOAP's first step makes no update: then by weight decay alone.
    """
    return bool(torch.isfinite(weight).all()) and not torch.equal(weight, torch.ones_like(weight))


def test_a_fault_of_one_rank_reaches_all_of_a_mesh() -> None:
    """Ranks that share no group with it must not be left waiting."""

    def program(axis: weft.Axis) -> tuple[str, Tensor]:
        row, column = divmod(axis.rank, 2)
        weight = place(torch.nn.Parameter(torch.ones(2, 3)))
        optimizer = make(
            [{"params": [weight], "partition_dim": 0}], Run.rule, lr=0.1,
            group=axis.subset([2 * row, 2 * row + 1]), data_group=axis.subset([column, 2 + column]),
        )  # fmt: skip
        weight.grad = None if axis.rank == 3 else torch.ones_like(weight)
        with pytest.raises(ValueError, match="has no gradient on rank 1 of 2, but on other ranks") as caught:
            optimizer.step()
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        return str(caught.value), weight.detach()

    results = virtual_world(4).run(program).results
    assert len({words for words, _ in results}) == 1 and all(_has_moved(weight) for _, weight in results)


def test_a_gradient_that_is_missing_everywhere_is_passed_over() -> None:
    def program(axis: weft.Axis) -> list[float]:
        made = Run(axis)
        made.give(2, {0: None, 2: None, 3: None})
        made.optimizer.step()
        assert torch.equal(made.parameters[2].detach(), made.before[2])
        return [float(made.optimizer.state[parameter]["step"]) for parameter in made.parameters]

    for steps in virtual_world(3).run(program).results:
        assert steps == [2 if index in (0, 2, 3) else 3 for index in range(len(KINDS))]


def test_replicated_gradients_that_were_not_averaged(label: str) -> None:
    def program(made: Run) -> None:
        made.give(2, {2: torch.randn(8, 8, generator=torch.Generator().manual_seed(made.axis.rank))})
        made.optimizer.step()

    for words, kept, _ in outcomes(program):
        assert (
            f"ValueError: {label}: the gradients of replicated parameters differ between the 3 ranks of group" in words
        )
        assert "average them first" in words and kept


def test_ranks_whose_learning_rates_differ(label: str) -> None:
    def program(made: Run) -> None:
        made.give(2)
        rate, group = made.optimizer.param_groups[0]["lr"], made.optimizer.param_groups[0]
        group["lr"] = 0.02 if made.axis.rank == 1 else 0.01
        try:
            made.optimizer.step()
        finally:
            group["lr"] = rate

    for words, kept, _ in outcomes(program):
        assert f"DisagreementError: {label}.step: the ranks disagree" in words and "lr=0.02" in words and kept


def test_a_wrong_learning_rate_on_one_rank() -> None:
    def program(made: Run) -> None:
        made.give(2)
        group = made.optimizer.param_groups[0]
        group["lr"] = -1.0 if made.axis.rank == 1 else 0.01
        try:
            made.optimizer.step()
        finally:
            group["lr"] = 0.01

    for words, kept, _ in outcomes(program):
        assert "lr, eps and weight_decay must be finite and not negative, got -1.0" in words and kept


@pytest.mark.parametrize("label", OF_REKLS, indirect=True)
@pytest.mark.parametrize("broken", ["in fp32", "always"])
def test_a_decomposition_that_fails(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32 only: done again in fp64. Always: nothing is changed anywhere, though one owner alone has noticed."""
    real, failures = torch.linalg.eigh, []

    def eigh(matrix: Tensor):
        if failures and matrix.shape[0] == 7 and (broken == "always" or matrix.dtype == torch.float32):
            failures.append(matrix.dtype)
            raise torch.linalg.LinAlgError("did not converge")
        return real(matrix)

    monkeypatch.setattr(rule.torch.linalg, "eigh", eigh)

    def program(axis: weft.Axis) -> tuple[str, bool, Tensor]:
        made = Run(axis)
        made.give(2)
        words = ""
        failures.append(None)
        try:
            made.optimizer.step()
        except RuntimeError as error:
            words = str(error)
        failures.clear()
        kept = made.is_as_before()
        return words, kept, made.goes_on() if kept else torch.cat([p.detach().flatten() for p in made.parameters])

    good = undisturbed(3)
    failures.clear()
    for rank, (words, kept, after) in enumerate(virtual_world(3).run(program).results):
        assert kept == (broken == "always")
        if broken == "always":
            assert words == (
                "REKLS: the update of parameter 0 of group 0 could not be computed; weights and state are as before"
            )
            assert torch.equal(after, good[rank])
        else:
            assert words == "" and torch.isfinite(after).all()


def test_infinities_that_one_ranks_scaler_found() -> None:
    """Every rank passes the step over, in silence: a GradScaler does so by rule."""

    def program(axis: weft.Axis) -> tuple[bool, Tensor]:
        made = Run(axis)
        made.give(2)
        scaler = place((torch.tensor(1.0), torch.tensor(float(axis.rank == 1))))
        made.optimizer.grad_scale, made.optimizer.found_inf = scaler
        made.optimizer.step()
        del made.optimizer.grad_scale, made.optimizer.found_inf
        return made.is_as_before(), made.goes_on()

    good = undisturbed(3)
    for rank, (kept, after) in enumerate(virtual_world(3).run(program).results):
        assert kept and torch.equal(after, good[rank])


def test_gradients_that_unscaling_makes_infinite() -> None:
    def program(made: Run) -> None:
        made.give(2)
        made.optimizer.grad_scale = place(torch.tensor(1e-39))
        try:
            made.optimizer.step()
        finally:
            del made.optimizer.grad_scale

    for words, kept, _ in outcomes(program):
        assert "could not be computed; weights and state are as before" in words and kept


def test_a_sum_that_overflows_has_a_mean() -> None:
    def program(axis: weft.Axis) -> Tensor:
        weight = place(torch.nn.Parameter(torch.ones(2, 3)))
        optimizer = make([weight], Run.rule, lr=0.1, group=axis.subset([axis.rank]), data_group=axis)
        weight.grad = torch.full_like(weight, 3e38)
        optimizer.step()
        return weight.detach()

    for weight in virtual_world(2).run(program).results:
        assert _has_moved(weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [1e-40, 1e-25, 1e20, 3e38])
def test_gradients_of_any_size_leave_finite_weights(dtype: torch.dtype, size: float) -> None:
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((6, 9), (5,), (3, 1))]
    optimizer = make(parameters, Run.rule)
    for step in range(6):
        for parameter in parameters:
            parameter.grad = (torch.rand(parameter.shape) - 0.5).to(dtype) * (size if step % 3 else 1.0)
        optimizer.step()
    for parameter in parameters:
        assert torch.isfinite(parameter).all()
        assert (
            Run.rule.startswith("exact") or parameter.abs().max() < 10
        )  # the published one leaps: it keeps V as bases turn
        for value in optimizer.state[parameter].values():
            assert torch.isfinite(value).all()
