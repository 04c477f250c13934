"""Matrix optimizers as torch.optim.Optimizers: groups, names, closures, hooks, schedulers, scalers, states, copies."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from published import Published
from ranks import errors_of
from sharded_run import KINDS, RULES, assert_same, gradients, groups_of, make, part_of, parts_of_rank, train_alone
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from worlds import place, virtual_world

import weft
from weft import optim
from weft.optim.matrix import engine, exact, rule, stable
from weft.optim.matrix.rule import DECAY_METHODS


def model_of(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 3)).to(dtype)


def loss_of(model: nn.Module, seed: int = 0) -> Tensor:
    x = torch.randn(8, 5, generator=torch.Generator().manual_seed(seed))
    return model(x.to(next(model.parameters()).dtype)).square().mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[Tensor]:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("rule", RULES)
def test_vectors_are_stepped_by_adamw(rule: str) -> None:
    """As torch's, to rounding; and matrices too where a group says so."""
    torch.manual_seed(0)
    wanted = [torch.nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in ((5,), (), (3, 4), (2, 3, 2))]
    found = [torch.nn.Parameter(one.detach().clone()) for one in wanted]
    theirs = torch.optim.AdamW(wanted, lr=0.05, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    ours = make(
        [{"params": found[:2]}, {"params": found[2:], "algorithm": "adamw"}], rule,
        lr=0.05, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1,
    )  # fmt: skip
    for _ in range(20):
        for one, other in zip(wanted, found, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        theirs.step()
        ours.step()
    for one, other in zip(wanted, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert all(set(state) == {"step", "exp_avg", "exp_avg_sq"} for state in ours.state.values())


def test_a_group_of_its_own_for_everything() -> None:
    """Groups may differ in every option; each matrix goes by those of its group."""
    torch.manual_seed(0)
    shapes = ((6, 4), (3, 5), (4, 4))
    options = [{"lr": 0.02, "weight_decay": 0.3}, {"betas": (0.5, 0.6), "eps": 1e-5}, {"shampoo_beta": 0.7}]
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    wanted = [
        Published(parameters[0], 0.02, decay=0.3), Published(parameters[1], 0.01, betas=(0.5, 0.6), eps=1e-5),
        Published(parameters[2], 0.01, beta=0.7),
    ]  # fmt: skip
    groups = [{"params": [p], **own} for p, own in zip(parameters, options, strict=True)]
    optimizer = make(groups[:2])
    optimizer.add_param_group(groups[2])
    for _ in range(5):
        for parameter, one in zip(parameters, wanted, strict=True):
            parameter.grad = torch.randn_like(parameter)
            one.step(parameter.grad)
        optimizer.step()
    for parameter, one in zip(parameters, wanted, strict=True):
        assert torch.equal(parameter.detach(), one.weight)


@pytest.mark.parametrize("variant", ["exact", "stable"])
def test_a_side_that_is_too_long_has_no_factor(variant: str) -> None:
    """As if its factor were the identity: with both sides too long the published update is plain Adam."""
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(4, 9, dtype=torch.float64))
    optimizer = optim.REKLS([parameter], lr=0.01, variant=variant, max_factor_dim=6)
    assert "L" in optimizer.state[parameter] and "R" not in optimizer.state[parameter]
    both = torch.nn.Parameter(parameter.detach().clone())
    neither = optim.REKLS([both], lr=0.01, variant=variant, max_factor_dim=3)
    adam = torch.nn.Parameter(parameter.detach().clone())
    theirs = torch.optim.AdamW([adam], lr=0.01, betas=(0.9, 0.95), weight_decay=0.01)
    for _ in range(5):
        parameter.grad = torch.randn_like(parameter)
        both.grad, adam.grad = parameter.grad.clone(), parameter.grad.clone()
        for one in (optimizer, neither, theirs):
            one.step()
    if variant == "exact":
        torch.testing.assert_close(both, adam, rtol=1e-12, atol=1e-12)
    factor = optimizer.state[parameter]["L"]
    torch.testing.assert_close(factor, factor.mT)
    assert torch.linalg.eigvalsh(factor).min() > 0 and not torch.equal(parameter, both)


def test_more_dimensions_are_flattened_where_a_group_says_so() -> None:
    torch.manual_seed(0)
    kernel = torch.nn.Parameter(torch.randn(4, 2, 3))
    flat = Published(kernel.detach().view(4, 6), 0.01)
    optimizer = make([{"params": [kernel], "flatten": True}])
    for _ in range(4):
        kernel.grad = torch.randn_like(kernel)
        flat.step(kernel.grad.view(4, 6))
        optimizer.step()
    assert torch.equal(kernel.detach().view(4, 6), flat.weight)


@pytest.mark.parametrize("rule", RULES)
def test_names_schedulers_hooks_and_closures(rule: str) -> None:
    model = model_of()
    optimizer = make(model.named_parameters(), rule, lr=torch.tensor(0.02))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        seen.append("closure")
        return loss

    first = optimizer.step(closure)
    schedule.step()
    second = optimizer.step(closure)
    assert second < first and seen == ["before", "closure", "after"] * 2
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.01)
    model[0].weight.grad.fill_(torch.nan)
    with pytest.raises(RuntimeError, match=r"the gradient of 0\.weight is not finite; weights"):
        optimizer.step()


@pytest.mark.parametrize("rule", RULES)
def test_rates_of_a_schedule_are_used(rule: str) -> None:
    """A rate of zero moves nothing but counts the step."""
    model = model_of()
    optimizer = make(model.parameters(), rule, lr=0.0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    after = train(model, optimizer, range(2))
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert all(float(state["step"]) == 2 for state in optimizer.state.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rule", RULES)
def test_a_state_goes_round(rule: str, dtype: torch.dtype) -> None:
    """Through a file, into a fresh optimizer: the same bits, in fp32 for bf16 parameters."""
    model = model_of(dtype)
    optimizer = make(model.parameters(), rule, lr=0.02)
    train(model, optimizer, range(4))
    twin = copy.deepcopy(model)
    held = optimizer.state_dict()
    saved = pickle.loads(pickle.dumps(held))
    fresh = make(twin.parameters(), rule, lr=0.5)
    fresh.load_state_dict(saved)
    wide = torch.promote_types(dtype, torch.float32)
    for state in fresh.state.values():
        assert all(v.dtype == wide for k, v in state.items() if k not in ("step", "second_moment"))
    wanted = train(model, optimizer, range(4, 8))
    assert all(float(state["step"]) == 4 for state in held["state"].values())  # what was saved stays as it was
    found = train(twin, fresh, range(4, 8))
    assert all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_go_on_alike(how: str, rule: str) -> None:
    model = model_of()
    optimizer = make(model.parameters(), rule, lr=0.02, on_nonfinite="skip")
    train(model, optimizer, range(3))
    pair = (model, optimizer)
    twin, again = copy.deepcopy(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair))
    wanted = train(model, optimizer, range(3, 6))
    found = train(twin, again, range(3, 6))
    assert all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))
    twin[0].weight.grad.fill_(torch.nan)
    again.step()  # still skips


def test_a_fresh_state_is_there_and_asking_for_it_changes_nothing() -> None:
    model = model_of()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = optim.REKLS(model.parameters(), lr=0.1, weight_decay=0.5, weight_decay_method="independent")
    saved = get_optimizer_state_dict(model, optimizer)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), before, strict=True))
    assert float(saved["state"]["0.weight"]["step"]) == 0 and saved["state"]["0.weight"]["L"].shape == (7, 7)
    assert all(float(state["step"]) == 0 for state in optimizer.state.values())


@pytest.mark.parametrize("rule", RULES)
def test_a_gradient_scaler(rule: str) -> None:
    """Scaled gradients give the same bits (the scale is a power of two); infinities are passed over, not raised."""
    runs = []
    for scaled in (False, True):
        model = model_of()
        optimizer = make(model.parameters(), rule, lr=0.02)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step)).backward()
            if scaled and step == 1:
                kept = [parameter.grad.clone() for parameter in model.parameters()]
                before = [parameter.detach().clone() for parameter in model.parameters()]
                model[0].weight.grad[0, 0] = torch.inf
                scaler.step(optimizer)
                assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
                scaler._per_optimizer_states.clear()  # the same step again, without the infinity
                for parameter, grad in zip(model.parameters(), kept, strict=True):
                    parameter.grad = grad
            scaler.step(optimizer)
            scaler.update()
        runs.append([parameter.detach() for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


def test_the_parts_of_a_step_come_in_order() -> None:
    model = model_of()
    optimizer = make(model.parameters(), lr=0.02)
    loss_of(model).backward()
    for call, words in (
        (optimizer.work, r"work\(\) without a start"),
        (optimizer.finish, r"finish\(\) without a work"),
    ):
        with pytest.raises(RuntimeError, match=words):
            call()
    optimizer.start()
    for call, words in ((optimizer.start, "a step is under way"), (optimizer.finish, r"finish\(\) without a work")):
        with pytest.raises(RuntimeError, match=words):
            call()
    optimizer.work()
    optimizer.finish()
    twin = model_of()
    wanted = train(twin, make(twin.parameters(), lr=0.02), range(1))
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), wanted, strict=True))


REFUSED = [
    ({"lr": -1.0}, "lr, eps and weight_decay must be finite and not negative, got -1.0"),
    ({"betas": (0.9, 1.0)}, r"must be in \[0, 1\), got \(0.9, 1.0\)"),
    ({"variant": "fast"}, "variant 'fast' is not one of exact, stable"),
    ({"weight_decay_method": "l1"}, "weight_decay_method 'l1' is not one of decoupled, independent, palm, l2"),
    ({"max_factor_dim": -1}, "max_factor_dim must not be negative, got -1"),
    ({"on_nonfinite": "ignore"}, "on_nonfinite 'ignore' is not one of raise, skip"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_options_that_are_refused(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        optim.REKLS([torch.nn.Parameter(torch.ones(2, 2))], **{"lr": 0.1, **options})


PARAMETERS = [
    ({"params": [torch.ones(2, 3, 4)]}, ValueError, r"parameter 0 has 3 dimensions \[2, 3, 4\]; put it into a group"),
    ({"params": [torch.ones(3)], "partition_dim": 1}, ValueError, r"partition_dim=1 is not a dimension of parameter 0"),
    ({"params": [torch.ones(3, 3)], "partition_dim": 2}, ValueError, "partition_dim must be 0, 1 or None, got 2"),
    ({"params": [torch.ones(3, 3)], "algorithm": "sgd"}, ValueError, "algorithm 'sgd' is not one of rekls, adamw"),
    ({"params": [torch.ones(3, 3, dtype=torch.complex64)]}, TypeError, "parameter 0 is torch.complex64"),
]


@pytest.mark.parametrize(("group", "kind", "words"), PARAMETERS)
def test_parameters_that_are_refused(group: dict, kind: type, words: str) -> None:
    """And the optimizer is as before."""
    group = {**group, "params": [one.clone().requires_grad_() for one in group["params"]]}
    optimizer = optim.REKLS([torch.nn.Parameter(torch.ones(2, 2))], lr=0.1)
    with pytest.raises(kind, match=words):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1 and len(optimizer.state) == 1


def test_shards_that_do_not_fit_are_refused_on_every_rank() -> None:
    def program(axis: weft.Axis) -> None:
        rows = torch.nn.Parameter(torch.ones(2, 3 + (axis.rank == 1)))
        optim.REKLS([{"params": [rows], "partition_dim": 0}], lr=0.1, group=axis)

    shapes = "[2, 3] on rank 0; [2, 4] on rank 1; [2, 3] on rank 2"
    assert errors_of(program) == [f"REKLS: parameter 0 is cut along dimension 0 over 3 ranks, but is {shapes}"] * 3

    def other(axis: weft.Axis) -> None:
        optim.REKLS([torch.nn.Parameter(torch.ones(2 + axis.rank, 3))], lr=0.1, group=axis)

    assert len(errors_of(other)) == 3 and "must have one shape on all 3 ranks" in errors_of(other)[0]

    def one_rank(axis: weft.Axis) -> None:
        optim.REKLS([torch.nn.Parameter(torch.ones(2, 3) if axis.rank else torch.ones(1, 2, 3))], lr=0.1, group=axis)

    assert len(errors_of(one_rank)) == 3 and all("has 3 dimensions" in words for words in errors_of(one_rank))


def test_states_that_do_not_fit_are_refused() -> None:
    model = model_of()
    optimizer = make(model.parameters(), lr=0.1)
    before = copy.deepcopy(optimizer.state_dict())
    other = optim.REKLS(model.parameters(), lr=0.1, variant="stable").state_dict()
    with pytest.raises(ValueError, match="was it saved with another variant, algorithm or max_factor_dim"):
        optimizer.load_state_dict(other)
    wrong = copy.deepcopy(before)
    wrong["state"][0]["L"] = torch.zeros(3, 3)
    with pytest.raises(ValueError, match=r"L of parameter 0 of group 0 is \[3, 3\] in the state, not \[7, 7\]"):
        optimizer.load_state_dict(wrong)
    fewer = make(list(model.parameters())[:2], lr=0.1).state_dict()
    with pytest.raises(ValueError, match="the state has 2 parameters, this optimizer 6"):
        optimizer.load_state_dict(fewer)
    for number, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, before["state"][number][name]) for name, value in state.items())


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize("rule", RULES)
def test_a_state_on_virtual_ranks_is_whole_and_loads_anywhere(rule: str) -> None:
    def program(axis: weft.Axis) -> tuple[list[Tensor], dict]:
        parameters = parts_of_rank(axis, True)
        saved, optimizer = None, None
        for step in range(10):
            if step in (0, 5):
                optimizer = make(groups_of(parameters), rule, group=axis)
                if saved is not None:
                    optimizer.load_state_dict(saved)
            for parameter, kind, grad in zip(parameters, KINDS, gradients(step), strict=True):
                parameter.grad = place(part_of(grad, kind, axis.rank, axis.size, True))
            optimizer.step()
            saved = optimizer.state_dict()
        return [parameter.detach() for parameter in parameters], saved

    results = virtual_world(3).run(program).results
    assert_same(train_alone(10, rule=rule), [parts for parts, _ in results], True)
    for index, kind in enumerate(KINDS):
        for _, saved in results:
            state = saved["state"][index]
            first = next(name for name in state if name.startswith(("exp_avg", "momentum")))
            assert all(torch.equal(state[name], results[0][1]["state"][index][name]) for name in state)
            assert set(kind.options) & {"flatten", "stacked", "block_dim"} or state[first].shape == kind.shape


def test_over_several_ranks_it_is_not_pickled_but_copied() -> None:
    def program(axis: weft.Axis) -> bool:
        parameter = torch.nn.Parameter(torch.ones(4, 3))
        optimizer = optim.REKLS([parameter], lr=0.1, group=axis)
        with pytest.raises(TypeError, match=r"cannot be pickled, process groups cannot; save its state_dict\(\)"):
            pickle.dumps(optimizer)
        twin = copy.deepcopy(optimizer)
        copied = twin.param_groups[0]["params"][0]
        for one, own in ((parameter, optimizer), (copied, twin)):
            one.grad = torch.arange(12.0).view(4, 3)
            own.step()
        return torch.equal(parameter, copied) and copied is not parameter

    assert all(virtual_world(2).run(program).results)


def many(axis: weft.Axis, count: int, **options) -> list[weft.comm.ledger.Event]:
    """The exchanges of one step of ``count`` matrices."""
    parameters = place([torch.nn.Parameter(torch.ones(6, 8)) for _ in range(count)])
    optimizer = make([{"params": parameters, "partition_dim": 0}], lr=0.1, group=axis, **options)
    for parameter in parameters:
        parameter.grad = place(torch.randn(6, 8, generator=torch.Generator().manual_seed(axis.rank)))
    with weft.record() as ledger:
        optimizer.step()
    return ledger.events


def test_a_fixed_number_of_exchanges_for_any_number_of_matrices(
    monkeypatch: pytest.MonkeyPatch, every_network: str
) -> None:
    # Who has which gradients; on a device again, what these are, when all work is issued; and whether work succeeded.
    told = ["REKLS.step.metadata"] * (2 if every_network == "sim" else 1) + ["REKLS.finish.metadata"]
    monkeypatch.setattr(engine, "SMALLEST_BYTES", 48)
    for size in (2, 4):
        counts = []
        for matrices in (4 * size, 20 * size):
            events = virtual_world(size).run(lambda axis, matrices=matrices: many(axis, matrices)).results[1]
            data = [event for event in events if not event.operation.endswith(".metadata")]
            assert sum(event.bytes_sent for event in data) == 2 * 4 * matrices * 48 * (size - 1) // size
            assert [event.operation for event in events if event not in data] == told
            counts.append(len(data))
        assert counts == [2 * 4] * 2
    # Few bytes: one bucket. An owner gets 8 matrices of 384 bytes: one in each bucket of 600 at most.
    for smallest, largest, buckets in ((1 << 20, 8 << 20, 1), (48, 600, 8), (48, 800, 4)):
        monkeypatch.setattr(engine, "SMALLEST_BYTES", smallest)
        monkeypatch.setattr(engine, "BUCKET_BYTES", largest)
        events = virtual_world(2).run(lambda axis: many(axis, 16)).results[1]
        assert len([event for event in events if not event.operation.endswith(".metadata")]) == 2 * buckets


def test_owners_share_the_work() -> None:
    """Longest first: with many matrices of several sizes nobody has much more than the mean."""

    def program(axis: weft.Axis) -> tuple[float, int]:
        sizes = [(4 * h, h) for h in (8, 8, 8, 8)] + [(3 * h, h) for h in (8, 8)] + [(8, 8)] * 6
        parameters = [torch.nn.Parameter(torch.ones(size)) for size in sizes]
        optimizer = make(parameters, lr=0.1, group=axis)
        used = optimizer._plans[parameters[0]][0].owners
        loads = [load[None] for load in optimizer._planner._loads[used].values()]
        return max(loads) * len(loads) / sum(loads), sum("L" in state for state in optimizer.state.values())

    results = virtual_world(4).run(program).results
    assert sum(mine for _, mine in results) == 12 and all(busiest < 1.2 for busiest, _ in results)


def test_one_decomposition_for_each_factor_in_the_whole_world(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def count(factor: Tensor) -> tuple[Tensor, Tensor]:
        calls.extend([len(factor)] * bool(factor.any()))  # the bases of zero factors are known
        return rule.decompose(factor)

    for module in (exact, stable):
        monkeypatch.setattr(module, "decompose", count)

    def program(axis: weft.Axis) -> None:
        row, column = divmod(axis.rank, 2)
        parameters = [torch.nn.Parameter(torch.ones(3, 8)) for _ in range(5)]
        optimizer = optim.REKLS(
            [{"params": parameters, "partition_dim": 0}], lr=0.1,
            group=axis.subset([2 * row, 2 * row + 1]), data_group=axis.subset([column, 2 + column]),
        )  # fmt: skip
        for parameter in parameters:
            parameter.grad = torch.randn(3, 8, generator=torch.Generator().manual_seed(axis.rank))
        optimizer.step()

    virtual_world(4).run(program)
    assert sorted(calls) == [6] * 5 + [8] * 5


def test_pieces_travel_while_others_are_worked_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """In virtual time: four buckets hide most of what one leaves open."""
    machine = weft.world.Machine(latency=1e-5, bandwidth=1e8, flops=2e9)
    monkeypatch.setattr(engine, "SMALLEST_BYTES", 1 << 12)

    def program(axis: weft.Axis) -> None:
        parameters = [torch.nn.Parameter(torch.ones(32, 64)) for _ in range(16)]
        optimizer = make([{"params": parameters, "partition_dim": 0}], lr=0.1, group=axis)
        for parameter in parameters:
            parameter.grad = torch.randn(32, 64, generator=torch.Generator().manual_seed(axis.rank))
        optimizer.step()

    def elapsed(chosen: weft.world.Machine) -> float:
        return weft.world.VirtualWorld(2, chosen).run(program).elapsed

    work = elapsed(weft.world.Machine(latency=0.0, bandwidth=float("inf"), flops=2e9))
    in_buckets = elapsed(machine) - work
    monkeypatch.setattr(engine, "SMALLEST_BYTES", 1 << 30)
    at_once = elapsed(machine) - work
    assert in_buckets < 0.4 * at_once


@pytest.mark.parametrize("method", DECAY_METHODS)
def test_a_parameter_without_movement_only_decays(method: str) -> None:
    parameter = torch.nn.Parameter(torch.ones(3, 4, dtype=torch.float64))
    optimizer = optim.REKLS([parameter], lr=0.1, weight_decay=0.5, weight_decay_method=method, variant="stable")
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    left = {"decoupled": 0.95, "independent": 0.5, "palm": 0.995, "l2": 1.0}[method]
    torch.testing.assert_close(parameter.detach(), torch.full((3, 4), left, dtype=torch.float64))
