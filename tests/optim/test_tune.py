"""Orders in virtual time: what is replayed is the step, and what is found is better than what was there."""

from __future__ import annotations

import pytest
import torch
from mixed_model import Mixed, backward, overlapped
from torch import Tensor

import weft
from weft import optim
from weft.optim.step.orders import Orders
from weft.optim.step.replay import Hop, Profile, UnitProfile, replay
from weft.optim.step.tune import Tuning, search

MACHINE = weft.world.Machine(latency=1e-5, bandwidth=1e9, memory_bandwidth=4e9)


def matrices(axis: weft.Axis, **options) -> tuple[optim.OverlappedStep, list[torch.nn.Parameter]]:
    """Parts with much to send and little work, and with little to send and much work."""
    small = [torch.nn.Parameter(torch.ones(32, 32)) for _ in range(16)]
    large = [torch.nn.Parameter(torch.ones(20_000)) for _ in range(3)]
    parts = [optim.ShardedAdamW([one], lr=0.1, group=axis) for one in large]
    rekls = optim.REKLS(small, lr=0.1, variant="stable", group=axis.subset([axis.rank]), data_group=axis)
    rekls.cut(4096)
    parts.append(rekls)
    return optim.OverlappedStep(parts, **options), [*small, *large]


def give(parameters: list[torch.nn.Parameter], rank: int) -> None:
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(10 * number + rank))


def test_a_replay_takes_as_long_as_the_step() -> None:
    """In several orders: the step itself on virtual ranks, and its replay from one dry run."""
    orders = [["ShardedAdamW", "REKLS"], ["REKLS"], ["ShardedAdamW_3", "REKLS", "ShardedAdamW"]]

    def program(axis: weft.Axis, order: list[str]) -> tuple[float, float]:
        step, parameters = matrices(axis, work_order=order)
        give(parameters, axis.rank)
        step.step()
        tuning = step.tune(MACHINE, tries=1, show=False)
        assert tuning.orders == step.orders
        before = axis.wire.clock()
        step.step()
        return axis.wire.clock() - before, tuning.tried[0].predicted

    for order in orders:
        found = weft.world.VirtualWorld(4, MACHINE).run(lambda axis, o=order: program(axis, o)).results
        seconds = max(seconds for seconds, _ in found)
        assert found[0][1] == pytest.approx(seconds, rel=0.1)
        assert len({predicted for _, predicted in found}) == 1


def test_a_tuned_step_is_faster_in_virtual_time() -> None:
    """Than the order as listed, and by as much as was said; state and weights do not change by it."""

    slow = weft.world.Machine(latency=1e-5, bandwidth=3e8, flops=2e9)

    def program(axis: weft.Axis, tuned: bool) -> tuple[float, Tuning | None, list[Tensor]]:
        step, parameters = matrices(axis)
        give(parameters, axis.rank)
        tuning = step.tune(slow, tries=40, show=False) if tuned else None
        before = axis.wire.clock()
        step.step()
        return axis.wire.clock() - before, tuning, [p.detach() for p in parameters]

    plain = weft.world.VirtualWorld(4, slow).run(lambda axis: program(axis, False)).results
    tuned = weft.world.VirtualWorld(4, slow).run(lambda axis: program(axis, True)).results
    seconds = [max(result[0] for result in run) for run in (plain, tuned)]
    tuning = tuned[0][1]
    assert all(result[1] == tuning for result in tuned) and len(tuning.tried) == 40
    assert seconds[1] < 0.8 * seconds[0] and seconds[1] < 1.1 * tuning.bound
    present = next(one for one in tuning.tried if one.name == "present")
    assert tuning.tried[0].predicted / present.predicted == pytest.approx(seconds[1] / seconds[0], rel=0.1)
    assert all(one.predicted >= tuning.bound * 0.999 for one in tuning.tried)
    for one, other in zip(plain, tuned, strict=True):
        assert all(torch.equal(*pair) for pair in zip(one[2], other[2], strict=True))


def test_orders_of_one_long_and_one_short_unit() -> None:
    """By hand: the link is taken for 3 s by one unit and for 1 s by the other, which has 4 s of work."""
    long = UnitProfile([Hop([(1, 3000)], [(1, 3000)])], [], 0.0)
    short = UnitProfile([Hop([(1, 1000)], [(1, 1000)])], [], 4.0)
    other = [
        UnitProfile([Hop([(0, size)], [(0, size)])], [], unit.seconds) for size, unit in ((3000, long), (1000, short))
    ]
    profiles = {
        0: Profile({"long": long, "short": short}),
        1: Profile(dict(zip(("long", "short"), other, strict=True))),
    }
    world = weft.world.VirtualWorld(2, weft.world.Machine(latency=0.0, bandwidth=1000.0))
    assert replay(world, profiles, Orders(("long", "short"), ("long", "short"))) == pytest.approx(8.0, rel=0.01)
    assert replay(world, profiles, Orders(("short", "long"), ("short", "long"))) == pytest.approx(5.0, rel=0.01)
    assert replay(world, profiles, Orders(("short", "long"), ("short", "long")), naive=True) == pytest.approx(
        8.0, rel=0.01
    )
    best = search(world, profiles, Orders(("long", "short"), ("long", "short")), set(), 6)
    assert best[0].orders == Orders(("short", "long"), ("short", "long"))
    fixed = search(world, profiles, Orders(("long", "short"), ("long", "short")), {"long"}, 6)
    assert all(one.orders.scatter == ("long", "short") for one in fixed) and fixed[0].predicted == pytest.approx(
        8.0, rel=0.01
    )


def test_the_table_names_orders_and_what_is_exposed(capsys: pytest.CaptureFixture[str]) -> None:
    def program(axis: weft.Axis) -> None:
        model = Mixed(axis)
        optimizer = overlapped(model, axis)
        backward(model, axis, 0, 1)
        optimizer.tune(weft.world.VirtualWorld(2, MACHINE, rules="gloo"), tries=8)

    weft.world.VirtualWorld(2, MACHINE).run(program)
    shown = capsys.readouterr().out
    assert shown.count("orders of a step") == 1 and "predicted" in shown and "exposed" in shown and "present" in shown


def test_what_tune_refuses() -> None:
    axis = weft.Axis.of(None)
    model = Mixed(axis)
    optimizer = overlapped(model, axis)
    backward(model, axis, 0, 1)
    with pytest.raises(ValueError, match="needs a Machine, or a VirtualWorld with one and 1 ranks, got 2 ranks"):
        optimizer.tune(weft.world.VirtualWorld(2, MACHINE))
    with pytest.raises(ValueError, match="and machine=None"):
        optimizer.tune(weft.world.VirtualWorld(1))
    with pytest.raises(ValueError, match="tries and measure must be at least 1, got 0 and 3"):
        optimizer.tune(MACHINE, tries=0)
    model.net[0].weight.grad[0, 0] = float("nan")
    with pytest.raises(RuntimeError, match=r"tune\(\) needs a step that can be made, but the gradient of parameter 0"):
        optimizer.tune(MACHINE)
