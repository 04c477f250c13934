"""`OverlappedStep` as a ``torch.optim.Optimizer``, its states, its refusals, and parts of one's own."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from mixed_model import Mixed, assert_all_have, backward, overlapped, parts_of, train_overlapped
from ranks import errors_of
from torch import Tensor, nn
from worlds import place, virtual_world

import weft
from weft import optim


def linear_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def of_model(model: nn.Module, **options: Any) -> optim.OverlappedStep:
    """ShardedAdamW in two parts."""
    first, last = model[0].parameters(), model[2].parameters()
    return optim.OverlappedStep([optim.ShardedAdamW(first, lr=0.1), optim.ShardedAdamW(last, lr=0.05)], **options)


def plain_of(model: nn.Module) -> torch.optim.AdamW:
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters()), "lr": 0.05}]
    return torch.optim.AdamW(groups, lr=0.1)


def loss_of(model: nn.Module, step: int) -> Tensor:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
    return model(x.to(model[0].weight.device)).square().sum()


@pytest.mark.parametrize("early", [False, True])
def test_schedulers_closures_hooks_and_zero_grad(early: bool) -> None:
    """As torch's AdamW under the same loop, to the bit."""
    ends, calls = [], []
    for ours in (False, True):
        model = linear_model()
        optimizer = of_model(model, overlap_backward=early) if ours else plain_of(model)
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        seen = []
        for step in range(6):

            def closure(model=model, optimizer=optimizer, step: int = step) -> Tensor:
                optimizer.zero_grad(set_to_none=step % 2 == 0)
                loss = loss_of(model, step)
                loss.backward()
                return loss

            seen.append(float(optimizer.step(closure).detach()))
            schedule.step()
        ends.append((seen, [p.detach() for p in model.parameters()], [g["lr"] for g in optimizer.param_groups]))
    assert calls == ["before", "after"] * 12
    assert ends[0][0] == ends[1][0] and ends[0][2] == ends[1][2]
    assert all(torch.equal(*pair) for pair in zip(ends[0][1], ends[1][1], strict=True))


def test_a_rate_that_changes_between_the_backward_and_the_step() -> None:
    """Gradients have left by then; the rate is that of the step."""
    ends = []
    for early in (False, True):
        model = linear_model()
        optimizer = optim.OverlappedStep(
            [optim.REKLS(model.parameters(), lr=0.1, variant="stable")], overlap_backward=early
        )
        for step in range(3):
            loss_of(model, step).backward()
            optimizer.param_groups[0]["lr"] = 0.01 * (step + 1)
            optimizer.step()
            optimizer.zero_grad()
        ends.append([p.detach() for p in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*ends, strict=True))


@pytest.mark.parametrize("early", [False, True])
def test_a_gradient_scaler(early: bool, every_network: str) -> None:
    """The bits of unscaled gradients (the scale is a power of two), over all parts; infinities are passed over on all
    ranks and the scale comes down."""

    def program(axis: weft.Axis, scaled: bool) -> tuple[list[Tensor], float]:
        model = Mixed(axis)
        optimizer = overlapped(model, axis, clip=0.3, overlap_backward=early)
        scaler = torch.amp.GradScaler(model.frozen.device.type, init_scale=2.0**8, enabled=scaled)
        for step in range(4):
            before = [p.detach().clone() for p in model.parameters()]  # in both runs: it brings rows up to date
            if step == 2 and scaled:
                hook = model.net[5].weight.register_hook(lambda grad: grad * (float("inf") if axis.rank == 1 else 1.0))
                scaler.scale(model(_ids(1, axis))).backward()
                hook.remove()
                scaler.step(optimizer)
                assert all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))
                scaler._per_optimizer_states.clear()
                optimizer.zero_grad()
            scaler.scale(model(_ids(step, axis))).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return model.values(), scaler.get_scale()

    plain, scaled = (virtual_world(2).run(lambda axis, s=s: program(axis, s)).results for s in (False, True))
    for (one, _), (other, scale) in zip(plain, scaled, strict=True):
        assert all(torch.equal(*pair) for pair in zip(one, other, strict=True)) and scale == 2.0**8


def _ids(step: int, axis: weft.Axis) -> Tensor:
    return torch.arange(6) * (1 + axis.rank) + step


def test_a_scaler_that_unscales_first_is_refused_where_gradients_have_left() -> None:
    model = linear_model()
    optimizer = of_model(model, overlap_backward=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(loss_of(model, 0)).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(
        ValueError, match=r"was changed after it had been sent in the backward .* overlap_backward=False"
    ):
        scaler.step(optimizer)


def test_a_gradient_that_is_clipped_before_a_scaler_looks_is_refused_where_it_has_left() -> None:
    model = linear_model()
    optimizer = of_model(model, overlap_backward=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(loss_of(model, 0)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(ValueError, match=r"was changed after it had been sent in the backward .* clip with clip="):
        scaler.step(optimizer)


@pytest.mark.usefixtures("every_network")
def test_groups_that_are_added() -> None:
    def program(axis: weft.Axis, later: bool) -> list[Tensor]:
        model = place(linear_model())
        last = {"params": list(model[2].parameters()), "lr": 0.05}
        groups = [{"params": [model[0].bias]}, *([] if later else [last])]
        alone = axis.subset([axis.rank])
        parts = [
            optim.REKLS([model[0].weight], lr=0.1, variant="stable", group=alone, data_group=axis),
            optim.ShardedAdamW(groups, lr=0.1, group=axis),
        ]
        optimizer = optim.OverlappedStep(parts, overlap_backward=True)
        if later:
            optimizer.add_param_group({**last, "part": "ShardedAdamW"})
        assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1, 2]
        for step in range(3):
            loss_of(model, step + 10 * axis.rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    now, later = (virtual_world(2).run(lambda axis, w=w: program(axis, w)).results for w in (False, True))
    for one, other in zip(now, later, strict=True):
        assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))
    model = linear_model()
    with pytest.raises(ValueError, match=r"needs part=NAME, one of ShardedAdamW, ShardedAdamW_2, got None"):
        of_model(model).add_param_group({"params": [nn.Parameter(torch.ones(2))]})


@pytest.mark.usefixtures("every_network")
def test_a_state_goes_round_at_any_number_of_ranks() -> None:
    """Saved on 4 virtual ranks after 3 steps and loaded on 4, 2 and 1; the same batches on every rank."""

    def same(axis: weft.Axis, saved: dict | None, values: dict | None) -> tuple[list[Tensor], dict, dict]:
        model = Mixed(axis)
        optimizer = overlapped(model, axis)
        steps = range(3)
        if saved is not None:
            model.load_state_dict(values)
            optimizer.load_state_dict(copy.deepcopy(saved))
            steps = range(3, 6)
        for step in steps:
            model(torch.arange(8) * 3 + step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.values(), optimizer.state_dict(), copy.deepcopy(model.state_dict())

    first = virtual_world(4).run(lambda axis: same(axis, None, None)).results
    ends = []
    for size in (4, 2, 1):
        again = virtual_world(size).run(lambda axis: same(axis, first[0][1], first[0][2])).results
        ends.append([values for values, *_ in again])
    for found in ends:
        for mine in found:
            for one, other in zip(mine, ends[0][0], strict=True):
                torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-6)
    assert_all_have(ends[0][0], ends[0])


def test_the_state_of_plain_adamw_is_loaded_and_written() -> None:
    model, twin = linear_model(), linear_model()
    ours, theirs = of_model(model), plain_of(twin)
    for step in range(6):
        if step == 3:  # crosswise
            mine, other = copy.deepcopy(ours.state_dict()), copy.deepcopy(theirs.state_dict())
            ours, theirs = of_model(model), plain_of(twin)
            ours.load_state_dict(other)
            theirs.load_state_dict(mine)
        for net, optimizer in ((model, ours), (twin, theirs)):
            optimizer.zero_grad()
            loss_of(net, step).backward()
            optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), twin.parameters(), strict=True))


def test_states_that_do_not_fit_are_refused() -> None:
    optimizer = of_model(linear_model())
    saved = optimizer.state_dict()
    with pytest.raises(ValueError, match="the state has 1 parameter groups, the parts have 2"):
        optimizer.load_state_dict({**saved, "param_groups": saved["param_groups"][:1]})
    short = copy.deepcopy(saved)
    short["param_groups"][1]["params"].pop()
    with pytest.raises(ValueError, match="group 0 of ShardedAdamW_2 has 2 parameters, in the state 1"):
        optimizer.load_state_dict(short)
    with pytest.raises(TypeError, match=r"are not pickled or copied; save the state_dict\(\)"):
        copy.deepcopy(optimizer)


def test_a_state_of_an_earlier_version_has_orders_that_are_left_out() -> None:
    """With every kind of part first: the first group had them."""
    axis = weft.Axis.of(None)
    for places in ((0, 1, 2), (1, 2, 0), (2, 0, 1)):
        model = Mixed(axis)
        optimizer = overlapped(model, axis, order=places)
        backward(model, axis, 0, 1)
        optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        order = ["RowAdam.1", "REKLS.0", "ShardedAdamW.0", "RowAdam.0"]
        saved["param_groups"][0] |= {"scatter_order": order, "work_order": order}
        other = overlapped(model, axis, order=places)
        other.load_state_dict(saved)
        again = other.state_dict()
        assert not any({"scatter_order", "work_order"} & set(group) for group in again["param_groups"])
        for number, state in saved["state"].items():
            assert all(torch.equal(value, again["state"][number][name]) for name, value in state.items())


REFUSED = [
    ({"parts": "none"}, ValueError, "there are no parts"),
    ({"parts": "plain"}, TypeError, r"SGD is no StepPart; parts are weft\.optim\.ShardedAdamW, REKLS"),
    ({"parts": "clipping"}, ValueError, r"ShardedAdamW has clip= of its own, .* give clip= to OverlappedStep"),
    ({"clip": 0.0}, ValueError, "clip must be > 0, got 0.0"),
    ({"bucket_bytes": 0}, ValueError, "bucket_bytes must be at least 1, got 0"),
    ({"on_nonfinite": "go on"}, ValueError, "on_nonfinite 'go on' is not one of raise, skip"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "kind", "words"), REFUSED)
def test_what_is_refused(options: dict, kind: type, words: str) -> None:
    axis = weft.Axis.of(None)
    model, weight = Mixed(axis), nn.Parameter(torch.ones(2))
    given = {
        "none": [], "plain": [torch.optim.SGD([weight], lr=0.1)], "clipping": [optim.ShardedAdamW([weight], clip=1.0)],
    }  # fmt: skip
    options = dict(options)
    parts = options.pop("parts", None)
    parts = parts_of(model, axis) if parts is None else given[parts]
    with pytest.raises(kind, match=words):
        optim.OverlappedStep(parts, **options)


def test_parts_that_differ_between_ranks_are_found() -> None:
    def program(axis: weft.Axis) -> None:
        model = Mixed(axis)
        optimizer = overlapped(model, axis)
        if axis.rank == 1:
            optimizer.param_groups[-1]["weight_decay"] = 0.5
        backward(model, axis, 0, 1)
        optimizer.step()

    found = errors_of(program)
    assert len(found) == 3 and all("OverlappedStep.step: the ranks disagree" in words for words in found)


def sign_step() -> type[optim.StepPart]:
    """The part of one's own in docs/overlapped_step.md."""
    page = (Path(__file__).parents[2] / "docs" / "overlapped_step.md").read_text()
    code = next(block for block in page.split("```python\n")[1:] if block.startswith("class SignStep"))
    names: dict[str, Any] = {"weft": weft, "torch": torch}
    exec(code.partition("```")[0], names)

    class Clipped(names["SignStep"]):
        def squared_norm(self, bucket: int) -> Tensor:
            return sum(self.coming.wait()).double().square().sum() * (self.axis.rank == 0)

    return Clipped


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize("early", [False, True])
def test_a_part_of_ones_own(early: bool) -> None:
    """With the three verbs it is an optimizer by itself and a part of a step, clipped and dropped with the others."""

    def program(axis: weft.Axis, joined: bool) -> tuple[list[Tensor], str]:
        model = place(linear_model())
        parts = [
            sign_step()(model[0].parameters(), 0.1, axis),
            optim.ShardedAdamW(model[2].parameters(), lr=0.1, group=axis),
        ]
        steps = [optim.OverlappedStep(parts, overlap_backward=early, clip=1e6)] if joined else parts
        words = ""
        for step in range(3):
            loss_of(model, step + 10 * axis.rank).backward()
            for one in steps:
                one.step()
                one.zero_grad()
        if joined:
            before = [p.detach().clone() for p in model.parameters()]
            hook = model[2].weight.register_hook(lambda grad: grad * float("nan"))
            loss_of(model, 0).backward()
            hook.remove()
            try:
                steps[0].step()
            except RuntimeError as error:
                words = str(error)
            assert all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))
        return [p.detach() for p in model.parameters()], words

    apart, together = (virtual_world(3).run(lambda axis, j=j: program(axis, j)).results for j in (False, True))
    for (one, _), (other, words) in zip(apart, together, strict=True):
        assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))
        assert "parameter 0 of group 0 (ShardedAdamW) is not finite" in words


def test_explain_adds_up_to_the_ledger(tmp_path: Path) -> None:
    """What each part sent is what was sent; in virtual time waits and work make up the step; the trace has them."""
    machine = weft.world.Machine(latency=1e-4, bandwidth=1e7, memory_bandwidth=1e8)

    def program(axis: weft.Axis) -> tuple[Any, int, str]:
        model = Mixed(axis)
        optimizer = overlapped(model, axis)
        with pytest.raises(RuntimeError, match="tells of the last step, and there has been none"):
            optimizer.explain()
        model.net(torch.ones(2, 6)).sum().backward()
        with weft.record() as ledger:
            (model.table(torch.arange(9)).sum() + model.second(torch.arange(9)).sum()).backward()
            optimizer.step()
        explained = optimizer.explain()
        if axis.rank == 0:
            explained.save_trace(tmp_path / "step.json")
        pulls = sum(e.bytes_sent for e in ledger.events if e.operation in ("embedding", "embedding.pull"))
        pulls += sum(e.bytes_sent for e in ledger.events if e.operation.startswith("embedding.metadata"))
        return explained, ledger.bytes_sent - pulls, str(explained)

    for explained, sent, text in weft.world.VirtualWorld(3, machine).run(program).results:
        rows = {row.part: row for row in explained.rows}
        assert list(rows) == ["RowAdam", "REKLS", "ShardedAdamW", "agreeing"]
        assert sum(row.bytes_sent for row in explained.rows) == sent and rows["RowAdam"].bytes_sent > 0
        assert explained.exposed + sum(row.work for row in explained.rows) == pytest.approx(explained.seconds, rel=0.35)
        assert 0 < explained.exposed < explained.seconds and all(
            row.exposed <= row.under_way + 1e-12 for row in explained.rows
        )
        assert "exposed ms" in text and "ShardedAdamW" in text
    names = {event["name"] for event in json.loads((tmp_path / "step.json").read_text())["traceEvents"]}
    assert {"work: REKLS.0", "embedding.push", "REKLS.to_owners", "ShardedAdamW.from_owners"} <= names


def test_a_single_process_needs_no_world() -> None:
    values = train_overlapped(weft.Axis.of(None), 2, overlap_backward=True, clip=1.0)
    assert all(torch.isfinite(value).all() for value in values)
