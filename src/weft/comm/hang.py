"""Finding out why a wait does not end, at no cost while waits do end.

Messages carry the hash of their call as a tag, so ranks that call different things exchange nothing: they wait. A
background thread notices a wait that has lasted too long and publishes what this rank called and waits for in the
rendezvous store. One of the stuck ranks, the reader, reads what all have published: O(P) reads for a look at P ranks
in all. The others read two keys. A reader that ends, or waits no longer, is followed by another one.

A reason to give up is one of two things about a call that somebody waits in now: another rank made it differently, or
could not make it. The reader writes the reason once, all close the group, and whoever then fails raises it.
"""

from __future__ import annotations

import atexit
import itertools
import json
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from weft.comm.wire import CallRecord, diagnose, dump_records, load_records
from weft.errors import CommError, Fault, error_of, fault_of, name_ranks

PATIENCE = 1.0  # seconds a wait may last before the others are looked up
PATIENCE_BEHIND = 5.0  # where the host does not wait, and may have other things to do than to ask
PERIOD = 0.25  # seconds between two looks
LEASE = 1.0  # seconds without a sign of the reader after which another rank takes its place
HISTORY = 64  # calls a rank can say it made

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wait:
    """A wait under way. ``kind``: for "data", for the "metadata" at its beginning, or to "agree" before it."""

    since: float
    record: CallRecord
    kind: str = "data"
    works: Sequence[Any] = ()  # of messages that the host does not wait for (NCCL)

    def lasts(self) -> bool:
        return time.monotonic() - self.since >= (PATIENCE_BEHIND if self.works else PATIENCE)


class HangDetector:
    """Looks after the waits on one process group, from one rank. ``close`` must make every wait on the group fail."""

    def __init__(self, rank: int, size: int, store: Any, timeout: timedelta, close: Callable[[], None]) -> None:
        self._rank, self._size, self._store, self._timeout = rank, size, store, timeout
        self._close = close
        self._history: deque[CallRecord] = deque(maxlen=HISTORY)
        self._waits: dict[object, Wait] = {}
        self._refused: set[tuple[str, int]] = set()
        self._refusal_stands = False
        self._private_store: Any = None  # a connection of the watching thread's own
        self._published = ""
        self._reader, self._reader_since = "", 0.0  # what the store said of the reader, and since when
        self._signs = itertools.count()
        self._looked = -1  # the number of changes that the last look has seen
        if size > 1:
            _detectors.add(self)

    # What a rank does.

    def announce(self, record: CallRecord) -> None:
        """This rank makes a call."""
        self._history.append(record)
        self._refused.discard((record.counter, record.number))
        if self._refusal_stands:  # it goes on: what it could not do before is no reason any more
            self._refusal_stands = False
            self._store.set(f"refusal/{self._rank}", "")

    def refuse(self, record: CallRecord) -> None:
        """This rank could not make this call: leave the reason where those who wait for it will look."""
        self._forget(record)
        self._refused.add((record.counter, record.number))
        self._store.set(f"refusal/{self._rank}", dump_records([record]))
        self._store.add("changes", 1)
        self._refusal_stands = True

    @contextmanager
    def waiting(self, record: CallRecord, kind: str = "data") -> Iterator[None]:
        """A wait of this thread."""
        if _watcher is None:
            _start_watcher()
        me = threading.get_ident()
        self._waits[me] = Wait(time.monotonic(), record, kind)
        try:
            yield
        finally:
            self._waits.pop(me, None)

    def follow(self, record: CallRecord, works: Sequence[Any]) -> None:
        """Watch messages that the host does not wait for.

        Only the thread that issues them asks whether earlier ones are over: asked by another, the capture of a graph
        would break. The last ones may be published as lasting when they are over: no reason, all made that call alike.
        """
        if _watcher is None:
            _start_watcher()
        for key, wait in list(self._waits.items()):
            if wait.works and all(work.is_completed() for work in wait.works):
                self._waits.pop(key, None)
        self._waits[object()] = Wait(time.monotonic(), record, works=works)

    def agree(self, record: CallRecord, members: Sequence[int]) -> None:
        """Rank 0 of the axis compares everybody's call and leaves the diagnosis: two store operations for each rank."""
        where = f"agree/{record.counter}/{record.number}"
        self._store.set(f"{where}/{self._rank}", dump_records([record]))
        if self._rank == members[0]:
            keys = [f"{where}/{member}" for member in members]
            self._await(record, keys, members)
            records = {index: load_records(self._store.get(key))[0] for index, key in enumerate(keys)}
            self._store.set(f"{where}/diagnosis", json.dumps(diagnose(records, len(members))))
        else:
            self._await(record, [f"{where}/diagnosis"], members[:1])
        if diagnosis := json.loads(self._store.get(f"{where}/diagnosis")):
            self._forget(record)
            raise error_of(tuple(diagnosis) if record.fault is None else record.fault)

    def _forget(self, record: CallRecord) -> None:
        """The call did not take place."""
        self._history = deque((one for one in self._history if one is not record), maxlen=HISTORY)

    def _await(self, record: CallRecord, keys: list[str], ranks: Sequence[int]) -> None:
        """Until the keys are there. The watch goes on meanwhile: the others may be stuck in another operation."""
        deadline, pause = time.monotonic() + self._timeout.total_seconds(), 0.0005
        with self.waiting(record, "agree"):
            while not self._store.check(keys):
                if self._store.check(["closed"]):
                    raise self._read_reason(record)
                if time.monotonic() > deadline:
                    late = [rank for rank, key in zip(ranks, keys, strict=False) if not self._store.check([key])]
                    raise CommError(
                        f"{record.operation}: {name_ranks(late)} did not make call {record.number} within "
                        f"{self._timeout.total_seconds():g} s (rank {self._rank} called {record})"
                    )
                time.sleep(pause)
                pause = min(1.5 * pause, PERIOD / 5)

    def explain(self, record: CallRecord, peer: int, error: Exception) -> Exception:
        """What a wait that failed on ``peer`` means: the reason if there is one, else a lost or silent peer."""
        meaning = self._find_meaning(record, peer, error)
        self._close()  # so that ranks who only send to this one find it at their next call
        return meaning

    def _find_meaning(self, record: CallRecord, peer: int, error: Exception) -> Exception:
        where = f"{record.operation} (call {record.number})"
        try:
            patience = time.monotonic() + 2 * PERIOD
            while not self._store.check(["closed"]) and time.monotonic() < patience:
                time.sleep(PERIOD / 10)  # whoever closes a connection has written why before
            if "timed out" in str(error).lower():
                words = (
                    f"{where}: rank {self._rank} of {self._size} heard nothing from rank {peer} for "
                    f"{self._timeout.total_seconds():g} s, the group's timeout; which rank failed cannot be told"
                )
            else:
                words = f"{where}: rank {peer} of {self._size} is gone: its process or its connection has ended"
            self._store.compare_set("closed", "", json.dumps([fault_of(CommError(words)), self._rank]))
            return self._read_reason(record)
        except RuntimeError:  # the store is gone as well: its host died
            return CommError(
                f"{where}: rank {self._rank} of {self._size} lost rank {peer} and the rendezvous store; which rank "
                f"failed first cannot be told"
            )

    def _read_reason(self, record: CallRecord) -> Exception:
        fault, by = json.loads(self._store.get("closed"))
        reason = error_of(tuple(fault))
        if isinstance(reason, CommError) and by != self._rank:
            reason.add_note(f"found by rank {by}; rank {self._rank} stopped in {record.operation} because of it")
        return reason

    # What the watching thread does.

    def inspect(self) -> None:
        """If a wait has lasted too long, publish it and look for the reason."""
        lasting = [wait for wait in list(self._waits.values()) if wait.lasts()]
        if not lasting and not self._published:
            return
        store = self._private_store = self._private_store or self._store.clone()
        self._publish(store, lasting)
        if not lasting:
            return
        if not store.check(["closed"]):
            if not self._is_reader(store) or self._look(store) is None:
                return
            time.sleep(2 * PERIOD)  # the others get stuck too: let them say what they called
            if (reason := self._find_reason(store)) is None:
                return
            store.compare_set("closed", "", json.dumps([reason, self._rank]))
        log.error("rank %d of %d gives up: %s", self._rank, self._size, store.get("closed").decode())
        self._close()

    def _publish(self, store: Any, lasting: list[Wait]) -> None:
        """What this rank called, waits in and refused; nothing when it waits no longer, and then it is no reader."""
        stuck = [[wait.record.counter, wait.record.number, wait.kind] for wait in lasting]
        words = json.dumps([dump_records(list(self._history)), stuck, sorted(self._refused)]) if lasting else ""
        if words != self._published:
            store.set(f"state/{self._rank}", words)
            store.add("changes", 1)  # after it: a look that misses the one misses the other
            self._published = words
        if not lasting and self._reads(self._reader):
            self._reader = store.compare_set("reader", self._reader, "").decode()

    def _is_reader(self, store: Any) -> bool:
        """Whether this rank reads for all: it gives a sign of life, or takes the place of one who gives none.

        If two do for a moment, both find the same.
        """
        known = self._reader
        if not known or self._reads(known) or time.monotonic() - self._reader_since > LEASE:
            found = store.compare_set("reader", known, f"{self._rank} {next(self._signs)}").decode()
        else:
            found = store.get("reader").decode()
        if found != known:
            self._reader, self._reader_since = found, time.monotonic()
        return self._reads(found)

    def _reads(self, reader: str) -> bool:
        return reader.startswith(f"{self._rank} ")

    def _look(self, store: Any) -> Fault | None:
        """`_find_reason`, if anything has changed since the last look that found none."""
        if (changes := store.add("changes", 0)) == self._looked:
            return None
        if (reason := self._find_reason(store)) is None:
            self._looked = changes
        return reason

    def _find_reason(self, store: Any) -> Fault | None:
        """Why somebody's wait will not end, by what all ranks have published."""
        refusals: list[CallRecord] = []
        waits: list[tuple[str, int, str, list[list[Any]]]] = []  # counter, number, kind; what that rank refused
        calls: dict[tuple[str, int], dict[int, CallRecord]] = {}
        for rank in range(self._size):
            if words := _read(store, f"refusal/{rank}"):
                refusals += load_records(words)
            if words := _read(store, f"state/{rank}"):
                records, stuck, refused = json.loads(words)
                waits += [(counter, number, kind, refused) for counter, number, kind in stuck]
                for record in load_records(records):
                    calls.setdefault((record.counter, record.number), {})[rank] = record
        for one in refusals:
            # A call that the waiting rank refused too was made by nobody, and holds up nobody.
            if any(
                counter == one.counter and number >= one.number and [one.counter, one.number] not in refused
                for counter, number, _, refused in waits
            ):
                return one.fault
        kinds: dict[tuple[str, int], set[str]] = {}
        for counter, number, kind, _ in waits:
            kinds.setdefault((counter, number), set()).add(kind)
        for call in sorted(kinds.keys() & calls.keys()):
            rounds = {(record.operation, record.integers) for record in calls[call].values()}
            # Ranks that agree first, or gather in the same round, find out by themselves when the last one comes.
            resolves = kinds[call] <= {"agree"} or (kinds[call] <= {"agree", "metadata"} and len(rounds) == 1)
            if not resolves and (diagnosis := diagnose(calls[call], self._size)):
                return diagnosis
        return None


def _read(store: Any, key: str) -> bytes:
    """What is published under ``key``, if anything. Keys are never deleted: a read would wait for them."""
    return store.get(key) if store.check([key]) else b""


_detectors: weakref.WeakSet[HangDetector] = weakref.WeakSet()
_watcher: threading.Thread | None = None
_starting = threading.Lock()
_ending = threading.Event()


def _start_watcher() -> None:
    global _watcher  # one thread of this process, from the first wait on
    with _starting:
        if _watcher is None:
            _watcher = threading.Thread(target=_watch, name="weft hang detection", daemon=True)
            _watcher.start()
            # As the interpreter ends, a thread within a call of the store would abort the process.
            atexit.register(_watcher.join, PERIOD)
            atexit.register(_ending.set)  # before that


def _watch() -> None:
    while not _ending.wait(PERIOD):
        for detector in list(_detectors):
            try:
                detector.inspect()
            except RuntimeError:  # the store went away: the waits will end by themselves
                continue
