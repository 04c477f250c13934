"""Which documents a rank's runs hold, and through which ranks the state of each of them travels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from weft.comm import Axis
from weft.comm.layout import lay_out, run_lengths, stops_of


@dataclass(frozen=True)
class Part:
    """The tokens of one document in one run.

    stops: the ranks whose runs hold the document, in order; places: the numbers of those runs in the sequence;
    position: this run's index among them. A document that lies within the run has one stop and sends nothing.
    """

    document: int
    length: int
    stops: tuple[int, ...]
    places: tuple[int, ...]
    position: int

    @property
    def is_first(self) -> bool:
        """Whether the document begins here."""
        return self.position == 0

    @property
    def is_last(self) -> bool:
        """Whether the document ends here."""
        return self.position == len(self.stops) - 1


@dataclass(frozen=True)
class Stretch:
    """A run of this rank: its tokens in local memory and the documents they belong to."""

    tokens: slice
    parts: tuple[Part, ...]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each part."""
        return [part.length for part in self.parts]


@dataclass(frozen=True)
class Journey:
    """All of it from one rank: its stretches, and for every document the rank where it ends."""

    stretches: tuple[Stretch, ...]
    ends: tuple[int, ...]

    def ending_on(self, rank: int) -> list[int]:
        """The documents whose final state ``rank`` has."""
        return [document for document, end in enumerate(self.ends) if end == rank]


def plan_dense(axis: Axis, layout: str, length: int) -> Journey:
    """One sequence through all runs. The other ranks' lengths need not be known."""
    stops = tuple(stops_of(layout, axis.size))
    places = tuple(range(len(stops)))
    mine = [position for position, rank in enumerate(stops) if rank == axis.rank]
    stretches, start = [], 0
    for position, count in zip(mine, run_lengths(length, layout, axis.rank, axis.size), strict=True):
        part = Part(0, count, stops, places, position)
        stretches.append(Stretch(slice(start, start + count), (part,)))
        start += count
    return Journey(tuple(stretches), (stops[-1],))


def plan_packed(axis: Axis, layout: str, lengths: Sequence[int], bounds: Sequence[int]) -> Journey:
    """Documents ``bounds[n] : bounds[n+1]`` of the whole sequence, over ranks that hold ``lengths`` tokens.

    A document stops only at the runs that hold tokens of it; an empty one at the run where it would begin.
    """
    runs = lay_out(lengths, layout)
    parts: list[list[Part]] = [[] for _ in runs]
    ends = []
    for document, (begin, end) in enumerate(pairwise(bounds)):
        overlaps = [max(0, min(end, run.offset + run.length) - max(begin, run.offset)) for run in runs]
        places = tuple(place for place, overlap in enumerate(overlaps) if overlap)
        if not places:
            holding = [p for p, run in enumerate(runs) if run.offset <= begin < run.offset + run.length]
            places = tuple(holding[:1] or [len(runs) - 1])
        stops = tuple(runs[place].rank for place in places)
        ends.append(stops[-1])
        for position, place in enumerate(places):
            parts[place].append(Part(document, overlaps[place], stops, places, position))
    stretches = [
        Stretch(slice(run.start, run.start + run.length), tuple(parts[place]))
        for place, run in enumerate(runs)
        if run.rank == axis.rank
    ]
    return Journey(tuple(stretches), tuple(ends))
