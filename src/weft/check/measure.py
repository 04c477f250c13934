"""One case on one rank: done on the device, compared with the CPU, its host syncs counted or its time taken."""

from __future__ import annotations

import importlib
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from weft.check.case import TOLERANCES, WARM_UPS, Case, Work
from weft.comm import Axis
from weft.comm.device import milliseconds
from weft.world import VirtualWorld


@dataclass(frozen=True)
class Outcome:
    """Of a case on a rank. What was not counted or timed, because it cannot be here, is None.

    error: the largest relative difference. syncs: how often the host waited for the device, and ``places`` where.
    decompositions: how often it waited besides, within torch, for whether an eigh has come to an end. streams: how many
    of them worked. alone: milliseconds of one rank without the others.
    """

    error: float | None = None
    fault: str | None = None
    syncs: int | None = None
    decompositions: int | None = None
    places: dict[str, int] = field(default_factory=dict)
    streams: int | None = None
    milliseconds: float | None = None
    alone: float | None = None

    def verdict(self, case: Case, size: int) -> str:
        """In a word or two."""
        if self.fault is not None:
            return "failed"
        if self.error is None or not self.error <= TOLERANCES[case.dtype]:
            return "wrong"
        if self.syncs is not None and self.syncs > case.syncs:
            return "host waits"
        if self.streams is not None and size > 1 and self.streams < 2:
            return "not overlapped"
        return "right"


def results_on_cpu(case: Case, size: int) -> list[list[Tensor]]:
    """What the case gives on each of ``size`` virtual ranks on the CPU."""

    def program(axis: Axis) -> list[Tensor]:
        work = case.prepare(axis, torch.device("cpu"))
        return [work() for _ in range(WARM_UPS + 1)][-1]

    return VirtualWorld(size).run(program).results


def measure(case: Case, axis: Axis, device: torch.device, wanted: Sequence[Tensor]) -> Outcome:
    """On this rank; all ranks must ask. What is raised becomes a part of the outcome."""
    try:
        work = case.prepare(axis, device)
        for _ in range(WARM_UPS):
            work()
        if device.type == "sim":
            return _count(work, wanted)
        found = relative_error(work(), wanted)
        time, alone = milliseconds(device, work), None
        if case.local and axis.size > 1:
            work = case.prepare(axis.subset([axis.rank]), device)
            work()
            alone = milliseconds(device, work)
        return Outcome(found, milliseconds=time, alone=alone)
    except Exception as error:  # the other operations are still to be looked at
        return failed(error)


def failed(error: Exception) -> Outcome:
    """With the words and the place of ``error``."""
    frames = [(Path(one.filename), one.lineno) for one in traceback.extract_tb(error.__traceback__)]
    ours = [(path, line) for path, line in frames if "weft" in path.parts and path.parent.name != "simulated"]
    where = f" at {ours[-1][0].name}:{ours[-1][1]}" if ours else ""
    words = f"{error}".splitlines() or [""]
    return Outcome(fault=f"{type(error).__name__}: {words[0]}{where}")


def _count(work: Work, wanted: Sequence[Tensor]) -> Outcome:
    """On the simulated device: host syncs, their places and the streams that worked."""
    rank = importlib.import_module("weft.world.simulated").current_rank()
    before, issued = Counter(rank.places_of_syncs()), dict(rank.issued)
    found = work()
    places = Counter(rank.places_of_syncs()) - before
    streams = sum(number > issued.get(stream, 0) for stream, number in rank.issued.items())
    within = sum(count for place, count in places.items() if place.startswith("eigh"))
    return Outcome(
        relative_error(found, wanted), syncs=places.total() - within, decompositions=within, places=dict(places),
        streams=streams,
    )  # fmt: skip


def relative_error(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest difference of each tensor over its largest value; the worst of them. inf where one is not finite.

    >>> relative_error([torch.tensor([1.0, 3.0])], [torch.tensor([1.0, 4.0])])
    0.25
    """
    worst = 0.0
    for one, other in zip(found, wanted, strict=True):
        apart = (one.cpu().double() - other.double()).abs().max()
        error = float(apart / other.double().abs().max().clamp_min(1e-30))
        worst = max(worst, error if error == error else float("inf"))
    return worst
