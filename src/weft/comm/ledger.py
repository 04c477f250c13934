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
    the axis or lane it ran on, ``tag`` tells the messages of one call from those of another. ``began`` and
    ``ended`` order what happened on a rank, where clocks may stand still.
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
    ended: int | None = None

    def finish(self, end: float) -> None:
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
    """Every exchange recorded by one rank (or by all of them, after `merge`), in the order they began."""

    events: list[Event] = field(default_factory=list)

    @property
    def bytes_sent(self) -> int:
        return sum(event.bytes_sent for event in self.events)

    @property
    def bytes_received(self) -> int:
        return sum(event.bytes_received for event in self.events)

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
        """Write a Chrome trace (open it at ui.perfetto.dev or chrome://tracing): a row a rank and lane."""
        lanes = {lane: number for number, lane in enumerate(dict.fromkeys(event.lane for event in self.events))}
        rows: list[dict[str, object]] = []
        for event in self.events:
            if event.end is None:
                continue
            rows.append({
                "name": event.operation, "ph": "X", "pid": event.rank, "tid": lanes[event.lane],
                "ts": event.start * 1e6, "dur": (event.end - event.start) * 1e6,
                "args": {"bytes_sent": event.bytes_sent, "bytes_received": event.bytes_received,
                         "peers": list(event.peers)},
            })  # fmt: skip
        for rank in sorted({event.rank for event in self.events}):
            rows.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}})
            for lane, number in lanes.items():
                rows.append({"name": "thread_name", "ph": "M", "pid": rank, "tid": number, "args": {"name": lane}})
        Path(path).write_text(json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"}))


def _longest_chain(events: Iterable[Event]) -> int:
    """Replay the events rank by rank: a send leaves at its rank's depth, a receive lifts it to one more."""
    points: dict[int, list[tuple[float, int, Event]]] = defaultdict(list)
    for event in events:
        points[event.rank].append((event.began, 0, event))
        points[event.rank].append((math.inf if event.ended is None else event.ended, 1, event))
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
            else:
                mail = [flying[peer, event.rank, event.tag] for peer, _ in event.receives]
                if not all(mail) and not force:
                    return moved
                arrived = [box.popleft() if box else depth[row] for box in mail]
                arrived += [left.pop(id(event))] if event.sends else []  # a send is over when it has arrived
                depth[row] = max([depth[row], *(sent + 1 for sent in arrived)])
                force = False
            todo[row].popleft()
            moved = True
        return moved

    while any(todo.values()):
        if not sum(advance(row, force=False) for row in todo):
            advance(next(row for row in todo if todo[row]), force=True)
    return max(depth.values(), default=0)


_open: list[tuple[Ledger, Ledger | None]] = []  # a ledger, and the virtual rank's ledger it was opened under
_here = threading.local()  # .own: the ledger of the virtual rank this thread belongs to; absent in a real process


@contextmanager
def record() -> Iterator[Ledger]:
    """Record every exchange of this process (inside a virtual world: of this rank) until the block ends.

    >>> with record() as ledger:
    ...     pass
    >>> ledger.bytes_sent
    0
    """
    entry = (Ledger(), getattr(_here, "own", None))
    _open.append(entry)
    try:
        yield entry[0]
    finally:
        _open[:] = [other for other in _open if other is not entry]


def settle_in(own: Ledger) -> None:
    """Make this thread part of a virtual rank: what it sends is always entered in ``own``."""
    _here.own = own


def is_recording() -> bool:
    """Whether any ledger would take an event of this thread."""
    return bool(_open) or getattr(_here, "own", None) is not None


def note(event: Event) -> None:
    """Enter an event in the rank's own ledger and in every open one that covers this thread."""
    own = getattr(_here, "own", None)
    if own is not None:
        own.events.append(event)
    for ledger, opened_under in _open:
        if opened_under is None or opened_under is own:
            ledger.events.append(event)
