"""What decides about a step: whether its numbers are finite, and their norm.

What lies on a device the host reads once, after all work has been issued.

On the CPU gradients are looked through before anything is sent. On a device that would make the host wait for the
backward, so there a step is worked on in any case, and whether its numbers are finite is known before it is accepted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from weft.comm import Axis, Pending
from weft.comm.device import copy_to_device, runs_behind, start_copy_to_host
from weft.comm.rounds import gather_rows
from weft.optim.step.compare import Examined, Seen, digest_of, first_nonfinite, is_finite
from weft.optim.step.record import AGREEING, StepRecord
from weft.parallel.dtensor import local_of

if TYPE_CHECKING:
    from weft.optim.step.run import Unit


class Verdict:
    """Small tensors of a step under way, and who is told their values."""

    def __init__(self) -> None:
        self._noted: list[tuple[Tensor, Callable[[Tensor], None]]] = []

    def note(self, value: Tensor, take: Callable[[Tensor], None]) -> None:
        """Let ``take`` have ``value``, of bool, int64 or float64, as a flat tensor on the CPU, when it is read."""
        self._noted.append((value.detach().reshape(-1), take))

    def are_finite(self, tensors: Sequence[Tensor], fail: Callable[[], None]) -> bool | Tensor:
        """Whether all elements are; ``fail`` is called if not. On a device that is not known yet: a bool tensor."""
        if not runs_behind(tensors[0].device):
            if not (found := is_finite(*tensors)):
                fail()
            return found
        filled = [tensor for tensor in tensors if tensor.numel()]
        if not filled:
            return True
        fine = _each_finite(filled).all()
        self.note(fine, lambda value: None if bool(value) else fail())
        return fine

    def read(self) -> None:
        """Give all values to those who asked: one copy to the host, and one wait."""
        noted, self._noted = self._noted, []
        if not noted:
            return
        bits = torch.cat([value.view(torch.int64) if value.is_floating_point() else value for value, _ in noted])
        values = start_copy_to_host(bits.to(torch.int64)).wait().split([len(value) for value, _ in noted])
        for (asked, take), value in zip(noted, values, strict=True):
            take(value.view(torch.float64) if asked.is_floating_point() else value)


def device_of(parameters: Sequence[Tensor]) -> torch.device:
    """Where a step's numbers are: on the device of its parameters that runs behind the host, if there is one."""
    found = (parameter.device for parameter in parameters if runs_behind(parameter.device))
    return next(found, torch.device("cpu"))


def look(examined: Examined, axes: Sequence[Axis], found_inf: Tensor | None, verdict: Verdict) -> Seen:
    """What the elements of this rank's gradients are; of those on a device, once ``verdict`` has been read."""
    seen = Seen(norms=[0.0] * len(examined.alike_over(axes)))

    def take_found_inf(value: Tensor) -> None:
        seen.found_inf = bool((value > 0).any())

    def take_norm(place: int, value: Tensor) -> None:
        seen.norms[place] = float(value)

    if found_inf is not None:
        _take(verdict, found_inf.double(), take_found_inf)
    if examined.fault is not None:
        return seen
    there = [(index, grad) for index, grad in enumerate(examined.grads) if grad is not None and grad.numel()]
    behind = [(index, grad) for index, grad in there if runs_behind(grad.device)]
    seen.nonfinite = first_nonfinite([(index, grad) for index, grad in there if not runs_behind(grad.device)])

    def take_flags(flags: Tensor) -> None:
        first = next((1 + index for (index, _), fine in zip(behind, flags.tolist(), strict=True) if not fine), 0)
        seen.nonfinite = min(filter(None, (seen.nonfinite, first)), default=0)

    if behind:
        verdict.note(_each_finite([grad for _, grad in behind]), take_flags)
    for place, axis in enumerate(examined.alike_over(axes)):
        grads = [grad for grad, one in zip(examined.grads, examined.alike, strict=True)
                 if one is axis and grad is not None and grad.numel()]  # fmt: skip
        if grads:
            norm = torch.nn.utils.get_total_norm(grads).double()
            _take(verdict, norm, lambda value, place=place: take_norm(place, value))  # type: ignore[misc]
    return seen


def digest_weights(parameters: Sequence[Tensor], asked: Sequence[int], verdict: Verdict) -> list[int]:
    """The digests of the parameters with these indices; of those on a device, once ``verdict`` has been read."""
    digests = [0] * len(asked)

    def take(place: int, value: Tensor) -> None:
        digests[place] = int(value)

    for place, at in enumerate(asked):
        digest = digest_of(local_of(parameters[at]))
        _take(verdict, digest, lambda value, place=place: take(place, value))  # type: ignore[misc]
    return digests


def _take(verdict: Verdict, value: Tensor, take: Callable[[Tensor], None]) -> None:
    """At once, if it is on the host."""
    if runs_behind(value.device):
        verdict.note(value, take)
    else:
        take(value)


def _each_finite(tensors: Sequence[Tensor]) -> Tensor:
    """``[n]``: whether all elements of each are, on their device. The largest of a NaN and anything is NaN."""
    return torch.stack(torch._foreach_norm(list(tensors), math.inf)).isfinite()


# The norm of a step.


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

    def _share(self, axis: Axis, mine: Tensor) -> Pending[Tensor]:
        """Everybody's ``mine``. On the CPU it goes with the metadata: there the host decides what is done."""
        with self._record.doing(AGREEING):
            if runs_behind(self._device):
                return gather_rows(axis.begin(f"{self._label}.norm", _Options(len(mine))), mine)
            numbers = mine.view(torch.int64).tolist()
            call = axis.begin(f"{self._label}.norm", _Options(len(mine)), metadata=numbers)
        return Pending(lambda: torch.tensor(call.metadata.wait()).view(torch.float64))
