"""The record of what was sent: bytes, rounds and a trace, measured and never computed from a formula."""

from __future__ import annotations

import itertools
import json
import math
import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

_ticks = itertools.count()


@dataclass
class Event:
    """One exchange (or, in virtual time, one local operator) of one rank.

    ``sends`` and ``receives`` are (peer, bytes); ``end`` is None until it has been waited for. ``lane`` is
    the axis it ran on, or an operation's lanes; ``tag`` tells the messages of one call from those of another.
    ``began``, ``received`` and ``ended`` order what happened on a rank, where clocks may stand still. ``waited``: the
    seconds somebody stood in its ``wait()``: the rank, or ``beside`` it a lane.
    """

    operation: str
    rank: int
    sends: tuple[tuple[int, int], ...] = ()
    receives: tuple[tuple[int, int], ...] = ()
    start: float = 0.0
    end: float | None = None
    lane: str = "main"
    tag: int = 0
    began: int = field(default_factory=lambda: next(_ticks))
    received: int | None = None
    ended: int | None = None
    waited: float = 0.0
    beside: bool = False

    def receive(self) -> None:
        """What it receives is there; what it sends may still be on its way."""
        if self.received is None:
            self.received = next(_ticks)

    def finish(self, end: float) -> None:
        self.receive()
        self.end, self.ended = end, next(_ticks)

    @property
    def bytes_sent(self) -> int:
        return sum(size for _, size in self.sends)

    @property
    def bytes_received(self) -> int:
        return sum(size for _, size in self.receives)

    @property
    def peers(self) -> tuple[int, ...]:
        return tuple(sorted({peer for peer, _ in self.sends + self.receives}))


@dataclass
class Ledger:
    """Every exchange recorded by one rank (or by all of them, after `merge`), in the order they began.

    ``stood``: (operation, start, end) of each time the main line of the rank stood waiting for a lane.
    """

    events: list[Event] = field(default_factory=list)
    stood: list[tuple[str, float, float]] = field(default_factory=list)

    @property
    def bytes_sent(self) -> int:
        return sum(event.bytes_sent for event in self.events)

    @property
    def bytes_received(self) -> int:
        return sum(event.bytes_received for event in self.events)

    @property
    def exposed(self) -> list[tuple[str, float, float]]:
        """(operation, start, end) of each time the main line stood waiting, for a message or for a lane."""
        waits = [
            (event.operation, event.end - event.waited, event.end)
            for event in self.events
            if event.end is not None and not event.beside
        ]
        return sorted([*waits, *self.stood], key=lambda wait: wait[1])

    @property
    def rounds(self) -> int:
        """The longest chain of messages, each sent after the one before it had arrived.

        Exact when the ledgers of all ranks are merged; in a single rank's ledger every message from
        elsewhere counts as one step after the rank's own last.
        """
        return _longest_chain(self.events)

    @staticmethod
    def merge(ledgers: Iterable[Ledger]) -> Ledger:
        """One ledger of several ranks' events, by start time."""
        return Ledger(sorted((event for one in ledgers for event in one.events), key=lambda event: event.start))

    def save_trace(self, path: str | Path) -> None:
        """Write a Chrome trace (open it at ui.perfetto.dev or chrome://tracing): rows for each rank and lane."""
        rows = _Rows()
        blocks: list[dict[str, object]] = []
        for event in sorted(self.events, key=lambda event: event.start):
            if event.end is None:
                continue
            blocks.append({
                "name": event.operation, "ph": "X", "pid": event.rank, "tid": rows.place(event),
                "ts": event.start * 1e6, "dur": (event.end - event.start) * 1e6,
                "args": {"bytes_sent": event.bytes_sent, "bytes_received": event.bytes_received,
                         "peers": list(event.peers)},
            })  # fmt: skip
        for rank in sorted({event.rank for event in self.events}):
            blocks.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}})
        for rank, lane, number in rows.numbers:
            name = lane if number == 0 else f"{lane} ({number + 1})"
            blocks.append({"name": "thread_name", "ph": "M", "pid": rank, "tid": rows.numbers[rank, lane, number],
                           "args": {"name": name}})  # fmt: skip
        Path(path).write_text(json.dumps({"traceEvents": blocks, "displayTimeUnit": "ms"}))


class _Rows:
    """Rows of a trace: each rank and lane has one, and further ones only where its blocks overlap."""

    def __init__(self) -> None:
        self.numbers: dict[tuple[int, str, int], int] = {}
        self._ends: dict[tuple[int, str, int], float] = {}

    def place(self, event: Event) -> int:
        number = 0
        while self._ends.get((event.rank, event.lane, number), -math.inf) > event.start:
            number += 1
        row = (event.rank, event.lane, number)
        self._ends[row] = event.start if event.end is None else event.end
        return self.numbers.setdefault(row, len(self.numbers))


def _longest_chain(events: Iterable[Event]) -> int:
    """Replay the events rank by rank: a send leaves at its rank's depth, a receive lifts it to one more."""
    points: dict[int, list[tuple[float, int, Event]]] = defaultdict(list)
    for event in events:
        points[event.rank].append((event.began, 0, event))
        points[event.rank].append((math.inf if event.received is None else event.received, 1, event))
        points[event.rank].append((math.inf if event.ended is None else event.ended, 2, event))
    todo = {row: deque(sorted(steps, key=lambda step: step[:2])) for row, steps in points.items()}
    depth: dict[int, int] = defaultdict(int)
    left: dict[int, int] = {}
    flying: dict[tuple[int, int, int], deque[int]] = defaultdict(deque)

    def advance(row: int, force: bool) -> bool:
        moved = False
        while todo[row]:
            _, kind, event = todo[row][0]
            if kind == 0:
                left[id(event)] = depth[row]
                for peer, _ in event.sends:
                    flying[event.rank, peer, event.tag].append(depth[row])
            elif kind == 1:
                waiting = [flying[peer, event.rank, event.tag] for peer, _ in event.receives]
                if not all(waiting) and not force:
                    return moved
                arrived = [sent.popleft() if sent else depth[row] for sent in waiting]
                depth[row] = max([depth[row], *(sent + 1 for sent in arrived)])
                force = False
            elif event.sends:  # a send is over when it has arrived
                depth[row] = max(depth[row], left.pop(id(event)) + 1)
            todo[row].popleft()
            moved = True
        return moved

    while any(todo.values()):
        if not sum(advance(row, force=False) for row in todo):
            advance(next(row for row in todo if todo[row]), force=True)
    return max(depth.values(), default=0)


class _Here(threading.local):
    """What a thread belongs to."""

    own: Ledger | None = None  # of the virtual rank whose thread this is; None in a real process


opened: list[tuple[Ledger, Ledger | None]] = []  # a ledger, and the virtual rank's ledger it was opened under
here = _Here()


@contextmanager
def record() -> Iterator[Ledger]:
    """Record every exchange of this process (inside a virtual world: of this rank) until the block ends.

    >>> with record() as ledger:
    ...     pass
    >>> ledger.bytes_sent
    0
    """
    entry = (Ledger(), here.own)
    opened.append(entry)
    try:
        yield entry[0]
    finally:
        opened[:] = [other for other in opened if other is not entry]


def attach(own: Ledger) -> None:
    """Make this thread part of a virtual rank: what it sends is always entered in ``own``."""
    here.own = own


def note(event: Event) -> None:
    """Enter an event in the rank's own ledger and in every open one that covers this thread."""
    for ledger in _covering():
        ledger.events.append(event)


def note_standing(operation: str, start: float, end: float) -> None:
    """Enter that the main line stood waiting for a lane."""
    for ledger in _covering():
        ledger.stood.append((operation, start, end))


def _covering() -> list[Ledger]:
    covering = [ledger for ledger, under in opened if under is None or under is here.own]
    return covering if here.own is None else [here.own, *covering]
