"""What a step did: the messages of each part, how long they were under way and waited for, and its work."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from weft.comm import Ledger
from weft.comm.ledger import Event, record

if TYPE_CHECKING:
    from weft.optim.step.run import Unit

AGREEING = "agreeing"  # the row of what ranks tell each other: presence, norms, verdicts


@dataclass
class UnitRecord:
    """One unit in one step: its messages out and back, and the seconds of packing gradients and of its work, waits
    not counted."""

    sends: Ledger = field(default_factory=Ledger)
    returns: Ledger = field(default_factory=Ledger)
    packing: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class PartRow:
    """One part in one step of one rank. ``under_way``: seconds from the start of each message until it was taken;
    ``exposed``: those of them that the rank stood waiting; ``work``: seconds of computing."""

    part: str
    bytes_sent: int
    messages: int
    under_way: float
    exposed: float
    work: float

    @property
    def hidden(self) -> float:
        return max(0.0, self.under_way - self.exposed)


class StepRecord:
    """Filled while a step runs. ``clock`` is that of the ranks: virtual in a virtual world."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter, rank: int = 0) -> None:
        self._clock, self._rank = clock, rank
        self.units: dict[str, UnitRecord] = {}
        self.agreeing = Ledger()
        self.work: list[Event] = []
        self.examined = 0.0  # seconds of looking through gradients
        self.committed: dict[str, float] = {}  # seconds of writing what came back, by part
        self.began: float | None = None
        self.ended: float | None = None

    def of(self, unit: Unit) -> UnitRecord:
        return self.units.setdefault(unit.name, UnitRecord())

    @contextmanager
    def sending(self, unit: Unit) -> Iterator[None]:
        mine = self.of(unit)
        pending = [event for event in mine.sends.events if event.end is None]
        start = self._clock()
        with record() as ledger:
            yield
        mine.sends.events += ledger.events
        mine.packing += max(0.0, self._clock() - start - sum(event.waited for event in pending))

    @contextmanager
    def returning(self, unit: Unit) -> Iterator[None]:
        with record() as ledger:
            yield
        self.of(unit).returns.events += ledger.events

    @contextmanager
    def working(self, unit: Unit) -> Iterator[None]:
        """Around work: messages that it starts go back, or on; what it waits for is not its own time."""
        mine = self.of(unit)
        pending = [event for event in mine.sends.events + mine.returns.events if event.end is None]
        start = self._clock()
        with record() as ledger:
            yield
        end = self._clock()
        mine.returns.events += ledger.events
        waited = sum(event.waited for event in pending + ledger.events)
        mine.seconds += max(0.0, end - start - waited)
        self.work.append(Event(f"work: {unit.name}", self._rank, start=start, end=end, lane="work"))

    @contextmanager
    def examining(self) -> Iterator[None]:
        start = self._clock()
        yield
        end = self._clock()
        self.examined += end - start
        self.work.append(Event("examine", self._rank, start=start, end=end, lane="work"))

    @contextmanager
    def committing(self, part: str) -> Iterator[None]:
        pending = [event for name, unit in self.units.items() if part_of(name) == part
                   for event in unit.sends.events + unit.returns.events if event.end is None]  # fmt: skip
        start = self._clock()
        yield
        end = self._clock()
        self.committed[part] = max(0.0, end - start - sum(event.waited for event in pending))
        self.work.append(Event(f"commit: {part}", self._rank, start=start, end=end, lane="work"))

    @contextmanager
    def telling(self) -> Iterator[None]:
        start = self._clock()
        with record() as ledger:
            yield
        self.agreeing.events += ledger.events
        self.examined += max(0.0, self._clock() - start - sum(event.waited for event in ledger.events))

    def rows(self) -> list[PartRow]:
        """What each part sent and waited for, and what the ranks told each other."""
        parts: dict[str, list[UnitRecord]] = {}
        for name, unit in self.units.items():
            parts.setdefault(part_of(name), []).append(unit)
        found = [
            _row(part, [event for unit in units for event in unit.sends.events + unit.returns.events],
                 sum(unit.packing + unit.seconds for unit in units) + self.committed.get(part, 0.0))
            for part, units in parts.items()
        ]  # fmt: skip
        return [*found, _row(AGREEING, self.agreeing.events, self.examined)]

    def save_trace(self, path: str | Path) -> None:
        """A Chrome trace of this rank's step: its messages and its work."""
        events = [event for unit in self.units.values() for event in unit.sends.events + unit.returns.events]
        Ledger(events + self.agreeing.events + self.work).save_trace(path)


def part_of(unit: str) -> str:
    """The part of a unit's name.

    >>> part_of("REKLS.0")
    'REKLS'
    """
    return unit.rpartition(".")[0] or unit


def _row(part: str, events: list[Event], work: float) -> PartRow:
    ended = [event for event in events if event.end is not None]
    return PartRow(
        part,
        sum(event.bytes_sent for event in events),
        sum(len(event.sends) for event in events),
        sum((event.end or 0.0) - event.start for event in ended),
        sum(event.waited for event in ended),
        work,
    )
