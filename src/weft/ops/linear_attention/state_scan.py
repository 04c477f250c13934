"""The scan of the states of one call: every document that spans runs, all of them advancing together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.comm import Call, Pending
from weft.comm.schedule import ScheduleExecutor
from weft.ops.linear_attention.backend import Kernel
from weft.ops.linear_attention.segments import Segment, SequencePlan
from weft.ops.scan import Affine, Form, schedule


@dataclass(frozen=True)
class SegmentMap:
    """A segment of a run, with what the kernel says its tokens do to a state."""

    run: int
    segment: Segment
    own: Affine
    rows: slice  # of the run's states [B*N, ...]
    document_rows: slice  # of all documents' states


def segment_maps(plan: SequencePlan, kernels: Sequence[Kernel], batch: int) -> list[SegmentMap]:
    """The maps of all segments of this rank, run by run."""
    maps = []
    for index, (run, kernel) in enumerate(zip(plan.runs, kernels, strict=True)):
        log, state = kernel.maps
        for number, segment in enumerate(run.segments):
            rows = slice(number * batch, (number + 1) * batch)
            own = Affine.of(state[rows], None if log is None else log[rows])
            document_rows = slice(segment.document * batch, (segment.document + 1) * batch)
            maps.append(SegmentMap(index, segment, own, rows, document_rows))
    return maps


class StateScan:
    """Exclusive prefixes (``reverse``: suffixes) of the segments' maps along their documents' paths.

    Made before the local work whose result is sent, so that receives are posted early; `start` takes the result.
    """

    def __init__(self, call: Call, plan: SequencePlan, form: Form, method: str, reverse: bool = False) -> None:
        self._call = call
        self._device = form.device
        paths = [
            (index, segment.path.reversed() if reverse else segment.path)
            for index, segment in enumerate(segment for run in plan.runs for segment in run.segments)
            if segment.path.size > 1
        ]
        self._travelling = [index for index, _ in paths]
        self._together = ScheduleExecutor(call, [(path, schedule(method, path, form)) for _, path in paths])

    def start(
        self, maps: Sequence[SegmentMap], boundary: Callable[[SegmentMap], Tensor | None]
    ) -> Pending[list[Tensor | None]]:
        """Scan beside the caller's work. ``wait()``: the state that enters each segment, None for zero.

        ``boundary`` is what enters a segment at the beginning (or end) of its document.
        """
        known = [boundary(one) for one in maps]
        sent = [_absorb(maps[index].own, known[index]) for index in self._travelling]
        pending = None
        if sent:
            pending = self._call.start(lambda lane: self._together.run(lane, sent), self._device)

        def finish() -> list[Tensor | None]:
            entering = list(known)
            for index, state in zip(self._travelling, pending.wait() if pending else [], strict=True):
                entering[index] = known[index] if state is None else state
            return entering

        return Pending(finish)


def _absorb(own: Affine, entering: Tensor | None) -> Affine:
    """The map whose B already has what enters at the boundary."""
    return own if entering is None else Affine(own.kind, own.apply(entering), own.decay)


def states_by_run(
    plan: SequencePlan, states: Sequence[Tensor | None], kernels: Sequence[Kernel]
) -> list[Tensor | None]:
    """The segments' states put together for each run; None where all of them are zero."""
    joined: list[Tensor | None] = []
    rest = list(states)
    for run, kernel in zip(plan.runs, kernels, strict=True):
        mine, rest = rest[: len(run.segments)], rest[len(run.segments) :]
        if all(state is None for state in mine):
            joined.append(None)
            continue
        zero = kernel.maps[1].new_zeros(kernel.maps[1].shape[0] // len(mine), *kernel.maps[1].shape[1:])
        joined.append(mine[0] if len(mine) == 1 else torch.cat([zero if s is None else s for s in mine]))
    return joined
