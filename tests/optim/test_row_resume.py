"""A run that saves and goes on, and one that loads what was saved: the same bits, with rows that rest over the save."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from worlds import place, virtual_world

import weft
from weft import optim
from weft.optim.rows import state as row_state
from weft.parallel import checkpoint
from weft.world.launch import ProcessWorld

ROWS, WIDTH, SAVED, END = 60, 5, 9, 30


class Training:
    """A table and a matrix; the rates and the batches of a step depend on its number alone."""

    def __init__(
        self, axis: weft.Axis, kind: str, dtype: torch.dtype = torch.float32, alike: bool = False, **options: Any
    ) -> None:
        torch.manual_seed(0)
        self.seed = 0 if alike else axis.rank  # whether all ranks have the same batches
        self.table = place(weft.ShardedEmbedding(ROWS, WIDTH, group=axis, dtype=dtype))
        head = torch.randn(WIDTH, dtype=torch.promote_types(dtype, torch.float32))
        self.head = torch.nn.Parameter(place(head))
        rows = optim.RowAdam(self.table.parameters(), lr=0.1, **options)
        self.optimizer: torch.optim.Optimizer = rows
        if kind == "overlapped":
            self.optimizer = optim.OverlappedStep(
                [optim.ShardedAdamW([self.head], lr=0.01, group=axis), rows], clip=9.0
            )

    def run(self, steps: range) -> None:
        for step in steps:
            for group in self.optimizer.param_groups:
                group["lr"] = 0.0 if step < 4 or 12 <= step < 17 else 0.02 * (1 + step % 5)
            out = self.table(self.ids(step)).to(self.head.dtype) @ self.head
            if step % 3:
                self.table.prefetch(self.ids(step + 1))
            (out * (1 + 0.1 * step)).sin().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def ids(self, step: int) -> Tensor:
        """Of all rows at the first step and after the 20th; between, most of them rest."""
        make = torch.Generator().manual_seed(10 * step + self.seed)
        most = ROWS if step == 0 or step > 20 else 6
        return torch.randint(0, most, (40 if step == 0 else 7,), generator=make)

    def saved(self, moments_first: bool = True) -> dict[str, Any]:
        of = {"model": self.table, "optimizer": self.optimizer}
        names = ["optimizer", "model"] if moments_first else ["model", "optimizer"]
        return {**copy.deepcopy({name: of[name].state_dict() for name in names}), "head": self.head.detach().clone()}

    def load(self, saved: dict[str, Any]) -> None:
        self.head.data.copy_(saved["head"])
        self.table.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))

    def values(self) -> list[Tensor]:
        moments = self.optimizer.state_dict()["state"]
        tensors = [value for number in sorted(moments) for value in moments[number].values()]
        return [self.table.full_weight().detach(), self.head.detach(), *tensors]


KINDS = {
    "exact": {},
    "decay": {"weight_decay": 0.1},
    "endless": {"betas": (0.95, 0.9), "eps": 1e-3},  # momentum that never fades
    "auto": {"mode": "auto", "betas": (0.9, 0.95)},
    "lazy": {"mode": "lazy"},
}


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize("kind", ["rows", "overlapped"])
@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_resumed_run_has_the_bits_of_the_run_that_saved(
    kind: str, options: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_state, "LONGEST", 12)
    dtype = {"auto": torch.bfloat16, "decay": torch.float64}.get(options, torch.float32)

    def first(axis: weft.Axis) -> tuple[dict, list[Tensor]]:
        training = Training(axis, kind, dtype, **KINDS[options])
        training.run(range(SAVED))
        saved = training.saved(moments_first=options != "decay")
        training.run(range(SAVED, END))
        return saved, training.values()

    def second(axis: weft.Axis, saved: dict) -> list[Tensor]:
        training = Training(axis, kind, dtype, **KINDS[options])
        training.run(range(2))  # what it was before leaves no trace
        training.load(saved)
        training.run(range(SAVED, END))
        return training.values()

    going_on = virtual_world(size).run(first).results
    for axis_rank, found in enumerate(virtual_world(size).run(lambda axis: second(axis, going_on[0][0])).results):
        assert all(torch.equal(one, other) for one, other in zip(found, going_on[axis_rank][1], strict=True))


@pytest.mark.usefixtures("every_network")
def test_a_run_resumed_on_another_number_of_ranks_is_the_same_to_rounding() -> None:
    def run(axis: weft.Axis, saved: dict | None) -> tuple[dict, list[Tensor]]:
        training = Training(axis, "rows", torch.float64, alike=True)
        if saved is None:
            training.run(range(SAVED))
            saved = training.saved()
        else:
            training.load(saved)
        training.run(range(SAVED, END))
        return saved, training.values()

    saved, wanted = virtual_world(3).run(lambda axis: run(axis, None)).results[0]
    for size in (1, 2):
        for _, found in virtual_world(size).run(lambda axis: run(axis, saved)).results:
            for one, other in zip(found, wanted, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def tensors_of(training: Training) -> dict[str, Tensor]:
    states = training.optimizer.state_dict()["state"]
    named = {f"{number}.{name}": value for number, state in states.items() for name, value in state.items()}
    return {"weight": training.table.state_dict()["weight"], "head": training.head.detach(), **named}


def save_and_go_on(axis: weft.Axis, folder: str) -> list[Tensor]:
    training, group = Training(axis, "overlapped"), checkpoint.new_group()
    training.run(range(SAVED))
    checkpoint.start_saving(Path(folder), tensors_of(training), {}, lambda: None, group).result()
    training.run(range(SAVED, END))
    return [training.table.full_weight().detach(), training.head.detach()]


def load_and_go_on(axis: weft.Axis, folder: str) -> list[Tensor]:
    training, group = Training(axis, "overlapped"), checkpoint.new_group()
    tensors = {name: value.detach().clone() for name, value in tensors_of(training).items()}
    checkpoint.load_tensors(Path(folder), tensors, group)
    groups = training.optimizer.state_dict()["param_groups"]
    states: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        if name[0].isdigit():
            states.setdefault(int(name[0]), {})[name[2:]] = value
    model = {"weight": tensors["weight"]}
    training.load({"model": model, "head": tensors["head"], "optimizer": {"state": states, "param_groups": groups}})
    training.run(range(SAVED, END))
    return [training.table.full_weight().detach(), training.head.detach()]


@pytest.mark.processes
def test_through_files(two: ProcessWorld, tmp_path: Path) -> None:
    """As the trainer saves and loads, on two processes."""
    folder = str(tmp_path / "checkpoint")
    wanted, found = two.run(save_and_go_on, folder), two.run(load_and_go_on, folder)
    for mine, theirs in zip(found, wanted, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))
