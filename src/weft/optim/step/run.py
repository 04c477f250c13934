"""One step over some parts: compared, sent, worked on, judged and committed; nothing changes before all ranks agree."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from weft.comm import Axis, Pending
from weft.comm.arguments import read
from weft.comm.function import outside_autocast
from weft.optim.step.compare import Examined, compare_gradients, compare_weights, gather_verdict, is_lost, parameters_of
from weft.optim.step.record import AGREEING, StepRecord

if TYPE_CHECKING:
    from weft.optim.step.part import StepPart

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Options:
    """What the ranks must have in common: how many parameters a verdict is about, or how many sums make the norm."""

    count: int


@dataclass(frozen=True)
class Unit:
    """One bucket of one part, of this name: what is sent and worked on at once."""

    name: str
    part: StepPart
    bucket: int


def union_of_axes(parts: Sequence[StepPart]) -> list[Axis]:
    """The axes of more than one rank that any part's ranks stand on, each once."""
    found: list[Axis] = []
    for axis in (axis for part in parts for axis in part.step_axes()):
        if axis.size > 1 and not any(axis.counter is one.counter for one in found):
            found.append(axis)
    return found


class StepRun:
    """The step under way of some named ``parts``. ``label`` stands in errors and in the names of its own messages.

    | crosses ranks | what                                                           | when                          |
    |---------------|----------------------------------------------------------------|-------------------------------|
    | integers      | who has which gradients, settings, faults                      | `start`; `work_on_sent`       |
    | integers      | digests of replicated weights, in the first step               | `start`; `work_on_sent`       |
    | gradients     | as the parts send them, in the order of ``units``              | `start`, or before it         |
    | scalars       | squared norms, with ``clip``                                   | `work`, under ``work_ahead``  |
    | results       | as the parts return them, in the order of ``units``            | `work`                        |
    | integers      | whether all work succeeded                                     | `finish`, beside the results  |

    All of it happens outside autocast.
    """

    def __init__(
        self, label: str, parts: Mapping[str, StepPart], units: Sequence[Unit], clip: float | None, on_nonfinite: str
    ) -> None:
        self._label, self._parts, self._units = label, dict(parts), units
        self._clip, self._on_nonfinite = clip, on_nonfinite
        self._axes = union_of_axes(list(parts.values()))
        self._rank = self._axes[-1].rank if self._axes else 0
        self._reason: str | None = None  # why nothing will be changed
        self._skips = False  # whether nothing is worked on: a gradient is not finite
        self._begun = False  # whether parts have something to commit
        self._names: list[str] = []  # of all parts' parameters
        self._part_of: list[StepPart] = []
        self.record = StepRecord(self._axes[0].wire.clock if self._axes else time.perf_counter, self._rank)

    @outside_autocast()
    def begin(self, present: Sequence[Tensor]) -> None:
        """Let all parts begin a step in which these parameters have gradients."""
        self._begun = True
        for part in self._parts.values():
            part.begin(set(present) & set(parameters_of(part)))

    @outside_autocast()
    def send(self, units: Sequence[Unit]) -> None:
        """Start the gradients of some units, in this order."""
        for unit in units:
            with self.record.doing(unit.name):
                unit.part.send(unit.bucket)

    @outside_autocast()
    def compare(self, found_inf: Tensor | None = None, fault: Exception | None = None) -> list[Tensor]:
        """The parameters that have gradients, the same on every rank; or what is wrong is raised on all of them."""
        with self.record.doing(AGREEING, "examine"):
            found = {name: self._examine(part) for name, part in self._parts.items()}
            joined = Examined.join(found, (self._clip, self._on_nonfinite), fault)
        self._names = joined.names
        self._part_of = [part for name, part in self._parts.items() for _ in found[name].names]
        try:
            with self.record.doing(AGREEING):
                has_inf = bool(found_inf is not None and found_inf > 0)
                findings = compare_gradients(self._label, joined, self._axes, found_inf=has_inf)
                over = [
                    [axis for axis in part.replicated_over(p) if axis.size > 1] if part.compares_weights else []
                    for p, part in zip(joined.parameters, self._part_of, strict=True)
                ]
                compare_weights(self._label, joined.names, joined.parameters, over, self._axes)
        except BaseException:
            self.drop()
            raise
        for part in self._parts.values():  # once, until it has loaded a state or got parameters
            part.compares_weights = False
        self._skips = findings.found_inf or findings.nonfinite is not None
        self._reason = None if findings.found_inf else findings.nonfinite or self._reason
        return [p for p, has in zip(joined.parameters, findings.present, strict=True) if has]

    def _examine(self, part: StepPart) -> Examined:
        """What a part has; where it cannot say that, why not."""
        found = read(self._label, self._rank, part.examine)
        if not isinstance(found, Exception):
            return found
        parameters = parameters_of(part)
        blank: list[Tensor | None] = [None] * len(parameters)
        return Examined(parameters, [""] * len(blank), [False] * len(blank), blank, None, found)

    def start(self, found_inf: Tensor | None) -> list[Tensor]:
        """Compare gradients, then start them; the parameters that have some."""
        present = self.compare(found_inf)
        if not self._skips:
            self.begin(present)
            self.send(self._units)
        return present

    def work_on_sent(
        self, sent: Sequence[Tensor], grad_scale: Tensor | None, found_inf: Tensor | None, fault: Exception | None
    ) -> tuple[list[Tensor], float | None]:
        """For gradients that left before the step, those of ``sent``: work first, compare then; nothing waits for that.

        What ranks compare would stand behind the gradients on the way. All have sent the same, with zeros for what was
        missing. If other parameters have gradients, on all ranks, the work was in vain and is done again.
        """
        norm = self.work(grad_scale)
        present = self.compare(found_inf, fault)
        if not self._skips and {id(p) for p in sent} != {id(p) for p in present}:
            self.drop()
            self._reason = None
            self.begin(present)
            self.send(self._units)
            norm = self.work(grad_scale)
        return present, norm

    @outside_autocast()
    def work(self, grad_scale: Tensor | None) -> float | None:
        """Work on all units; the norm of all gradients, if they are clipped.

        ``grad_scale``: what gradients were multiplied by.
        """
        if self._skips:
            return None
        for unit in self._units:
            self.record.of(unit.name).events += unit.part.sent_before(unit.bucket)
        scale, norm = 1.0 if grad_scale is None else 1.0 / float(grad_scale), None
        if self._clip is not None:
            norm = scale * self._find_norm()
            if not math.isfinite(norm):  # the same on every rank; a part may know more about why
                self._reason = f"the norm of the gradients is {norm}"
                return norm
            scale *= min(1.0, self._clip / (norm + 1e-6))
        self._work_in_order(scale)
        return norm

    def _work_in_order(self, scale: float) -> None:
        """Messages of several hops are moved on: the next unit's gradients, the last one's results.

        What the work on one raises is noted, and the others are worked on all the same: ranks wait for their results.
        """
        for place, unit in enumerate(self._units):
            if unit.part.travels(unit.bucket):  # else there is work to do while others' first messages travel
                for ahead in self._units[place : place + 2]:
                    self._advance(ahead)
            with self.record.doing(unit.name, f"work: {unit.name}.{unit.bucket}"):
                unit.part.attempt(None, partial(unit.part.work_on, unit.bucket, scale), lambda: None)
            for behind in self._units[max(0, place - 1) : place]:
                self._advance(behind)

    def _advance(self, unit: Unit) -> None:
        with self.record.doing(unit.name):
            unit.part.advance(unit.bucket)

    @outside_autocast()
    def finish(self) -> None:
        """Gather whether all ranks' work succeeded, and take what comes back; or raise, or log, why it is dropped."""
        if not self._skips:
            failed, fault = self._find_failure()
            try:
                with self.record.doing(AGREEING):
                    failed = gather_verdict(
                        self._axes, f"{self._label}.finish", _Options(len(self._names)), [failed],
                        lambda axis, rows: list(next((row for row in rows if row[0]), rows[0])), fault,
                    )[0]  # fmt: skip
            except RuntimeError as error:
                if not is_lost(error):
                    self.drop()
                raise
            if failed:
                self._reason = self._part_of[failed - 1].explain_failure(self._names[failed - 1])
        self._commit(self._reason is None and not self._skips)
        if self._reason is not None:
            words = f"{self._label}: {self._reason}; weights and state are as before"
            if self._on_nonfinite == "raise":
                raise RuntimeError(words)
            logger.warning("%s: the step is skipped (rank %d)", words, self._rank)

    def _find_failure(self) -> tuple[int, RuntimeError | None]:
        """1 + the number of a parameter whose update this rank could not compute, else 0; what a part's work raised."""
        first, fault, before = 0, None, 0
        for name, part in self._parts.items():
            number = before + part.failed if part.failed else 0
            first = first or number
            if part.error is not None and fault is None:
                what = f"on {self._names[number - 1]}" if number else f"of {name}"
                fault = RuntimeError(
                    f"{self._label}: the work {what} raised {type(part.error).__name__}: {part.error} (rank "
                    f"{self._rank}); weights and state are as before"
                )
                fault.__cause__ = part.error
            before += len(parameters_of(part))
        return first, fault

    def _commit(self, accepted: bool) -> None:
        """Tables first: nothing comes back for them, so their rows are put back while others' results travel."""
        begun, self._begun = self._begun, False
        for name, part in sorted(self._parts.items(), key=lambda item: item[1].sends_in_step) if begun else ():
            with self.record.doing(name, f"commit: {name}"):
                part.commit(accepted)

    @outside_autocast()
    def drop(self) -> None:
        """Wait for what is under way and forget it."""
        self._commit(False)

    def _find_norm(self) -> float:
        """The norm of the gradients of all units, which arrive here: every element once, the same bits on all ranks.

        Squares of units that lie on the same axes are one sum. It is summed along those, in rank order. On the others
        its ranks have the same, so once it is whole the first rank's is taken. The first scalars travel while the parts
        do what does not depend on them.
        """
        kinds: list[frozenset[int]] = []  # the axes of each sum
        squares: list[Tensor] = []
        nothing = torch.tensor(math.nan, dtype=torch.float64)  # where it cannot be computed: no rank works on anything
        for unit in self._units:
            part, bucket = unit.part, unit.bucket
            self._advance(unit)
            with self.record.doing(unit.name, f"norm: {unit.name}.{bucket}"):
                kind = frozenset(id(axis.counter) for axis in part.norm_axes(bucket) if axis.size > 1)
                if kind not in kinds:
                    kinds.append(kind)
                    squares.append(torch.zeros((), dtype=torch.float64))
                square = part.attempt(None, partial(part.squared_norm, bucket), lambda: nothing)
                squares[kinds.index(kind)] += square.cpu()
        mine = torch.stack(squares) if squares else torch.zeros(1, dtype=torch.float64)
        done: set[int] = set()
        later: list[Axis] = []
        for place, axis in enumerate(self._axes):
            coming = self._share(axis, mine)
            for unit in self._units if place == 0 else ():
                with self.record.doing(unit.name, f"work ahead: {unit.name}.{unit.bucket}"):
                    unit.part.attempt(None, partial(unit.part.work_ahead, unit.bucket), lambda: None)
            with self.record.doing(AGREEING):
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
            with self.record.doing(AGREEING):
                total = coming.wait()[0]
        return float(total)

    def _share(self, axis: Axis, mine: Tensor) -> Pending[list[Tensor]]:
        """Everybody's ``mine``, gathered on the host side: it decides there what is done."""
        with self.record.doing(AGREEING):
            numbers = mine.view(torch.int64).tolist()
            call = axis.begin(f"{self._label}.norm", _Options(len(mine)), metadata=numbers)
        return Pending(lambda: [torch.tensor(row).view(torch.float64) for row in call.metadata.wait()])
