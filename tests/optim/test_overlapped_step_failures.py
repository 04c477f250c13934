"""`OverlappedStep` when something is wrong: the same words on every rank, nothing of any part changed, then on as if
nothing had happened."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import pytest
import torch
from mixed_model import Mixed, backward, overlapped, train_overlapped, weights_in_memory
from torch import Tensor
from worlds import place, virtual_world

import weft
from weft import optim
from weft.errors import NcclRuleError
from weft.optim.matrix import stable
from weft.optim.matrix.rule import EigenError

pytestmark = pytest.mark.usefixtures("every_network")


class Run:
    """Two good steps. (A forward brings the rows it needs up to date, so a third batch is always the same one.)"""

    def __init__(self, axis: weft.Axis, **options) -> None:
        self.axis, self.model = axis, Mixed(axis)
        self.optimizer = overlapped(self.model, axis, **options)
        for step in range(2):
            backward(self.model, axis, step, 1)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def now(self) -> list[Tensor]:
        kept = [value.clone() for state in self.optimizer.state.values() for value in state.values()]
        parameters = weights_in_memory(self.model)
        rows = [value.clone() for part in self.optimizer.parts.values() if isinstance(part, optim.RowAdam)
                for one in part._rows.values() for value in (one.last, one.at_rest)]  # fmt: skip
        return [*parameters, *kept, *rows]

    def outcome(self) -> tuple[str, bool, list[Tensor]]:
        """(what a step raised, nothing was changed, everything after a good step)."""
        words, before = "", self.now()
        try:
            self.optimizer.step()
        except (ValueError, TypeError, RuntimeError) as error:
            words = f"{type(error).__name__}: {error}"
        kept = all(torch.equal(*pair) for pair in zip(self.now(), before, strict=True))
        self.optimizer.zero_grad()
        self.optimizer.param_groups[0]["eps"] = 1e-8
        backward(self.model, self.axis, 2, 1)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return words, kept, self.model.values()


def in_a_matrix(run: Run) -> None:
    run.model.net[0].weight.grad[0, 0] = math.nan


def in_a_vector(run: Run) -> None:
    run.model.net[2].bias.grad[1] = math.inf


def missing(run: Run) -> None:
    run.model.net[3].bias.grad = None


def sparse(run: Run) -> None:
    run.model.net[0].weight.grad = run.model.net[0].weight.grad.to_sparse()


def other_options(run: Run) -> None:
    run.optimizer.param_groups[0]["eps"] = 1e-3


FAULTS = [
    (in_a_matrix, "RuntimeError: OverlappedStep: the gradient of parameter 0 of group 0 (REKLS) is not finite on rank "
                  "1 of 3; weights and state are as before"),
    (in_a_vector, "RuntimeError: OverlappedStep: the gradient of parameter 2 of group 0 (ShardedAdamW) is not finite "
                  "on rank 1 of 3; weights and state are as before"),
    (missing, "ValueError: OverlappedStep: parameter 0 of group 1 (ShardedAdamW) has no gradient on rank 1 of 3, but "
              "on other ranks; give it one on all ranks"),
    (sparse, "TypeError: OverlappedStep: the gradient of parameter 0 of group 0 (REKLS) is torch.sparse_coo, not dense "
             "(rank 1)"),
    (other_options, "DisagreementError: OverlappedStep.step: the ranks disagree"),
]  # fmt: skip


@pytest.fixture(scope="module")
def good(every_network: str) -> list[Tensor]:
    """Three good steps, where the others are made: matmuls of a device may round otherwise."""
    return virtual_world(3).run(lambda axis: train_overlapped(axis, 3)).results[0]


def assert_untouched(program: Callable[[weft.Axis], tuple[str, bool, list[Tensor]]], words: str, good: list) -> None:
    for found, kept, after in virtual_world(3).run(program).results:
        assert found.startswith(words), found
        assert kept
        assert all(torch.equal(*pair) for pair in zip(after, good, strict=True))


@pytest.mark.parametrize(("fault", "words"), FAULTS)
def test_what_one_rank_has_wrong_is_raised_on_all(fault: Callable[[Run], None], words: str, good: list[Tensor]) -> None:
    def program(axis: weft.Axis) -> tuple[str, bool, list[Tensor]]:
        run = Run(axis)
        backward(run.model, axis, 2, 1)
        if axis.rank == 1:
            fault(run)
        return run.outcome()

    assert_untouched(program, words, good)


def spoil(parameter: torch.nn.Parameter) -> None:
    """Let the gradient of a parameter be wrong before any hook sees it."""

    def change(grad: Tensor) -> Tensor:
        hook.remove()
        return grad * math.nan

    hook = parameter.register_hook(change)


def test_what_is_not_finite_has_left_in_the_backward_already(good: list[Tensor]) -> None:
    def program(axis: weft.Axis) -> tuple[str, bool, list[Tensor]]:
        run = Run(axis, overlap_backward=True, bucket_bytes=100)
        if axis.rank == 2:
            spoil(run.model.net[5].weight)
        backward(run.model, axis, 2, 1)
        return run.outcome()

    assert_untouched(
        program,
        "RuntimeError: OverlappedStep: the gradient of parameter 2 of group 0 (REKLS) is not finite on rank 2",
        good,
    )


def test_a_gradient_that_one_rank_lacks_after_others_have_left() -> None:
    """Others have sent theirs in the backward; this rank sends zeros, and all raise."""

    def program(axis: weft.Axis, lacks: bool) -> tuple[str, list[Tensor]]:
        torch.manual_seed(0)
        model = place(torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3))))
        parts = [optim.ShardedAdamW(layer.parameters(), lr=0.1, group=axis) for layer in model]
        step, words = optim.OverlappedStep(parts, overlap_backward=True), ""
        for turn in range(3):
            model[1].requires_grad_(not (lacks and turn == 1 and axis.rank == 0))
            x = place(torch.ones(2, 4)) * (1 + axis.rank)
            model(x).sum().backward()
            model[1].requires_grad_(True)
            if turn == 1 and not lacks:
                step.zero_grad()
                continue
            try:
                step.step()
            except ValueError as error:
                words = str(error)
            step.zero_grad()
        return words, [p.detach() for p in model.parameters()]

    wanted = virtual_world(3).run(lambda axis: program(axis, False)).results
    for (words, after), (none, other) in zip(
        virtual_world(3).run(lambda axis: program(axis, True)).results, wanted, strict=True
    ):
        assert none == "" and words.startswith(
            "OverlappedStep: parameter 0 of group 0 (ShardedAdamW_2) has no gradient on rank 0 of 3, but on other"
        )
        assert all(torch.equal(*pair) for pair in zip(after, other, strict=True))


def test_a_rank_that_lacks_a_gradient_sends_at_another_point_of_the_backward(good: list[Tensor]) -> None:
    """Between the messages of tables. NCCL has one line for all messages of a group; gradients have their own there."""

    def program(axis: weft.Axis) -> tuple[str, bool, list[Tensor]]:
        run = Run(axis, overlap_backward=True, bucket_bytes=100)
        if axis.rank == 0:
            run.model.net[5].requires_grad_(False)
        backward(run.model, axis, 2, 1)
        run.model.net[5].requires_grad_(True)
        return run.outcome()

    words = "ValueError: OverlappedStep: parameter 2 of group 0 (REKLS) has no gradient on rank 0 of 3, but on"
    assert_untouched(program, words, good)


def rows_not_finite(run: Run) -> None:
    """In the gradient of rows: found by their owner, when they have arrived."""
    hook = run.model.net[0].register_full_backward_hook(
        lambda module, into, out: (into[0] * (math.nan if run.axis.rank == 2 else 1.0),)
    )
    backward(run.model, run.axis, 2, 1)
    hook.remove()


@pytest.mark.parametrize("options", [{}, {"overlap_backward": True}, {"clip": 1e9}])
def test_rows_that_are_not_finite(options: dict, good: list[Tensor]) -> None:
    def program(axis: weft.Axis) -> tuple[str, bool, list[Tensor]]:
        run = Run(axis, **options)
        rows_not_finite(run)
        return run.outcome()

    words = (
        "RuntimeError: OverlappedStep: the gradient of table 0 of group 0 (RowAdam) is not finite; weights and state"
    )
    assert_untouched(program, words, good)


def test_a_part_that_cannot_do_its_work(monkeypatch: pytest.MonkeyPatch, good: list[Tensor]) -> None:
    """On one owner: by then other parts have worked, and none of that is kept."""

    def program(axis: weft.Axis) -> tuple[str, bool, list[Tensor]]:
        run = Run(axis, order=(2, 1, 0))
        backward(run.model, axis, 2, 1)
        broken[0], before = True, run.now()
        try:
            run.optimizer.step()
            words = ""
        except RuntimeError as error:
            words = f"RuntimeError: {error}"
        broken[0] = False
        kept = all(torch.equal(*pair) for pair in zip(run.now(), before, strict=True))
        run.optimizer.step()
        return words, kept, run.model.values()

    original, broken = stable._inverse_root, [False]

    def inverse_root(factor):
        if broken[0] and len(factor) == 7:  # of the matrix 7 x 10
            raise EigenError("no")
        return original(factor)

    monkeypatch.setattr(stable, "_inverse_root", inverse_root)
    words = (
        "RuntimeError: OverlappedStep: the update of parameter 1 of group 0 (REKLS) could not be computed; weights and"
    )
    assert_untouched(program, words, good)


def test_a_step_that_is_skipped(caplog: pytest.LogCaptureFixture, good: list[Tensor]) -> None:
    def program(axis: weft.Axis) -> tuple[str, bool, list[Tensor]]:
        run = Run(axis, on_nonfinite="skip")
        backward(run.model, axis, 2, 1)
        if axis.rank == 1:
            in_a_matrix(run)
        return run.outcome()

    with caplog.at_level(logging.WARNING):
        assert_untouched(program, "", good)
    assert "(REKLS) is not finite on rank 1 of 3; weights and state are as before: the step is skipped (rank 2)" in (
        caplog.text
    )


def twice(run: Run) -> None:
    backward(run.model, run.axis, 2, 1)


def clipped(run: Run) -> None:
    torch.nn.utils.clip_grad_norm_([run.model.net[5].weight], 1e-3)


def replaced(run: Run) -> None:
    run.model.net[5].weight.grad = run.model.net[5].weight.grad.clone()


BROKEN = {  # a second backward adds to gradients in place
    ("nccl", clipped): (NcclRuleError, "changed what it sends"),
    ("sim", clipped): (RuntimeError, r"race: \w+ writes \[3, 7\]"),
    ("sim", twice): (RuntimeError, r"race: add_ writes"),
}


@pytest.mark.parametrize("change", [twice, clipped, replaced])
def test_gradients_that_are_changed_after_they_have_left(
    change: Callable[[Run], None], every_network: str, good: list[Tensor]
) -> None:
    """On one rank or on all: the way out is named, and nothing hangs.

    Writing into what is on its way is a broken rule of NCCL; the step is dropped there, too, so nothing comes of it.
    """

    def program(axis: weft.Axis) -> tuple[str, bool, list[Tensor]]:
        run = Run(axis, overlap_backward=True)
        backward(run.model, axis, 2, 1)
        if change is twice or axis.rank == 1:
            change(run)
        return run.outcome()

    if (every_network, change) in BROKEN:
        kind, words = BROKEN[every_network, change]
        with pytest.raises(kind, match=words):
            virtual_world(3).run(program)
        return
    for found, kept, after in virtual_world(3).run(program).results:
        assert "ValueError: OverlappedStep: the gradient of parameter" in found
        assert (
            "was changed after it had been sent in the backward (rank" in found
            and "no_sync(), clip with clip=" in found
        )
        assert kept and all(torch.equal(*pair) for pair in zip(after, good, strict=True))


def test_gradients_that_are_given_up(good: list[Tensor]) -> None:
    """zero_grad after a backward instead of a step: what had left is waited for and dropped."""

    def program(axis: weft.Axis) -> tuple[str, bool, list[Tensor]]:
        run = Run(axis, overlap_backward=True)
        backward(run.model, axis, 2, 1)
        run.optimizer.zero_grad()
        backward(run.model, axis, 2, 1)
        run.optimizer.step()
        return "", True, run.model.values()

    assert_untouched(program, "", good)


def test_a_fault_of_one_rank_reaches_a_mesh() -> None:
    """Also the ranks that share no axis with it."""

    def program(axis: weft.Axis) -> str:
        row, column = divmod(axis.rank, 2)
        tensor, data = axis.subset([2 * row, 2 * row + 1]), axis.subset([column, column + 2])
        shard, vector = place((torch.nn.Parameter(torch.ones(3, 4)), torch.nn.Parameter(torch.ones(7))))
        step = optim.OverlappedStep([
            optim.REKLS([{"params": [shard], "partition_dim": 0}], lr=0.1, group=tensor, data_group=data),
            optim.ShardedAdamW([vector], group=data),
        ])  # fmt: skip
        shard.grad, vector.grad = torch.ones_like(shard), torch.ones_like(vector)
        if axis.rank == 3:
            vector.grad[0] = math.nan
        try:
            step.step()
        except RuntimeError as error:
            return f"{error} {torch.equal(shard, torch.ones_like(shard))}"
        return ""

    found = virtual_world(4).run(program).results
    assert len(set(found)) == 1 and "(ShardedAdamW) is not finite on rank 1 of 2, rank 1 of 2" in found[0]
    assert found[0].endswith("as before True")
