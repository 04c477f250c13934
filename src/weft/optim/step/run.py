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

from weft.comm import Axis
from weft.comm.arguments import read
from weft.comm.device import outside_autocast, runs_behind
from weft.optim.step.compare import (
    Examined,
    Findings,
    Seen,
    compare_gradients,
    compare_weights,
    find_sparse,
    gather_verdict,
    is_lost,
    parameters_of,
)
from weft.optim.step.record import AGREEING, StepRecord
from weft.optim.step.verdict import GlobalNorm, Verdict, device_of, digest_weights, look

if TYPE_CHECKING:
    from weft.optim.step.part import StepPart

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Options:
    """What the ranks must have in common: how many parameters a verdict is about."""

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
    | integers      | which are finite; digests of replicated weights, at first      | there; on a device: `finish`  |
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
        self._examined = Examined([], [], [], [])  # of all parts
        self._part_of: list[StepPart] = []  # for each of its parameters
        self._device = device_of([p for part in parts.values() for p in parameters_of(part)])
        self._found_inf: Tensor | None = None
        self._verdict = Verdict()
        self.norm: float | None = None  # of all gradients, if they are clipped; on a device known in `finish`
        self.record = StepRecord(self._axes[0].wire.clock if self._axes else time.perf_counter, self._rank)

    @outside_autocast()
    def begin(self, present: Sequence[Tensor]) -> None:
        """Let all parts begin a step in which these parameters have gradients."""
        self._begun, self._verdict = True, Verdict()
        for part in self._parts.values():
            part.verdict = self._verdict
            part.begin(set(present) & set(parameters_of(part)))

    @outside_autocast()
    def send(self, units: Sequence[Unit]) -> None:
        """Start the gradients of some units, in this order."""
        for unit in units:
            with self.record.doing(unit.name):
                unit.part.send(unit.bucket)

    @outside_autocast()
    def compare(self, found_inf: Tensor | None = None, fault: Exception | None = None) -> list[Tensor]:
        """The parameters that have gradients, the same on every rank; or what is wrong is raised on all of them.

        On a device nobody looks at the gradients themselves yet: see `_look_behind`.
        """
        with self.record.doing(AGREEING, "examine"):
            found = {name: self._examine(part) for name, part in self._parts.items()}
            self._examined = joined = Examined.join(found, (self._clip, self._on_nonfinite), fault)
            joined.fault = joined.fault or find_sparse(self._label, joined, self._rank)
            self._part_of = [part for name, part in self._parts.items() for _ in found[name].names]
            self._found_inf = found_inf
            seen = None if runs_behind(self._device) else look(joined, self._axes, found_inf, self._verdict)
        findings = self._judge(seen)
        return [p for p, has in zip(joined.parameters, findings.present, strict=True) if has]

    def _judge(self, seen: Seen | None, digests: Sequence[int] | None = None) -> Findings:
        """Compare over the ranks what was found on this one, which lets the step go on or not, or raises."""
        try:
            with self.record.doing(AGREEING):
                findings = compare_gradients(self._label, self._examined, self._axes, seen)
                if seen is not None:
                    asked, over = self._find_compared()
                    if digests is None:
                        digests = digest_weights(self._examined.parameters, asked, self._verdict)
                    names = [self._examined.names[at] for at in asked]
                    compare_weights(self._label, names, digests, over, self._axes)
                    for part in self._parts.values():  # once, until it has loaded a state or got parameters
                        part.compares_weights = False
        except BaseException:
            self.drop()
            raise
        self._skips = findings.found_inf or findings.nonfinite is not None
        self._reason = None if findings.found_inf else findings.nonfinite or self._reason
        return findings

    def _find_compared(self) -> tuple[list[int], list[list[Axis]]]:
        """The parameters whose weights are compared in this step, and the axes over which each must be the same."""
        over = [
            [axis for axis in part.replicated_over(p) if axis.size > 1] if part.compares_weights else []
            for p, part in zip(self._examined.parameters, self._part_of, strict=True)
        ]
        return [at for at, some in enumerate(over) if some], [some for some in over if some]

    def _look_behind(self) -> None:
        """All work is issued: let the host read what the device knows, in one go, and compare it over the ranks."""
        with self.record.doing(AGREEING, "verdict"):
            seen = look(self._examined, self._axes, self._found_inf, self._verdict)
            digests = digest_weights(self._examined.parameters, self._find_compared()[0], self._verdict)
            self._verdict.read()
        self._judge(seen, digests)

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
    ) -> list[Tensor]:
        """For gradients that left before the step, those of ``sent``: work first, compare then; nothing waits for that.

        What ranks compare would stand behind the gradients on the way. All have sent the same, with zeros for what was
        missing. If other parameters have gradients, on all ranks, the work was in vain and is done again.
        """
        self.work(grad_scale)
        present = self.compare(found_inf, fault)
        if not self._skips and {id(p) for p in sent} != {id(p) for p in present}:
            self.drop()
            self._reason = None
            self.begin(present)
            self.send(self._units)
            self.work(grad_scale)
        return present

    @outside_autocast()
    def work(self, grad_scale: Tensor | None) -> None:
        """Work on all units, clipped if that is asked for. ``grad_scale``: what gradients were multiplied by."""
        if self._skips:
            return
        for unit in self._units:
            self.record.of(unit.name).events += unit.part.sent_before(unit.bucket)
        scale: float | Tensor = 1.0
        if grad_scale is not None:
            scale = 1.0 / (grad_scale.double() if runs_behind(grad_scale.device) else float(grad_scale))
        if self._clip is not None:
            norm = scale * GlobalNorm(self._label, self._units, self._axes, self._device, self.record).find()
            share = torch.clamp(self._clip / (norm + 1e-6), max=1.0)
            if runs_behind(self._device):
                self._verdict.note(norm, self._take_norm)
                scale = scale * torch.where(norm.isfinite(), share, 0.0)  # else the step is dropped
            else:
                self._take_norm(norm)
                if self._reason is not None:
                    return
                scale *= float(share)
        self._work_in_order(scale)

    def _take_norm(self, norm: Tensor) -> None:
        self.norm = float(norm)
        if not math.isfinite(self.norm):  # the same on every rank; a part may know more about why
            self._reason = f"the norm of the gradients is {self.norm}"

    def _work_in_order(self, scale: float | Tensor) -> None:
        """Messages of several hops are moved on: the next unit's gradients, the last one's results.

        What the work on one raises is noted, and the others are worked on all the same: ranks wait for their results.
        """
        for place, unit in enumerate(self._units):
            if unit.part.crosses_ranks(unit.bucket):  # else there is work to do while others' first messages travel
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
        if not self._skips and runs_behind(self._device):
            self._look_behind()
        if not self._skips:
            failed, fault = self._find_failure()
            try:
                with self.record.doing(AGREEING):
                    failed = gather_verdict(
                        self._axes, f"{self._label}.finish", _Options(len(self._examined.names)), [failed],
                        lambda axis, rows: list(next((row for row in rows if row[0]), rows[0])), fault,
                    )[0]  # fmt: skip
            except RuntimeError as error:
                if not is_lost(error):
                    self.drop()
                raise
            if failed:
                self._reason = self._part_of[failed - 1].explain_failure(self._examined.names[failed - 1])
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
                what = f"on {self._examined.names[number - 1]}" if number else f"of {name}"
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
