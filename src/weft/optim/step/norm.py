"""The norm of a step's gradients over all ranks: every element once, the same bits on all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from weft.comm import Axis, Pending
from weft.comm.device import copy_to_device, runs_behind
from weft.optim.step.record import AGREEING, StepRecord

if TYPE_CHECKING:
    from weft.optim.step.run import Unit


@dataclass(frozen=True)
class _Options:
    """What the ranks must have in common: how many sums make the norm."""

    sums: int


class GlobalNorm:
    """The norm of the gradients of some ``units`` over ``axes``, computed on ``device``, the same kind on all ranks.

    Squares of units that lie on the same axes are one sum. It is summed along those, in rank order. On the others
    its ranks have the same, so once it is whole the first rank's is taken. The first scalars travel while the parts
    do what does not depend on them. On a device they travel as tensors of it: the host does not wait.
    """

    def __init__(
        self, label: str, units: Sequence[Unit], axes: Sequence[Axis], device: torch.device, record: StepRecord
    ) -> None:
        self._label, self._units, self._axes, self._device, self._record = label, units, axes, device, record

    def find(self) -> Tensor:
        """An fp64 scalar."""
        kinds, mine = self._sum_squares()
        done: set[int] = set()
        later: list[Axis] = []
        for place, axis in enumerate(self._axes):
            coming = self._share(axis, mine)
            for unit in self._units if place == 0 else ():
                with self._record.doing(unit.name, f"work ahead: {unit.name}.{unit.bucket}"):
                    unit.part.attempt(None, partial(unit.part.work_ahead, unit.bucket), lambda: None)
            with self._record.doing(AGREEING):
                every = coming.wait()
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
            coming = self._share(axis, total)
            with self._record.doing(AGREEING):
                total = coming.wait()[0]
        return total.view(())

    def _sum_squares(self) -> tuple[list[frozenset[int]], Tensor]:
        """The axes of each sum, and this rank's part of it."""
        kinds: list[frozenset[int]] = []
        squares: list[Tensor] = []
        nothing = torch.tensor(math.nan, dtype=torch.float64)  # where it cannot be computed: no rank works on anything
        for unit in self._units:
            part, bucket = unit.part, unit.bucket
            with self._record.doing(unit.name):
                part.advance(bucket)
            with self._record.doing(unit.name, f"norm: {unit.name}.{bucket}"):
                kind = frozenset(id(axis.counter) for axis in part.norm_axes(bucket) if axis.size > 1)
                if kind not in kinds:
                    kinds.append(kind)
                    squares.append(torch.zeros((), dtype=torch.float64, device=self._device))
                square = part.attempt(None, partial(part.squared_norm, bucket), lambda: nothing)
                squares[kinds.index(kind)] += copy_to_device(square, self._device)
        return kinds, torch.stack(squares) if squares else torch.zeros(1, dtype=torch.float64, device=self._device)

    def _share(self, axis: Axis, mine: Tensor) -> Pending[list[Tensor]]:
        """Everybody's ``mine``. On the CPU it goes with the metadata: there the host decides what is done."""
        with self._record.doing(AGREEING):
            if runs_behind(self._device):
                return axis.begin(f"{self._label}.norm", _Options(len(mine))).all_gather(mine)
            numbers = mine.view(torch.int64).tolist()
            call = axis.begin(f"{self._label}.norm", _Options(len(mine)), metadata=numbers)
        return Pending(lambda: [torch.tensor(row).view(torch.float64) for row in call.metadata.wait()])
