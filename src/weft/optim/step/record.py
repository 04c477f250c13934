"""What a step did: the messages of each part, how long they were under way and waited for, and its work."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from weft.comm import Ledger
from weft.comm.ledger import Event, record

AGREEING = "agreeing"  # the row of what ranks compare: presence, norms, verdicts
_HEAD = ("part", "MB sent", "messages", "under way ms", "hidden ms", "exposed ms", "work ms")


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

    @staticmethod
    def of(part: str, events: list[Event], work: float) -> PartRow:
        ended = [event for event in events if event.end is not None]
        return PartRow(
            part,
            sum(event.bytes_sent for event in events),
            sum(len(event.sends) for event in events),
            sum((event.end or 0.0) - event.start for event in ended),
            sum(event.waited for event in ended),
            work,
        )

    @property
    def hidden(self) -> float:
        return max(0.0, self.under_way - self.exposed)

    @property
    def cells(self) -> tuple[str, ...]:
        times = (self.under_way, self.hidden, self.exposed, self.work)
        return self.part, f"{self.bytes_sent / 1e6:.3f}", str(self.messages), *(f"{1e3 * one:.2f}" for one in times)


class StepRecord:
    """What happens in one step of this rank, filled while it runs. ``clock``: that of the ranks, virtual or not.

    ``print`` it, or read ``rows``, ``seconds`` and ``exposed``. A message is under way from its start until it is
    taken; exposed are those seconds of it that the rank stood waiting, hidden the others. Several are under way at
    once, so these do not add up to the step.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, rank: int = 0) -> None:
        self._clock, self._rank = clock, rank
        self.units: dict[str, UnitRecord] = {}
        self.agreeing = Ledger()
        self.work: list[Event] = []
        self.examined = 0.0  # seconds of looking through gradients
        self.committed: dict[str, float] = {}  # seconds of writing what came back, by part
        self.began: float | None = None
        self.ended: float | None = None

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Around the step, without what left in the backward."""
        self.began = self._clock()
        try:
            yield
        finally:
            self.ended = self._clock()

    def of(self, unit: str) -> UnitRecord:
        return self.units.setdefault(unit, UnitRecord())

    @contextmanager
    def sending(self, unit: str) -> Iterator[None]:
        mine = self.of(unit)
        pending = [event for event in mine.sends.events if event.end is None]
        start = self._clock()
        with record() as ledger:
            yield
        mine.sends.events += ledger.events
        mine.packing += max(0.0, self._clock() - start - sum(event.waited for event in pending))

    @contextmanager
    def returning(self, unit: str) -> Iterator[None]:
        with record() as ledger:
            yield
        self.of(unit).returns.events += ledger.events

    @contextmanager
    def working(self, unit: str) -> Iterator[None]:
        """Around work: messages that it starts go back, or on; what it waits for is not its own time."""
        mine = self.of(unit)
        pending = [event for event in mine.sends.events + mine.returns.events if event.end is None]
        start = self._clock()
        with record() as ledger:
            yield
        end = self._note(f"work: {unit}", start)
        mine.returns.events += ledger.events
        mine.seconds += max(0.0, end - start - sum(event.waited for event in pending + ledger.events))

    def _note(self, what: str, start: float) -> float:
        """Work until now, for the trace."""
        end = self._clock()
        self.work.append(Event(what, self._rank, start=start, end=end, lane="work"))
        return end

    @contextmanager
    def examining(self) -> Iterator[None]:
        start = self._clock()
        yield
        self.examined += self._note("examine", start) - start

    @contextmanager
    def committing(self, part: str) -> Iterator[None]:
        pending = [event for name, unit in self.units.items() if part_of(name) == part
                   for event in unit.sends.events + unit.returns.events if event.end is None]  # fmt: skip
        start = self._clock()
        yield
        end = self._note(f"commit: {part}", start)
        self.committed[part] = max(0.0, end - start - sum(event.waited for event in pending))

    @contextmanager
    def gathering(self) -> Iterator[None]:
        start = self._clock()
        with record() as ledger:
            yield
        self.agreeing.events += ledger.events
        self.examined += max(0.0, self._clock() - start - sum(event.waited for event in ledger.events))

    # What `OverlappedStep.explain` shows.

    @property
    def seconds(self) -> float:
        """Of the step."""
        assert self.began is not None and self.ended is not None
        return self.ended - self.began

    @property
    def exposed(self) -> float:
        """Seconds that the rank stood waiting."""
        return sum(row.exposed for row in self.rows)

    @property
    def rows(self) -> list[PartRow]:
        """What each part sent and waited for, and what the ranks compared."""
        parts: dict[str, list[UnitRecord]] = {}
        for name, unit in self.units.items():
            parts.setdefault(part_of(name), []).append(unit)
        found = [
            PartRow.of(part, [event for unit in units for event in unit.sends.events + unit.returns.events],
                       sum(unit.packing + unit.seconds for unit in units) + self.committed.get(part, 0.0))
            for part, units in parts.items()
        ]  # fmt: skip
        return [*found, PartRow.of(AGREEING, self.agreeing.events, self.examined)]

    def __str__(self) -> str:
        lines = [_HEAD, *(row.cells for row in self.rows)]
        widths = [max(len(line[at]) for line in lines) for at in range(len(_HEAD))]
        shown = ["  ".join([line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in
                 zip(line[1:], widths[1:], strict=True))]) for line in lines]  # fmt: skip
        return "\n".join([*shown, f"step {1e3 * self.seconds:.2f} ms, of it exposed {1e3 * self.exposed:.2f} ms"])

    def save_trace(self, path: str | Path) -> None:
        """A Chrome trace of the step (open it at ui.perfetto.dev): messages by axis, and work."""
        events = [event for unit in self.units.values() for event in unit.sends.events + unit.returns.events]
        Ledger(events + self.agreeing.events + self.work).save_trace(path)


def part_of(unit: str) -> str:
    """The part of a unit's name.

    >>> part_of("REKLS.0")
    'REKLS'
    """
    return unit.rpartition(".")[0] or unit
