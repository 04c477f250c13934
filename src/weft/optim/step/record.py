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
class Done:
    """What one part did in one step: the messages it started, and seconds of its work, waits not counted."""

    events: list[Event] = field(default_factory=list)
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
    def of(part: str, done: Done) -> PartRow:
        ended = [event for event in done.events if event.end is not None]
        return PartRow(
            part,
            sum(event.bytes_sent for event in done.events),
            sum(len(event.sends) for event in done.events),
            sum((event.end or 0.0) - event.start for event in ended),
            sum(event.waited for event in ended),
            done.seconds,
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
        self._parts: dict[str, Done] = {}
        self._agreeing = Done()
        self._work: list[Event] = []  # for the trace
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

    def of(self, part: str) -> Done:
        return self._agreeing if part == AGREEING else self._parts.setdefault(part, Done())

    @contextmanager
    def doing(self, part: str, work: str | None = None) -> Iterator[None]:
        """Around what a part does: the messages that it starts are its own, what it waits for is not its time.

        ``work``: what it is called in the trace.
        """
        mine = self.of(part)
        pending = [event for event in mine.events if event.end is None]
        start = self._clock()
        with record() as ledger:
            yield
        end = self._clock()
        mine.events += ledger.events
        mine.seconds += max(0.0, end - start - sum(event.waited for event in pending + ledger.events))
        if work is not None:
            self._work.append(Event(work, self._rank, start=start, end=end, lane="work"))

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
        return [PartRow.of(part, done) for part, done in [*self._parts.items(), (AGREEING, self._agreeing)]]

    def __str__(self) -> str:
        lines = [_HEAD, *(row.cells for row in self.rows)]
        widths = [max(len(line[at]) for line in lines) for at in range(len(_HEAD))]
        shown = ["  ".join([line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in
                 zip(line[1:], widths[1:], strict=True))]) for line in lines]  # fmt: skip
        return "\n".join([*shown, f"step {1e3 * self.seconds:.2f} ms, of it exposed {1e3 * self.exposed:.2f} ms"])

    def save_trace(self, path: str | Path) -> None:
        """A Chrome trace of the step (open it at ui.perfetto.dev): messages by axis, and work."""
        events = [event for done in (*self._parts.values(), self._agreeing) for event in done.events]
        Ledger(events + self._work).save_trace(path)
