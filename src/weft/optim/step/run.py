"""One step over some parts: compared, sent, worked on, judged and committed; nothing changes before all ranks agree."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from weft.comm import Axis
from weft.comm.arguments import read
from weft.comm.modes import outside_autocast
from weft.optim.step.gradients import compare_gradients
from weft.optim.step.norm import norm_of
from weft.optim.step.record import StepRecord
from weft.optim.step.same_weights import compare_weights
from weft.optim.step.verdict import gather_verdict, is_lost

if TYPE_CHECKING:
    from weft.optim.step.part import Examined, StepPart


@dataclass(frozen=True)
class Unit:
    """One bucket of one part: what is sent and worked on at once."""

    part: StepPart
    bucket: int
    name: str


@dataclass(frozen=True)
class _Verdict:
    """What the ranks must have in common when they say whether the work succeeded."""

    parameters: int


def union_of_axes(parts: Sequence[StepPart]) -> list[Axis]:
    """The axes of more than one rank that any part's ranks stand on, each once."""
    found: list[Axis] = []
    for axis in (axis for part in parts for axis in part.step_axes()):
        if axis.size > 1 and not any(axis.counter is one.counter for one in found):
            found.append(axis)
    return found


def send_in_order(units: Sequence[Unit], record: StepRecord) -> None:
    """Start the gradients of units."""
    for unit in units:
        with record.sending(unit):
            unit.part.send(unit.bucket)


def work_in_order(units: Sequence[Unit], scale: float, record: StepRecord) -> None:
    """Work on units. Messages of several hops are moved on: the next unit's gradients, the last one's results."""
    for place, unit in enumerate(units):
        if unit.part.travels(unit.bucket):  # else there is work to do while others' first messages travel
            for ahead in units[place : place + 2]:
                with record.sending(ahead):
                    ahead.part.advance(ahead.bucket)
        with record.working(unit):
            _work_on(unit, scale)
        for behind in units[max(0, place - 1) : place]:
            with record.returning(behind):
                behind.part.advance(behind.bucket)


def _work_on(unit: Unit, scale: float) -> None:
    """Work on one unit; what it raises is noted, and the others are worked on all the same: ranks wait for them."""
    unit.part.attempt(None, lambda: unit.part.work_on(unit.bucket, scale), lambda: None)


class StepRun:
    """The step under way of some named ``parts``. ``label`` stands in errors and in the names of its own messages.

    | crosses ranks | what                                                           | when                          |
    |---------------|----------------------------------------------------------------|-------------------------------|
    | integers      | who has which gradients, settings, faults                      | `start`; `work_on_sent`       |
    | integers      | digests of replicated weights, in the first step               | `start`; `work_on_sent`       |
    | gradients     | as the parts send them, in the order of ``scatter``            | `start`, or before it         |
    | scalars       | squared norms, with ``clip``                                   | `work`, under ``work_ahead``  |
    | results       | as the parts return them, in the order of ``work``             | `work`                        |
    | integers      | whether all work succeeded                                     | `finish`, beside the results  |

    All of it happens outside autocast.
    """

    def __init__(
        self,
        label: str,
        parts: Mapping[str, StepPart],
        record: StepRecord | None = None,
        dry_run: bool = False,
        settings: object = None,
    ) -> None:
        """A ``dry_run`` changes nothing, whatever comes out. ``settings``: of the step, the same on every rank."""
        self._settings = settings
        self._label, self._parts, self._dry_run = label, dict(parts), dry_run
        self._axes = union_of_axes(list(parts.values()))
        self._reason: str | None = None  # why nothing will be changed
        self._names: list[str] = []
        self._stays = False
        self._begun = False  # whether parts have something to commit
        self.record = record or StepRecord()

    @outside_autocast()
    def begin(self, present: Sequence[Tensor]) -> None:
        """Let all parts begin a step in which these parameters have gradients."""
        self._begun = True
        for part in self._parts.values():
            part.begin(set(present) & {p for group in part.param_groups for p in group["params"]})

    @outside_autocast()
    def send(self, units: Sequence[Unit]) -> None:
        """Start the gradients of some units, in this order."""
        send_in_order(units, self.record)

    @outside_autocast()
    def compare(self, found_inf: Tensor | None = None, fault: Exception | None = None) -> list[Tensor]:
        """The parameters that have gradients, the same on every rank; or what is wrong is raised on all of them."""
        with self.record.examining():
            joined = self._join([self._examine(part) for part in self._parts.values()], fault)
        self._names = joined.names
        try:
            with self.record.telling():
                findings = compare_gradients(
                    self._label, joined, self._axes, found_inf=bool(found_inf is not None and found_inf > 0)
                )
                compare_weights(self._label, list(self._parts.values()), joined.names, self._axes)
        except BaseException:
            self.drop()
            raise
        self._stays = findings.found_inf or findings.nonfinite is not None
        self._reason = None if findings.found_inf else findings.nonfinite or self._reason
        return [p for p, has in zip(joined.parameters, findings.present, strict=True) if has]

    def _examine(self, part: StepPart) -> Examined:
        """What a part says; where it cannot say anything, that it cannot."""
        from weft.optim.step.part import Examined

        found = read(self._label, self._axes[-1].rank if self._axes else 0, part.examine)
        if not isinstance(found, Exception):
            return found
        parameters = [parameter for group in part.param_groups for parameter in group["params"]]
        blank: list[Tensor | None] = [None] * len(parameters)
        return Examined(parameters, [""] * len(blank), [False] * len(blank), blank, None, found)

    def start(self, scatter: Sequence[Unit], found_inf: Tensor | None = None) -> list[Tensor]:
        """Compare gradients, then start them in the order of ``scatter``; the parameters that have some."""
        present = self.compare(found_inf)
        if not self._stays:
            self.begin(present)
            self.send(scatter)
        return present

    def work_on_sent(
        self, sent: Sequence[Tensor], scatter: Sequence[Unit], units: Sequence[Unit], clip: float | None,
        grad_scale: Tensor | None, found_inf: Tensor | None, fault: Exception | None,
    ) -> tuple[list[Tensor], float | None]:  # fmt: skip
        """For gradients that left before the step, those of ``sent``: work first, compare then; nothing waits for that.

        What ranks tell each other would stand behind the gradients on the way. All have sent the same, with zeros for
        what was missing. If other parameters have gradients, on all ranks, the work was in vain and is done again.
        """
        norm = self.work(units, clip, grad_scale)
        present = self.compare(found_inf, fault)
        if not self._stays and {id(p) for p in sent} != {id(p) for p in present}:
            self.drop()
            self._reason = None
            self.begin(present)
            self.send(scatter)
            norm = self.work(units, clip, grad_scale)
        return present, norm

    def _join(self, examined: Sequence[Examined], fault: Exception | None) -> Examined:
        """What all parts say, as one; with several parts a parameter's name tells which it is in."""
        from weft.optim.step.part import Examined

        joined = Examined([], [], [], [], (self._settings, *(one.settings for one in examined)), fault)
        for part, one in zip(self._parts, examined, strict=True):
            joined.parameters += one.parameters
            joined.names += one.names if len(examined) == 1 else [f"{name} ({part})" for name in one.names]
            joined.present += one.present
            joined.grads += one.grads
            joined.alike += one.alike or [None] * len(one.grads)
            joined.fault = joined.fault or one.fault
        return joined

    @outside_autocast()
    def work(self, units: Sequence[Unit], clip: float | None = None, grad_scale: Tensor | None = None) -> float | None:
        """Work on the units, in this order; the norm of all gradients, if they are clipped.

        ``grad_scale``: what gradients were multiplied by.
        """
        if self._stays:
            return None
        for unit in units:
            self.record.of(unit).sends.events += unit.part.sent_before(unit.bucket)
        scale, norm = 1.0 if grad_scale is None else 1.0 / float(grad_scale), None
        if clip is not None:
            norm = scale * norm_of(self._label, units, self._axes, self.record)
            if not math.isfinite(norm):  # the same on every rank; a part may know more about why
                self._reason = f"the norm of the gradients is {norm}"
                return norm
            scale *= min(1.0, clip / (norm + 1e-6))
        work_in_order(units, scale, self.record)
        return norm

    def _failure(self) -> int:
        """1 + the number, among all parts' parameters, of one whose update this rank could not compute; else 0."""
        before = 0
        for part in self._parts.values():
            if part.failed:
                return before + part.failed
            before += sum(len(group["params"]) for group in part.param_groups)
        return 0

    def _unexpected(self) -> RuntimeError | None:
        """In words for all ranks: what the work of a part raised here."""
        before, rank = 0, self._axes[-1].rank if self._axes else 0
        for name, part in self._parts.items():
            if (error := part.error) is not None:
                what = f"on {self._names[before + part.failed - 1]}" if part.failed else f"of {name}"
                fault = RuntimeError(
                    f"{self._label}: the work {what} raised {type(error).__name__}: {error} (rank {rank}); weights and "
                    f"state are as before"
                )
                fault.__cause__ = error
                return fault
            before += sum(len(group["params"]) for group in part.param_groups)
        return None

    @outside_autocast()
    def finish(self) -> str | None:
        """Hear whether all ranks' work succeeded, take what comes back; why nothing was changed, if that is so."""
        if not self._stays:
            try:
                with self.record.telling():
                    failed = gather_verdict(
                        self._axes, f"{self._label}.finish", _Verdict(len(self._names)), [self._failure()],
                        lambda axis, told: list(next((row for row in told if row[0]), told[0])), self._unexpected(),
                    )[0]  # fmt: skip
            except RuntimeError as error:
                if not is_lost(error):
                    self.drop()
                raise
            self._reason = self._explain(failed - 1) if failed else self._reason
        self._commit(self._reason is None and not self._stays and not self._dry_run)
        return self._reason

    def _explain(self, number: int) -> str:
        name = self._names[number]
        for part in self._parts.values():
            count = sum(len(group["params"]) for group in part.param_groups)
            if number < count:
                return part.explain_failure(name)
            number -= count
        raise AssertionError(f"no part has parameter {number}")

    def _commit(self, accepted: bool) -> None:
        """Tables first: nothing comes back for them, so their rows are put back while others' results travel."""
        begun, self._begun = self._begun, False
        for name, part in sorted(self._parts.items(), key=lambda item: item[1].sends_in_step) if begun else ():
            with self.record.committing(name):
                part.commit(accepted)

    @outside_autocast()
    def drop(self) -> None:
        """Wait for what is under way and forget it."""
        self._commit(False)
