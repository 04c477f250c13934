"""`ShardedAdamW` on virtual ranks: torch's AdamW on averaged gradients, to the bit; what it sends and refuses."""

from __future__ import annotations

import copy
import itertools
import logging
import math
from typing import Any

import pytest
import torch
from ranks import errors_of
from torch import Tensor, nn
from worlds import every, place, virtual_world

import weft
from weft import optim
from weft.optim.slices.layout import cut_bucket, fill_buckets, row_ranges

pytestmark = pytest.mark.usefixtures("every_network")
SHAPES = ((7, 5), (3,), (), (4, 2, 3), (1, 1), (0, 3), (11,), (6, 8))


def weights(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    make = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=make).to(dtype) for shape in SHAPES]


def gradients(step: int, rank: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    make = torch.Generator().manual_seed(100 * step + rank + 1)
    return [torch.randn(shape, generator=make).to(dtype) for shape in SHAPES]


def placed(given: list[Tensor]) -> list[nn.Parameter]:
    """Parameters of a rank."""
    return place([nn.Parameter(weight) for weight in given])


def averaged(step: int, ranks: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    found = []
    for parts in zip(*(gradients(step, rank, dtype) for rank in range(ranks)), strict=True):
        total = parts[0].to(torch.promote_types(dtype, torch.float32))
        for part in parts[1:]:
            total = total + part
        found.append(total / ranks)
    return found


def groups_of(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": parameters[:4]},
        {"params": parameters[4:], "lr": 0.05, "weight_decay": 0.3, "betas": (0.8, 0.9)},
    ]


OPTIONS = {"lr": 0.02, "weight_decay": 0.1}


def give(parameters: list[nn.Parameter], grads: list[Tensor], without: tuple[int, ...] = ()) -> None:
    for index, (parameter, grad) in enumerate(zip(parameters, grads, strict=True)):
        parameter.grad = None if index in without else grad.to(parameter.device)


def train_alone(steps: int, ranks: int, dtype=torch.float32, without=()) -> list[Tensor]:
    """torch's AdamW on averaged gradients, in fp32 for lower precisions."""
    wide = torch.promote_types(dtype, torch.float32)
    parameters = [nn.Parameter(weight.to(wide)) for weight in weights(dtype)]
    optimizer = torch.optim.AdamW(groups_of(parameters), **OPTIONS)
    for step in range(steps):
        give(parameters, averaged(step, ranks, dtype), without)
        optimizer.step()
    return [parameter.detach().to(dtype) for parameter in parameters]


def train_over(axis: weft.Axis, steps: int, dtype=torch.float32, without=(), **options) -> list[Tensor]:
    parameters = placed(weights(dtype))
    optimizer = optim.ShardedAdamW(groups_of(parameters), **OPTIONS, group=axis, **options)
    for step in range(steps):
        give(parameters, gradients(step, axis.rank, dtype), without)
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


def assert_all_have(wanted: list[Tensor], found: list[list[Tensor]]) -> None:
    for mine in found:
        for one, other in zip(mine, wanted, strict=True):
            assert torch.equal(one, other) and one.dtype == other.dtype


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_it_is_adamw_on_averaged_gradients(size: int, dtype: torch.dtype) -> None:
    wanted = train_alone(5, size, dtype)
    for bucket_bytes in every((1, 200, 1 << 20)):
        found = virtual_world(size).run(lambda axis, b=bucket_bytes: train_over(axis, 5, dtype, bucket_bytes=b)).results
        assert_all_have(wanted, found)


def test_a_world_of_one_is_torchs_adamw() -> None:
    model, twin = (nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    ours, theirs = optim.ShardedAdamW(model.parameters(), lr=0.1), torch.optim.AdamW(twin.parameters(), lr=0.1)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in (ours, theirs)]
    for step in range(10):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        for net, optimizer in ((model, ours), (twin, theirs)):
            optimizer.zero_grad()
            optimizer.step(lambda net=net, x=x: net(x).square().sum().backward())
        for schedule in schedules:
            schedule.step()
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), twin.parameters(), strict=True))


def test_parameters_without_gradients_anywhere_are_passed_over() -> None:
    wanted = train_alone(4, 3, without=(0, 3, 6))
    assert_all_have(wanted, virtual_world(3).run(lambda axis: train_over(axis, 4, without=(0, 3, 6))).results)


def test_parameters_that_do_not_lie_in_a_row() -> None:
    def program(axis: weft.Axis) -> tuple[Tensor, Tensor]:
        start = place(torch.arange(24.0).view(4, 6))
        turned, straight = nn.Parameter(start.clone().mT), nn.Parameter(start.mT.contiguous())
        for parameter in (turned, straight):
            optimizer = optim.ShardedAdamW([parameter], lr=0.1, group=axis)
            for step in range(3):
                grad = torch.randn(6, 4, generator=torch.Generator().manual_seed(step + 10 * axis.rank))
                parameter.grad = place(grad)
                optimizer.step()
        return turned.detach(), straight.detach()

    for turned, straight in virtual_world(3).run(program).results:
        assert torch.equal(turned, straight) and not turned.is_contiguous()


def test_slices_of_equal_size() -> None:
    for lengths in ([5, 3], [1, 1, 1], [100, 0, 7], [13]):
        for ranks in (1, 2, 3, 8):
            ranges = cut_bucket(lengths, ranks)
            owned = [sum(stop - start for start, stop in (one[rank] for one in ranges)) for rank in range(ranks)]
            assert sum(owned) == sum(lengths) and max(owned) == -(-sum(lengths) // ranks)
            for length, one in zip(lengths, ranges, strict=True):
                assert one[0][0] == 0 and one[-1][1] == length
                assert all(before[1] == after[0] for before, after in itertools.pairwise(one))
    assert fill_buckets([4, 4, 4], 8) == [[0, 1], [2]] and fill_buckets([], 8) == []
    assert row_ranges((5, 2), 4) == [(0, 4), (4, 8), (8, 10), (10, 10)]


@pytest.mark.parametrize("size", [2, 4])
def test_what_is_sent_and_kept(size: int) -> None:
    """Each gradient and each weight once, less the own share; a P-th of the state."""
    elements = sum(weight.numel() for weight in weights())

    def program(axis: weft.Axis) -> tuple[int, int, int]:
        parameters = placed(weights())
        optimizer = optim.ShardedAdamW(parameters, group=axis)
        give(parameters, gradients(0, axis.rank))
        with weft.record() as ledger:
            optimizer.step()
        data = [event for event in ledger.events if not event.operation.endswith(".metadata")]
        kept = sum(v.numel() for s in optimizer.state.values() for name, v in s.items() if name != "step")
        return sum(event.bytes_sent for event in data), len(data), kept

    results = virtual_world(size).run(program).results
    assert sum(sent for sent, _, _ in results) == 2 * 4 * elements * (size - 1)
    assert all(count == 2 and kept <= 2 * -(-elements // size) for _, count, kept in results)


def test_a_largest_norm() -> None:
    wanted = [nn.Parameter(weight) for weight in weights()]
    theirs = torch.optim.AdamW(groups_of(wanted), **OPTIONS)
    norms = []
    for step in range(4):
        give(wanted, averaged(step, 3))
        norms.append(float(nn.utils.clip_grad_norm_(wanted, 0.5)))
        theirs.step()

    def program(axis: weft.Axis) -> tuple[list[Tensor], list[float]]:
        parameters = placed(weights())
        optimizer = optim.ShardedAdamW(groups_of(parameters), **OPTIONS, group=axis, clip=0.5)
        found = []
        for step in range(4):
            give(parameters, gradients(step, axis.rank))
            optimizer.step()
            found.append(optimizer.norm)
        return [parameter.detach() for parameter in parameters], found

    for found, seen in virtual_world(3).run(program).results:
        assert seen == pytest.approx(norms, rel=1e-6)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other.detach(), rtol=1e-5, atol=1e-6)


class Run:
    """Two good steps; then what was is kept."""

    def __init__(self, axis: weft.Axis, **options) -> None:
        self.axis, self.parameters = axis, placed(weights())
        self.optimizer = optim.ShardedAdamW(groups_of(self.parameters), **OPTIONS, group=axis, **options)
        for step in range(2):
            give(self.parameters, gradients(step, axis.rank))
            self.optimizer.step()
        self.before = self.now()

    def now(self) -> list[Tensor]:
        states = [v.clone() for p in self.parameters for v in self.optimizer.state[p].values()]
        return [parameter.detach().clone() for parameter in self.parameters] + states

    def outcome(self) -> tuple[str, bool, list[Tensor]]:
        """(error of a step, nothing changed, weights after a good step)."""
        words = ""
        try:
            self.optimizer.step()
        except (ValueError, TypeError, RuntimeError) as error:
            words = f"{type(error).__name__}: {error}"
        kept = all(torch.equal(*pair) for pair in zip(self.now(), self.before, strict=True))
        for group in self.optimizer.param_groups:
            group["eps"] = 1e-8
        give(self.parameters, gradients(2, self.axis.rank))
        self.optimizer.step()
        return words, kept, [parameter.detach() for parameter in self.parameters]


def not_finite(run: Run) -> None:
    if run.axis.rank == 2:
        run.parameters[6].grad[3] = math.inf


def missing(run: Run) -> None:
    if run.axis.rank == 0:
        run.parameters[1].grad = None


def sparse(run: Run) -> None:
    if run.axis.rank == 1:
        run.parameters[7].grad = run.parameters[7].grad.to_sparse()


def other_options(run: Run) -> None:
    run.optimizer.param_groups[0]["eps"] = 1e-4 if run.axis.rank == 1 else 1e-8


WRONG = [
    (not_finite, "RuntimeError: ShardedAdamW: the gradient of parameter 2 of group 1 is not finite on rank 2 of 3; "
                 "weights and state are as before"),
    (missing, "ValueError: ShardedAdamW: parameter 1 of group 0 has no gradient on rank 0 of 3, but on other ranks"),
    (sparse, "TypeError: ShardedAdamW: the gradient of parameter 3 of group 1 is torch.sparse_coo, not dense (rank 1)"),
    (other_options, "DisagreementError: ShardedAdamW.step: the ranks disagree"),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "words"), WRONG)
def test_what_is_wrong_is_raised_everywhere_with_nothing_changed(fault, words: str) -> None:
    def program(axis: weft.Axis) -> tuple[str, bool, list[Tensor]]:
        run = Run(axis)
        give(run.parameters, gradients(2, axis.rank))
        fault(run)
        return run.outcome()

    wanted = train_alone(3, 3)
    for found, kept, after in virtual_world(3).run(program).results:
        assert found.startswith(words) and kept
        assert_all_have(wanted, [after])


def test_a_step_that_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    def program(axis: weft.Axis) -> tuple[str, bool, list[Tensor]]:
        run = Run(axis, on_nonfinite="skip")
        give(run.parameters, gradients(2, axis.rank))
        not_finite(run)
        return run.outcome()

    with caplog.at_level(logging.WARNING):
        for words, kept, after in virtual_world(3).run(program).results:
            assert words == "" and kept
            assert_all_have(train_alone(3, 3), [after])
    assert "is not finite on rank 2 of 3; weights and state are as before: the step is skipped (rank 1)" in caplog.text


def test_what_is_refused() -> None:
    parameter = nn.Parameter(torch.ones(2))
    for options, words in (
        ({"lr": -1.0}, "must be finite and not negative, got -1.0"),
        ({"betas": (1.0, 0.9)}, r"betas must be in \[0, 1\), got \(1.0, 0.9\)"),
        ({"clip": 0.0}, "clip must be > 0, got 0.0"),
        ({"on_nonfinite": "pass"}, "on_nonfinite 'pass' is not one of raise, skip"),
    ):
        with pytest.raises(ValueError, match=words):
            optim.ShardedAdamW([parameter], **options)
    table = weft.ShardedEmbedding(4, 2)
    with pytest.raises(TypeError, match=r"is the table of a weft\.ShardedEmbedding; step it with weft\.optim\.RowAdam"):
        optim.ShardedAdamW(table.parameters())
    optimizer = optim.ShardedAdamW([parameter])
    with pytest.raises(TypeError, match=r"is torch\.complex64, not floating point"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, dtype=torch.complex64))]})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(TypeError, match=r"is not pickled or copied; save its state_dict\(\)"):
        copy.deepcopy(optimizer)
    for call in (optimizer.work, optimizer.finish):
        with pytest.raises(RuntimeError, match=r"the parts of a step are start\(\), work\(\) and finish\(\)"):
            call()


def test_shapes_that_differ_are_refused_on_every_rank() -> None:
    def program(axis: weft.Axis) -> None:
        optim.ShardedAdamW(placed([torch.ones(2 + axis.rank)]), group=axis)

    found = errors_of(program)
    assert len(found) == 3 and all("the ranks disagree" in words and "shapes=((4,),)" in words for words in found)


def test_a_state_is_that_of_torchs_adamw() -> None:
    """Ours into theirs, theirs into ours, on ranks and alone; a group added later comes along."""

    def program(axis: weft.Axis) -> tuple[list[Tensor], dict[str, Any]]:
        parameters = placed(weights())
        optimizer = optim.ShardedAdamW(groups_of(parameters)[:1], **OPTIONS, group=axis)
        optimizer.add_param_group(groups_of(parameters)[1])
        saved: dict[str, Any] = {}
        for step in range(6):
            if step == 3:
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer = optim.ShardedAdamW(groups_of(parameters), lr=9.0, group=axis)
                optimizer.load_state_dict(saved)
            give(parameters, gradients(step, axis.rank))
            optimizer.step()
        return [parameter.detach() for parameter in parameters], saved

    wanted = train_alone(6, 3)
    results = virtual_world(3).run(program).results
    assert_all_have(wanted, [found for found, _ in results])
    parameters = [nn.Parameter(weight) for weight in train_alone(3, 3)]
    theirs = torch.optim.AdamW(groups_of(parameters), lr=9.0)
    theirs.load_state_dict(results[0][1])
    middle = copy.deepcopy(theirs.state_dict())
    for step in range(3, 6):
        give(parameters, averaged(step, 3))
        theirs.step()
    assert_all_have(wanted, [[parameter.detach() for parameter in parameters]])

    def go_on(axis: weft.Axis) -> list[Tensor]:
        own = placed(train_alone(3, 3))
        optimizer = optim.ShardedAdamW(groups_of(own), lr=9.0, group=axis)
        optimizer.load_state_dict(middle)
        for step in range(3, 6):
            give(own, averaged(step, 3))
            optimizer.step()
        return [parameter.detach() for parameter in own]

    assert_all_have(wanted, virtual_world(2).run(go_on).results)


def test_states_that_do_not_fit_are_refused() -> None:
    optimizer = optim.ShardedAdamW([nn.Parameter(torch.ones(3, 2))])
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["exp_avg"] = torch.ones(2, 2)
    with pytest.raises(ValueError, match=r"exp_avg of parameter 0 of group 0 is \[2, 2\] in the state, not \[3, 2\]"):
        optimizer.load_state_dict(saved)
    with pytest.raises(ValueError, match="the state has 2 parameters, this optimizer 1"):
        optimizer.load_state_dict(optim.ShardedAdamW([nn.Parameter(torch.ones(2)) for _ in range(2)]).state_dict())
