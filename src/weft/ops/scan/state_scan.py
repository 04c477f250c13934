"""The states of one call on their way: which ranks each document passes, the scan along them, and its final states.

All documents that span runs advance together.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from weft.comm import Axis, Call, Path, Pending
from weft.comm.rounds import ScheduleExecutor
from weft.ops.scan.affine import Affine, Form
from weft.ops.scan.methods import schedule
from weft.ops.sequence.layout import Sequence, ranks_of_runs, run_lengths

RunMaps = Items[tuple[Tensor | None, Tensor]]  # the ``maps`` of the kernel of each run


@dataclass(frozen=True)
class Segment:
    """The tokens of one document in one run of this rank.

    ``path`` are the ranks whose runs hold the document, seen from this run. A document that lies within the run has a
    path of one place and sends nothing.
    """

    document: int
    length: int
    path: Path

    @property
    def is_first(self) -> bool:
        """Whether the document begins here."""
        return self.path.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether the document ends here."""
        return self.path.rank == self.path.size - 1


@dataclass(frozen=True)
class LocalRun:
    """A run of this rank: its tokens in local memory and the segments they make."""

    tokens: slice
    segments: tuple[Segment, ...]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each segment."""
        return [segment.length for segment in self.segments]


@dataclass(frozen=True)
class SequencePlan:
    """All of it from one rank: its runs, and for every document the rank where it ends."""

    runs: tuple[LocalRun, ...]
    ends: tuple[int, ...]

    def ending_on(self, rank: int) -> list[int]:
        """The documents whose final state ``rank`` has."""
        return [document for document, end in enumerate(self.ends) if end == rank]

    def apart(self) -> SequencePlan:
        """The same with every segment that goes on from an earlier run in a run of its own.

        Only a run's first segment can have come from elsewhere.
        """
        runs: list[LocalRun] = []
        for run in self.runs:
            if len(run.segments) < 2 or run.segments[0].is_first:
                runs.append(run)
                continue
            first, *others = run.segments
            cut = run.tokens.start + first.length
            runs.append(LocalRun(slice(run.tokens.start, cut), (first,)))
            runs.append(LocalRun(slice(cut, run.tokens.stop), tuple(others)))
        return SequencePlan(tuple(runs), self.ends)


def plan_own(axis: Axis, layout: str, length: int) -> SequencePlan:
    """One document through all runs, in a layout of `ANY_LENGTHS`: the other ranks' lengths need not be known."""
    return _plan_dense(axis, ranks_of_runs(layout, axis.size), run_lengths(length, layout, axis.rank, axis.size))


def _plan_dense(axis: Axis, ranks: Items[int], lengths: Items[int]) -> SequencePlan:
    """One document through runs on ``ranks``; ``lengths`` are those of this rank's."""
    mine = [place for place, rank in enumerate(ranks) if rank == axis.rank]
    runs, start, whole = [], 0, tuple(ranks)
    for place, count in zip(mine, lengths, strict=True):
        runs.append(LocalRun(slice(start, start + count), (Segment(0, count, Path(whole, place)),)))
        start += count
    return SequencePlan(tuple(runs), (whole[-1],))


def plan_sequence(sequence: Sequence) -> SequencePlan:
    """The documents of a sequence whose lengths are known.

    The path of a document passes only the runs that hold tokens of it; an empty one's the run where it would begin.
    """
    runs, axis = sequence.runs, sequence.axis
    if sequence.bounds is None:
        return _plan_dense(axis, [run.rank for run in runs], [run.length for run in runs if run.rank == axis.rank])
    segments: list[list[Segment]] = [[] for _ in runs]
    ends, offsets = [], [run.offset for run in runs]
    for document, (begin, end) in enumerate(pairwise(sequence.bounds)):
        first = bisect_right(offsets, begin) - 1  # of runs that begin there all but the last are empty
        places = [place for place in range(first, bisect_left(offsets, end)) if runs[place].length]
        if begin == end:
            places = [first if begin < offsets[first] + runs[first].length else len(runs) - 1]
        ranks = tuple(runs[place].rank for place in places)
        ends.append(ranks[-1])
        for position, place in enumerate(places):
            length = min(end, offsets[place] + runs[place].length) - max(begin, offsets[place])
            segments[place].append(Segment(document, length, Path(ranks, position, name=document)))
    local = [
        LocalRun(slice(run.start, run.start + run.length), tuple(segments[place]))
        for place, run in enumerate(runs)
        if run.rank == axis.rank
    ]
    return SequencePlan(tuple(local), tuple(ends))


def most_places(sequence: Sequence) -> int:
    """The places of the longest path of a document, whichever ranks it passes."""
    if sequence.bounds is None:
        return len(sequence.runs)
    starts = [run.offset for run in sequence.runs if run.length]
    spans = [bisect_left(starts, end) - bisect_right(starts, begin) for begin, end in pairwise(sequence.bounds)]
    return 1 + max(spans)


@dataclass(frozen=True)
class SegmentMap:
    """A segment of a run, with what the kernel says its tokens do to a state."""

    run: int
    segment: Segment
    own: Affine
    rows: slice  # of the run's states [B*N, ...]
    document_rows: slice  # of all documents' states


def segment_maps(plan: SequencePlan, found: RunMaps, batch: int, dense: bool = False) -> list[SegmentMap]:
    """The maps of all segments of this rank, run by run. ``dense``: their decays are matrices, not logs."""
    maps = []
    for index, (run, (decay, state)) in enumerate(zip(plan.runs, found, strict=True)):
        for number, segment in enumerate(run.segments):
            rows = _rows(number, batch)
            mine = None if decay is None else decay[rows]
            own = Affine.of(state[rows], transition=mine) if dense else Affine.of(state[rows], mine)
            maps.append(SegmentMap(index, segment, own, rows, _rows(segment.document, batch)))
    return maps


class StateScan:
    """Exclusive prefixes (``reverse``: suffixes) of the segments' maps along their documents' paths.

    Made before the local work whose result is sent, so that receives are posted early; `start` takes the result, once.
    """

    def __init__(self, call: Call, plan: SequencePlan, form: Form, method: str, reverse: bool = False) -> None:
        self._call, self._device, self._reverse = call, form.device, reverse
        paths = [
            (index, segment.path.reversed() if reverse else segment.path)
            for index, segment in enumerate(segment for run in plan.runs for segment in run.segments)
            if segment.path.size > 1
        ]
        self._moving = [index for index, _ in paths]
        self._executor = ScheduleExecutor(call, [(path, schedule(method, path, form)) for _, path in paths])

    def start(self, maps: Items[SegmentMap], boundary: Tensor | None) -> Pending[list[Tensor | None]]:
        """Scan beside the caller's work. ``wait()``: the state that enters each segment, None for zero.

        ``boundary`` ``[B*N, HV, K, V]`` is what enters the documents at their beginning (or end), None for zero.
        """
        known = [
            boundary[one.document_rows]
            if boundary is not None and (one.segment.is_last if self._reverse else one.segment.is_first)
            else None
            for one in maps
        ]
        # At the boundary the map whose B already has what enters there. Maps of the lane's own: what they remember
        # (packed, exp of the decay) is memory of its stream.
        own = [(maps[index].own, known[index]) for index in self._moving]
        sent = [Affine(one.kind, one.state if start is None else one.apply(start), one.decay) for one, start in own]
        pending, executor = None, self._executor
        del self._executor  # its memory is the lane's from now on, and so is that of what is sent
        if sent:
            buffers = [*executor.buffers, *(tensor for one in sent for tensor in one.tensors)]
            pending = self._call.start(lambda lane: executor.run(lane, sent), self._device, buffers)

        def finish() -> list[Tensor | None]:
            entering = list(known)
            for index, state in zip(self._moving, pending.wait() if pending else [], strict=True):
                entering[index] = known[index] if state is None else state
            return entering

        return Pending(finish)


def states_by_run(plan: SequencePlan, states: Items[Tensor | None], found: RunMaps) -> list[Tensor | None]:
    """The segments' states put together for each run; None where all of them are zero."""
    joined: list[Tensor | None] = []
    rest = list(states)
    for run, (_, state) in zip(plan.runs, found, strict=True):
        mine, rest = rest[: len(run.segments)], rest[len(run.segments) :]
        if all(one is None for one in mine):
            joined.append(None)
            continue
        zero = state.new_zeros(state.shape[0] // len(mine), *state.shape[1:])
        joined.append(mine[0] if len(mine) == 1 else torch.cat([zero if s is None else s for s in mine]))
    return joined


def share_final_states(
    call: Call, plan: SequencePlan, ended: Mapping[int, Tensor], batch: int, like: Tensor
) -> Pending[Tensor]:
    """All documents' final states ``[B*N, HV, K, V]`` on every rank; ``ended`` holds those of this one.

    One round: each rank sends its own to all others.
    """
    mine = _stack([ended[document] for document in plan.ending_on(call.rank)], like)
    coming = call.all_gather(mine, [batch * len(plan.ending_on(rank)) for rank in range(call.size)])

    def finish() -> Tensor:
        final = like.new_empty(batch * len(plan.ends), *like.shape[1:])
        for rank, states in enumerate(coming.wait()):
            for number, document in enumerate(plan.ending_on(rank)):
                final[_rows(document, batch)] = states[_rows(number, batch)]
        return final

    return Pending(finish)


def collect_final_gradients(call: Call, plan: SequencePlan, grad: Tensor, batch: int) -> Pending[Tensor]:
    """The sum over ranks, in rank order, of the gradients of the final states that arise here; others are zero."""
    coming = call.sum_to_owners(
        [_stack([grad[_rows(d, batch)] for d in plan.ending_on(rank)], grad) for rank in range(call.size)]
    )

    def finish() -> Tensor:
        summed = coming.wait()
        total = torch.zeros_like(grad)
        for number, document in enumerate(plan.ending_on(call.rank)):
            total[_rows(document, batch)] = summed[_rows(number, batch)]
        return total

    return Pending(finish)


def initial_gradient(initial: Tensor | None, maps: Items[SegmentMap], grads: Items[Tensor]) -> Tensor | None:
    """The gradient of the initial states of the documents that begin here; zero for all others."""
    if initial is None:
        return None
    total = grads[0].new_zeros(initial.shape)
    for one in maps:
        if one.segment.is_first:
            total[one.document_rows] = grads[one.run][one.rows]
    return total.to(initial.dtype)


def join_runs(parts: Items[Tensor]) -> Tensor:
    """What the runs of a rank gave, ``[B, tokens, ...]``, as its tokens lie in memory."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=1)


def _rows(document: int, batch: int) -> slice:
    return slice(document * batch, (document + 1) * batch)


def _stack(states: Items[Tensor], like: Tensor) -> Tensor:
    return torch.cat(list(states)) if states else like.new_empty(0, *like.shape[1:])
