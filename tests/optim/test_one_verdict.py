"""What no part expects, loads that fail, backwards that fail: one verdict on all ranks, and then on as before."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mixed_model import Mixed, backward, overlapped, weights_in_memory
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers
from worlds import place, virtual_world

import weft
import weft.optim.slices.adamw
from weft import optim
from weft.optim.matrix import stable
from weft.optim.rows.state import RowUpdate

pytestmark = pytest.mark.usefixtures("every_network")


def now(model: Mixed, step: optim.OverlappedStep) -> list[Tensor]:
    kept = [value.clone() for part in step.parts.values() for s in part.state.values() for value in s.values()]
    return [*weights_in_memory(model), *kept]


def rates(step: optim.OverlappedStep) -> list[float]:
    return [group["lr"] for part in step.parts.values() for group in part.param_groups]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


class Trouble:
    """Lets one rank's call of something raise, once it is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: type[BaseException]) -> None:
        self.armed, original = False, getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            if self.armed and weft.Axis.of(None).rank == 1:
                raise error("no memory for 3 GB")
            return original(*args, **options)

        monkeypatch.setattr(owner, name, call)


PLACES = [
    (weft.optim.slices.adamw, "adamw", "ShardedAdamW", "the work on parameter"),
    (stable, "_inverse_root", "REKLS", "the work on parameter"),
    (RowUpdate, "work", "RowAdam", "the work of RowAdam"),
    (optim.ShardedAdamW, "squared_norm", "ShardedAdamW", "the work of ShardedAdamW"),
    (RowUpdate, "copy_rows", "RowAdam", "the work of RowAdam"),
]


@pytest.mark.parametrize(
    ("owner", "name", "part", "what", "error"),
    [
        *((*one, torch.OutOfMemoryError) for one in PLACES),
        *(pytest.param(*PLACES[at], error, marks=pytest.mark.slow) for at, error in enumerate((MemoryError, KeyError))),
    ],
)
@pytest.mark.parametrize("early", [False, True])
def test_work_that_raises_is_one_verdict(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, part: str, what: str, error: type[Exception], early: bool
) -> None:
    """On one of three ranks, in any part: the same words on all, nothing changed, then on as before."""
    trouble = Trouble(monkeypatch, owner, name, error)

    def program(axis: weft.Axis, fails: bool) -> tuple[str, bool, list[Tensor]]:
        model = Mixed(axis)
        step = overlapped(model, axis, clip=1.0, overlap_backward=early)
        backward(model, axis, 0, 1)
        step.step()
        step.zero_grad()
        words, kept = "", True
        if fails:
            backward(model, axis, 1, 1)
            before = now(model, step)
            trouble.armed = True
            try:
                step.step()
            except RuntimeError as found:
                words = f"{type(found).__name__}: {found}"
            trouble.armed, kept = False, same(before, now(model, step))
            step.zero_grad()
        backward(model, axis, 1, 1)
        step.step()
        return words, kept, model.values()

    wanted = virtual_world(3).run(lambda axis: program(axis, False)).results
    found = virtual_world(3).run(lambda axis: program(axis, True)).results
    assert len({words for words, _, _ in found}) == 1, found
    for (words, kept, after), (_, _, other) in zip(found, wanted, strict=True):
        assert words.startswith(f"RuntimeError: OverlappedStep: {what}"), words
        assert f" raised {error.__name__}: " in words and words.endswith("(rank 1); weights and state are as before")
        assert kept and same(after, other)


@pytest.mark.parametrize("kind", ["ShardedAdamW", "REKLS"])
def test_work_of_a_part_alone_that_raises(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    places = {part: (owner, name) for owner, name, part, _ in PLACES[:2]}
    trouble = Trouble(monkeypatch, *places[kind], torch.OutOfMemoryError)

    def program(axis: weft.Axis) -> tuple[str, bool, list[Tensor], list[Tensor]]:
        models = [place(nn.ParameterList(torch.ones(4, 5) for _ in range(2))) for _ in range(2)]
        alone = axis.subset([axis.rank])
        both = [
            optim.ShardedAdamW(model.parameters(), group=axis) if kind == "ShardedAdamW"
            else optim.REKLS(model.parameters(), lr=0.1, variant="stable", group=alone, data_group=axis)
            for model in models
        ]  # fmt: skip
        for model in models:
            sum((p * (1 + axis.rank)).square().sum() for p in model).backward()
        trouble.armed, words = True, ""
        before = [p.detach().clone() for p in models[0].parameters()]
        try:
            both[0].step()
        except RuntimeError as error:
            words = str(error)
        trouble.armed, kept = False, same(before, list(models[0].parameters()))
        both[0].step(), both[1].step()
        return words, kept, *([p.detach() for p in model.parameters()] for model in models)

    for words, kept, one, other in virtual_world(2).run(program).results:
        assert words.startswith(f"{kind}: the work on parameter ") and words.endswith(
            " of group 0 raised OutOfMemoryError: no memory for 3 GB (rank 1); weights and state are as before"
        )
        assert kept and same(one, other)


def test_an_interrupt_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = optim.ShardedAdamW([parameter])
    parameter.grad = torch.ones(3)

    def interrupted(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(weft.optim.slices.adamw, "adamw", interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    assert torch.equal(parameter, torch.ones(3))
    optimizer.step()
    assert float(optimizer.state[parameter]["step"]) == 1


# Loading.


def test_states_are_loaded_as_often_as_one_likes() -> None:
    def program(axis: weft.Axis) -> tuple[list[Tensor], list[Tensor]]:
        ends = []
        for times in (0, 3):
            model = Mixed(axis)
            step = overlapped(model, axis)
            for number in range(3):
                backward(model, axis, number, 1)
                step.step()
                step.zero_grad()
                saved = step.state_dict()
                for _ in range(times):
                    step.load_state_dict(saved)
                    for name, part in step.parts.items():
                        part.load_state_dict(part.state_dict())
                        assert "differentiable" not in part.param_groups[0], name
            ends.append(model.values())
        return ends[0], ends[1]

    for plain, loaded in virtual_world(2).run(program).results:
        assert all(torch.allclose(*pair, rtol=0, atol=1e-6) for pair in zip(plain, loaded, strict=True))


def wrong_shape(saved: dict) -> None:
    state = saved["state"][max(saved["state"])]
    state["exp_avg"] = torch.zeros(2, 3)


def without_a_moment(saved: dict) -> None:
    del saved["state"][max(saved["state"]) - 2]["exp_avg_sq"]


def without_groups(saved: dict) -> None:
    del saved["param_groups"]


def of_amsgrad(saved: dict) -> None:
    saved["param_groups"][-1]["amsgrad"] = True


@pytest.mark.parametrize("damage", [wrong_shape, without_a_moment, without_groups, of_amsgrad])
@pytest.mark.parametrize("where", ["one rank", "all"])
def test_a_load_is_all_or_nothing(damage: Callable[[dict], None], where: str) -> None:
    """What a later part cannot load leaves the earlier ones as they are; on all ranks, in the same words."""

    def program(axis: weft.Axis) -> tuple[str, bool]:
        model = Mixed(axis)
        step = overlapped(model, axis)
        backward(model, axis, 0, 1)
        step.step()
        step.zero_grad()
        saved = step.state_dict()
        saved = {**saved, "state": {k: dict(v) for k, v in saved["state"].items()},
                 "param_groups": [dict(group) for group in saved["param_groups"]]}  # fmt: skip
        backward(model, axis, 1, 1)
        step.step()
        before, lrs = now(model, step), rates(step)
        for group in saved["param_groups"]:
            group["lr"] = 77.0
        if where == "all" or axis.rank == 1:
            damage(saved)
        words = ""
        try:
            step.load_state_dict(saved)
        except ValueError as error:
            words = str(error)
        return words, same(before, now(model, step)) and lrs == rates(step)

    found = virtual_world(3).run(program).results
    assert (
        len({words.replace("(rank 0)", "").replace("(rank 2)", "").replace("(rank 1)", "") for words, _ in found}) == 1
    )
    assert all(words and kept for words, kept in found)


def test_a_part_alone_that_one_rank_cannot_load() -> None:
    def program(axis: weft.Axis) -> tuple[str, str]:
        parameter, words = place(nn.Parameter(torch.ones(4, 4))), []
        for optimizer in (
            optim.ShardedAdamW([parameter], group=axis),
            optim.REKLS([parameter], lr=0.1, group=axis),
        ):
            saved = optimizer.state_dict()
            if axis.rank == 1:
                saved["state"][0]["exp_avg"] = torch.ones(3)
            try:
                optimizer.load_state_dict(saved)
                words.append("")
            except ValueError as error:
                words.append(str(error))
        return tuple(words)

    found = virtual_world(3).run(program).results
    assert len(set(found)) == 1
    assert found[0][0] == "ShardedAdamW: exp_avg of parameter 0 of group 0 is [3] in the state, not [4, 4]"
    assert found[0][1] == "REKLS: exp_avg of parameter 0 of group 0 is [3] in the state, not [4, 4]"


# A backward that fails on one rank.


class NoBackward(torch.autograd.Function):
    """Its backward raises. (Errors of hooks end a process in which a device's guard is written in Python.)"""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        raise MemoryError("no")


@pytest.mark.parametrize("at", ["forward", "first", "middle"])
def test_a_backward_that_fails_on_one_rank_is_given_up(at: str) -> None:
    """The others have sent gradients by then; all call zero_grad, and the next step is as if nothing had been.

    On NCCL too: gradients have a communicator of their own, whose ranks met when it was made.
    """

    def fails_at(place_of_failure: str, axis: weft.Axis, x: Tensor) -> Tensor:
        if axis.rank == 1 and at == "forward":
            raise MemoryError("no")
        return NoBackward.apply(x) if axis.rank == 1 and at == place_of_failure else x

    def program(axis: weft.Axis, fails: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model, x = place((nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), torch.ones(2, 4)))
        parts = [optim.ShardedAdamW(model[:2].parameters(), lr=0.1, group=axis, bucket_bytes=20),
                 optim.ShardedAdamW(model[2:].parameters(), lr=0.1, group=axis, bucket_bytes=20)]  # fmt: skip
        step = optim.OverlappedStep(parts, overlap_backward=True)
        for turn in range(3):
            if fails and turn == 1:
                try:
                    hidden = fails_at("middle", axis, model[:3](x * 7))
                    fails_at("first", axis, model[3](hidden)).sum().backward()
                except MemoryError:
                    assert axis.rank == 1
                step.zero_grad()
            model(x * (1 + axis.rank)).square().sum().backward()
            step.step()
            step.zero_grad()
        return [p.detach() for p in model.parameters()]

    wanted = virtual_world(3).run(lambda axis: program(axis, False)).results
    found = virtual_world(3).run(lambda axis: program(axis, True)).results
    assert all(same(one, other) for one, other in zip(found, wanted, strict=True))


# Schedulers, and parameters listed twice.

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, max_lr=0.1, total_steps=12),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "CyclicLR, lr only": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, step_size_up=3, cycle_momentum=False),
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda n: 1 / (1 + n)),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda n: 0.9),
    "StepLR": lambda o: schedulers.StepLR(o, 2),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [2, 4]),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, 0.5, 2),
    "LinearLR": lambda o: schedulers.LinearLR(o, 0.1),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 5),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 2),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, total_iters=2), schedulers.OneCycleLR(o, 0.1, total_steps=9)], [2]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.LinearLR(o, 0.1), schedulers.ExponentialLR(o, 0.9)]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_of_torch_take_an_overlapped_step(name: str, every_network: str) -> None:
    """The weights are those of torch's AdamW under the same scheduler, whose state can be saved."""
    if every_network != "ideal":
        return

    def train(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> list[Tensor]:
        parameters = [nn.Parameter(torch.full((n,), 2.0, dtype=torch.float64)) for n in (3, 4)]
        optimizer = make(parameters)
        scheduler = SCHEDULERS[name](optimizer)
        for number in range(6):
            for at, parameter in enumerate(parameters):
                parameter.grad = torch.linspace(-1, 1 + number + at, len(parameter), dtype=torch.float64)
            optimizer.step()
            scheduler.step(1.0) if name == "ReduceLROnPlateau" else scheduler.step()
            if number == 3:
                saved = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
                optimizer.load_state_dict(saved[0])
                scheduler.load_state_dict(saved[1])
        return [p.detach() for p in parameters]

    found = train(
        lambda ps: optim.OverlappedStep([optim.ShardedAdamW(ps[:1], lr=0.05), optim.ShardedAdamW(ps[1:], lr=0.05)])
    )
    wanted = train(lambda ps: torch.optim.AdamW([{"params": ps[:1]}, {"params": ps[1:]}], lr=0.05))
    assert same(found, wanted)


def test_a_parameter_listed_twice_is_refused_on_all_ranks() -> None:
    def program(axis: weft.Axis, kind: Callable) -> str:
        one, two, three = (place(nn.Parameter(torch.ones(4, 4))) for _ in range(3))
        try:
            kind([one, two, one if axis.rank == 1 else three], axis)
        except ValueError as error:
            return str(error)
        return ""

    kinds = {
        "ShardedAdamW": lambda ps, axis: optim.ShardedAdamW(ps, group=axis),
        "REKLS": lambda ps, axis: optim.REKLS(ps, lr=0.1, group=axis),
    }
    for name, kind in kinds.items():
        words = f"{name}: parameter 2 of a group is parameter 0 again; list each once (rank 1)"
        with pytest.warns(UserWarning, match="duplicate parameters"):
            assert virtual_world(2).run(lambda axis, kind=kind: program(axis, kind)).results == [words] * 2
