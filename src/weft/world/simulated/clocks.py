"""Vector clocks: every operator has a number on its stream, a clock says up to which number each stream is done."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from weft.world.simulated.places import Place

Clock = dict[int, int]  # the id of a stream -> the number of an operator on it


def merge(into: Clock, other: Clock) -> None:
    """``into`` knows what ``other`` knows too."""
    for stream, count in other.items():
        if count > into.get(stream, 0):
            into[stream] = count


def covers(clock: Clock, other: Clock) -> bool:
    """Whether ``clock`` knows all that ``other`` does."""
    return all(clock.get(stream, 0) >= count for stream, count in other.items())


class HostCopy(Protocol):
    """A copy from or to pinned memory that is under way: see `weft.world.simulated.pinned`."""

    stream: int
    count: int

    def finish(self) -> None: ...


@dataclass(frozen=True)
class Freed:
    """Memory that was freed while ``stream`` may have been using it at ``used``."""

    allocated: Place
    stream: int
    number: int
    used: Place


clocks_by_stream: dict[int, Clock] = {}  # of all streams there have been, by id


def clock_of(streams: Iterable[int]) -> Clock:
    """What all of these streams together come after, by their ids."""
    known: Clock = {}
    for one in streams:
        merge(known, clocks_by_stream[one])
    return known
