"""The norm of all gradients of a step: every element once, whatever axes it lies on, and the same bits on all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from weft.comm import Axis, Pending
from weft.optim.step.record import StepRecord

if TYPE_CHECKING:
    from weft.optim.step.run import Unit


@dataclass(frozen=True)
class _Options:
    """What the ranks must have in common: how many sums are told."""

    sums: int


def norm_of(label: str, units: Sequence[Unit], axes: Sequence[Axis], record: StepRecord) -> float:
    """The norm of the gradients of all ``units``, which arrive here; ``axes`` are all that any of them lies on.

    Squares of units that lie on the same axes are one sum. It is summed along those, in rank order. On the others its
    ranks have the same, so once it is whole the first rank's is taken. The first scalars travel while the parts do what
    does not depend on them.
    """
    kinds: list[frozenset[int]] = []  # the axes of each sum
    squares: list[Tensor] = []
    for unit in units:
        unit.part.advance(unit.bucket)
        with record.working(unit):
            kind = frozenset(id(axis.counter) for axis in unit.part.norm_axes(unit.bucket) if axis.size > 1)
            if kind not in kinds:
                kinds.append(kind)
                squares.append(torch.zeros((), dtype=torch.float64))
            squares[kinds.index(kind)] += _squared_norm(unit).cpu()
    mine = torch.stack(squares) if squares else torch.zeros(1, dtype=torch.float64)
    done: set[int] = set()
    later: list[Axis] = []
    for place, axis in enumerate(axes):
        coming = _share(label, axis, mine, record)
        for unit in units if place == 0 else ():
            with record.working(unit):
                _work_ahead(unit)
        every = _take(coming, record)
        own, done = id(axis.counter), {*done, id(axis.counter)}
        if any(own not in kind and not kind <= done for kind in kinds):
            later.append(axis)  # some sum is not whole yet, and may differ in its last bits between these ranks
        for at, kind in enumerate(kinds):
            if own in kind:
                mine[at] = sum((row[at] for row in every[1:]), start=every[0][at])
            elif kind <= done:
                mine[at] = every[0][at]
    total = mine.sum().sqrt().view(1)
    for axis in later:
        total = _take(_share(label, axis, total, record), record)[0]
    return float(total)


def _squared_norm(unit: Unit) -> Tensor:
    """Not a number where it cannot be computed: no rank then works on anything."""
    nothing = torch.tensor(math.nan, dtype=torch.float64)
    return unit.part.attempt(None, lambda: unit.part.squared_norm(unit.bucket), lambda: nothing)


def _work_ahead(unit: Unit) -> None:
    unit.part.attempt(None, lambda: unit.part.work_ahead(unit.bucket), lambda: None)


def _share(label: str, axis: Axis, mine: Tensor, record: StepRecord) -> Pending[list[Tensor]]:
    """Everybody's ``mine``, told on the host side: it decides there what is done."""
    with record.telling():
        call = axis.begin(f"{label}.norm", _Options(len(mine)), metadata=mine.view(torch.int64).tolist())
    return Pending(lambda: [torch.tensor(row).view(torch.float64) for row in call.metadata.wait()])


def _take(coming: Pending[list[Tensor]], record: StepRecord) -> list[Tensor]:
    with record.telling():
        return coming.wait()
