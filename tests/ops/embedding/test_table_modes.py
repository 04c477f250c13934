"""Tables and `RowAdam` within inference_mode, autocast, fake tensors and another default dtype: nothing of it stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from worlds import place, virtual_world

import weft

ROWS = 40


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def ids_of(step: int, rank: int) -> Tensor:
    make = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(0, ROWS if step % 6 == 0 else 6, (9,), generator=make)


def train(
    axis: weft.Axis, kind: str, validate: Callable[[], AbstractContextManager], around=nullcontext, **options
) -> list[Tensor]:
    """12 steps; before each a validation within ``validate()``, and everything within ``around()``."""
    torch.manual_seed(0)
    table = place(weft.ShardedEmbedding(ROWS, 3, group=axis, dtype=torch.float32, **options))
    rows = weft.optim.RowAdam(table.parameters(), lr=0.1, weight_decay=0.1)
    step = weft.optim.OverlappedStep([rows], clip=5.0) if kind == "overlapped" else rows
    seen = []
    for number in range(12):
        with validate():
            seen.append(table(torch.arange(number, ROWS, 3)).clone())
            seen.append(table.full_weight().clone())
            rows.state_dict()
            table.prefetch(ids_of(number, axis.rank))
        with around():
            out = table(ids_of(number, axis.rank))
            table.prefetch(ids_of(number + 1, axis.rank))
            (out * (1 + 0.1 * number)).sin().sum().backward()
            step.step()
            step.zero_grad()
    assert rows.state[table.weight]["step"] == 12 and rows.state[table.weight]["step"].dtype == torch.float32
    assert rows.state[table.weight]["exp_avg"].dtype == torch.float32
    return [*seen, table.full_weight().detach()]


def assert_same(wanted: list[list[Tensor]], found: list[list[Tensor]]) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize("replicate", [False, True])
@pytest.mark.parametrize("kind", ["rows", "overlapped"])
@pytest.mark.parametrize("size", [1, 3])
def test_validation_in_inference_mode_leaves_nothing_behind(kind: str, size: int, replicate: bool) -> None:
    def run(mode: Callable[[], AbstractContextManager]) -> list[list[Tensor]]:
        return virtual_world(size).run(lambda axis: train(axis, kind, mode, replicate=replicate)).results

    assert_same(run(torch.no_grad), run(torch.inference_mode))


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize("kind", ["rows", "overlapped"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(kind: str, dtype: torch.dtype) -> None:
    def run(around: Callable[[], AbstractContextManager]) -> list[list[Tensor]]:
        return virtual_world(2).run(lambda axis: train(axis, kind, torch.no_grad, around)).results

    assert_same(run(nullcontext), run(lambda: torch.autocast(place(torch.zeros(0)).device.type, dtype=dtype)))


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize("kind", ["rows", "overlapped"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_changes_nothing(kind: str, dtype: torch.dtype) -> None:
    def run() -> list[list[Tensor]]:
        return virtual_world(2).run(lambda axis: train(axis, kind, torch.no_grad)).results

    wanted = run()
    with default_dtype(dtype):
        assert_same(wanted, run())


def test_steps_are_counted_past_256_under_a_bf16_default() -> None:
    def run() -> tuple[Tensor, int]:
        torch.manual_seed(0)
        table = weft.ShardedEmbedding(ROWS, 3, dtype=torch.float32)
        optimizer = weft.optim.RowAdam(table.parameters(), lr=0.1)
        for number in range(300):
            table(torch.tensor([number % 2])).sin().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
        return table.full_weight().detach(), int(optimizer.state_dict()["state"][0]["step"])

    wanted = run()
    with default_dtype(torch.bfloat16):
        found = run()
    assert found[1] == wanted[1] == 300 and torch.equal(found[0], wanted[0])


@pytest.mark.parametrize("kind", ["rows", "overlapped"])
def test_a_call_under_fake_tensors_leaves_nothing_behind(kind: str) -> None:
    """What it gives is fake, or an error of torch's; the table and its optimizer stay real."""

    class Fake(AbstractContextManager):
        """As a tool does that traces a model: errors are its own business."""

        def __enter__(self) -> None:
            self.mode = FakeTensorMode(allow_non_fake_inputs=True)
            self.mode.__enter__()

        def __exit__(self, *error) -> bool:
            self.mode.__exit__(*error)
            return True

    def run(mode: Callable[[], AbstractContextManager] | None) -> Tensor:
        torch.manual_seed(0)
        table = weft.ShardedEmbedding(ROWS, 3, dtype=torch.float64)
        rows = weft.optim.RowAdam(table.parameters(), lr=0.1, weight_decay=0.1)
        step = weft.optim.OverlappedStep([rows]) if kind == "overlapped" else rows
        batches = [ids_of(number, 0) for number in range(9)]
        for number in range(8):
            for call in (table, table.prefetch, lambda ids: table.full_weight(), lambda ids: table.state_dict()):
                with mode() if mode else torch.no_grad():
                    call(batches[number])
            (table(batches[number]) * (1 + 0.1 * number)).sin().sum().backward()
            table.prefetch(batches[number + 1])
            step.step()
            step.zero_grad()
        return table.full_weight().detach()

    torch.testing.assert_close(run(Fake), run(None), rtol=1e-12, atol=1e-12)
