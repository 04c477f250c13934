"""Which documents a rank's runs hold, and through which ranks the state of each of them travels."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from weft.comm import Axis, Path
from weft.ops.sequence import Sequence
from weft.ops.sequence.layout import ranks_of_runs, run_lengths


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


def plan_dense(axis: Axis, layout: str, length: int) -> SequencePlan:
    """One sequence through all runs. The other ranks' lengths need not be known."""
    ranks = tuple(ranks_of_runs(layout, axis.size))
    mine = [place for place, rank in enumerate(ranks) if rank == axis.rank]
    runs, start = [], 0
    for place, count in zip(mine, run_lengths(length, layout, axis.rank, axis.size), strict=True):
        runs.append(LocalRun(slice(start, start + count), (Segment(0, count, Path(ranks, place)),)))
        start += count
    return SequencePlan(tuple(runs), (ranks[-1],))


def plan_packed(sequence: Sequence) -> SequencePlan:
    """The documents of a sequence whose lengths are known.

    The path of a document passes only the runs that hold tokens of it; an empty one's the run where it would begin.
    """
    assert sequence.bounds is not None
    runs = sequence.runs
    segments: list[list[Segment]] = [[] for _ in runs]
    ends = []
    for document, (begin, end) in enumerate(pairwise(sequence.bounds)):
        overlaps = [max(0, min(end, run.offset + run.length) - max(begin, run.offset)) for run in runs]
        places = tuple(place for place, overlap in enumerate(overlaps) if overlap)
        if not places:
            holding = [p for p, run in enumerate(runs) if run.offset <= begin < run.offset + run.length]
            places = tuple(holding[:1] or [len(runs) - 1])
        ranks = tuple(runs[place].rank for place in places)
        ends.append(ranks[-1])
        for position, place in enumerate(places):
            segments[place].append(Segment(document, overlaps[place], Path(ranks, position, name=document)))
    local = [
        LocalRun(slice(run.start, run.start + run.length), tuple(segments[place]))
        for place, run in enumerate(runs)
        if run.rank == sequence.axis.rank
    ]
    return SequencePlan(tuple(local), tuple(ends))
