"""Finding out why a wait does not end, at no cost while waits do end.

Messages carry the hash of their call as a tag, so ranks that call different things exchange nothing: they
wait. A background thread notices a wait that has lasted too long, leaves this rank's recent calls in the
rendezvous store, reads those of the ranks it waits for, and where they differ writes one verdict for all
and closes the connections. Whoever then fails finds the verdict in the store and raises it.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from weft.errors import Call, CommError, DisagreementError, describe_disagreement, name_ranks

PATIENCE = 1.0  # seconds a wait may last before the others' calls are looked up
PERIOD = 0.25  # seconds between two looks


class Watch:
    """The watch over one process group, from one rank. ``close`` must make every wait on the group fail."""

    def __init__(self, rank: int, size: int, store: Any, timeout: timedelta, close: Callable[[], None]) -> None:
        self._rank, self._size, self._store, self._timeout = rank, size, store, timeout
        self._close = close
        self._history: deque[Call] = deque(maxlen=64)
        self._waits: dict[int, tuple[float, Call, Sequence[int]]] = {}
        self._private_store: Any = None  # a connection of the watching thread's own
        self._said: Call | None = None
        if size > 1:
            _watches.add(self)

    def announce(self, call: Call) -> None:
        self._history.append(call)

    def begin(self, call: Call, peers: Sequence[int]) -> int:
        """A wait begins; `end` takes what this returns."""
        if _watchman is None:
            _wake_watchman()
        me = threading.get_ident()
        self._waits[me] = (time.monotonic(), call, peers)
        return me

    def end(self, wait: int) -> None:
        """A wait is over."""
        self._waits.pop(wait, None)

    def agree(self, call: Call, members: Sequence[int]) -> None:
        """Rank 0 of the axis compares everybody's call and leaves the verdict: two store operations a rank."""
        where = f"agree/{call.space}/{call.number}"
        self._store.set(f"{where}/{self._rank}", _dump([call]))
        if self._rank == members[0]:
            keys = [f"{where}/{member}" for member in members]
            self._await(call, keys, members)
            calls = {index: _load(self._store.get(key))[0] for index, key in enumerate(keys)}
            self._store.set(f"{where}/verdict", describe_disagreement(calls, len(members)) or "")
        else:
            self._await(call, [f"{where}/verdict"], members[:1])
        if verdict := self._store.get(f"{where}/verdict").decode():
            raise DisagreementError(verdict)

    def refuse(self, call: Call) -> None:
        """Leave the reason where the ranks that wait for this one will look."""
        ghost = Call(call.space, call.number, call.operation, (), call.tag)
        message = describe_disagreement({self._rank: call, -1: ghost}, 0)
        self._store.compare_set("verdict", "", json.dumps({"disagree": message}))

    def _await(self, call: Call, keys: list[str], ranks: Sequence[int]) -> None:
        """Until the keys are there. The watch goes on meanwhile: the others may be stuck in another operation."""
        stuck = self.begin(call, [rank for rank in ranks if rank != self._rank])
        deadline, pause = time.monotonic() + self._timeout.total_seconds(), 0.0005
        try:
            while not self._store.check(keys):
                if self._store.check(["verdict"]):
                    raise self._read_verdict(call)
                if time.monotonic() > deadline:
                    late = [rank for rank, key in zip(ranks, keys, strict=False) if not self._store.check([key])]
                    raise CommError(
                        f"{call.operation}: {name_ranks(late)} did not make call {call.number} within "
                        f"{self._timeout.total_seconds():g} s (rank {self._rank} called {call})"
                    )
                time.sleep(pause)
                pause = min(1.5 * pause, PERIOD / 5)
        finally:
            self.end(stuck)

    def inspect(self) -> None:
        """One look of the watchman: if a wait has lasted too long, find out why."""
        for since, call, peers in list(self._waits.values()):
            if time.monotonic() - since < PATIENCE:
                continue
            if self._private_store is None:
                self._private_store = self._store.clone()
            store = self._private_store
            latest = self._history[-1] if self._history else None
            if latest is not None and self._said is not latest:
                store.set(f"calls/{self._rank}", _dump(list(self._history)))
                self._said = latest
            if not store.check(["verdict"]):
                theirs = {peer: _load(store.get(f"calls/{peer}")) for peer in peers if store.check([f"calls/{peer}"])}
                if not any(_differ(list(self._history), calls) for calls in theirs.values()):
                    continue
                time.sleep(2 * PERIOD)  # the others get stuck too: let them say what they called
                self._judge(store, call)
            self._close()

    def _judge(self, store: Any, call: Call) -> None:
        """Write the verdict: what every rank that is stuck called, at the first call that differs."""
        heard = {rank: _load(store.get(f"calls/{rank}"))
                 for rank in range(self._size) if store.check([f"calls/{rank}"])}  # fmt: skip
        spaces = {c.space for calls in heard.values() for c in calls}
        for space in spaces:
            numbers = sorted({c.number for calls in heard.values() for c in calls if c.space == space})
            for number in numbers:
                at_once = {rank: c for rank, calls in heard.items() for c in calls
                           if (c.space, c.number) == (space, number)}  # fmt: skip
                if message := describe_disagreement(at_once, self._size):
                    store.compare_set("verdict", "", json.dumps({"disagree": message}))
                    return

    def explain(self, call: Call, peers: Sequence[int]) -> Exception:
        """What a failed wait means: the verdict if there is one, else a lost or silent peer."""
        meaning = self._find_meaning(call, peers)
        self._close()  # so that ranks who only send to this one hear of it at their next call
        return meaning

    def _find_meaning(self, call: Call, peers: Sequence[int]) -> Exception:
        try:
            patience = time.monotonic() + 2 * PERIOD
            while not self._store.check(["verdict"]) and time.monotonic() < patience:
                time.sleep(PERIOD / 10)  # whoever closed the connection has written it before
            message = (
                f"{call.operation} (call {call.number}): rank {self._rank} of {self._size} lost or no longer heard "
                f"{name_ranks(set(peers))}; the group's timeout is {self._timeout.total_seconds():g} s. "
                f"Look at the first rank that failed"
            )
            self._store.compare_set("verdict", "", json.dumps({"lost": message, "by": self._rank}))
            return self._read_verdict(call)
        except RuntimeError:  # the store is gone as well: its host died
            return CommError(
                f"{call.operation} (call {call.number}): rank {self._rank} of {self._size} lost its peers "
                f"{name_ranks(set(peers))} and the rendezvous store"
            )

    def _read_verdict(self, call: Call) -> Exception:
        verdict = json.loads(self._store.get("verdict"))
        if "disagree" in verdict:
            return DisagreementError(verdict["disagree"])
        if verdict["by"] == self._rank:
            return CommError(verdict["lost"])
        return CommError(f"{call.operation} (call {call.number}): rank {self._rank} stopped, because {verdict['lost']}")


def _differ(mine: list[Call], theirs: list[Call]) -> bool:
    known = {(call.space, call.number): call for call in theirs}
    shared = ((call, known.get((call.space, call.number))) for call in mine)
    return any(other is not None and not call.agrees_with(other) for call, other in shared)


def _dump(calls: list[Call]) -> str:
    return json.dumps([[c.space, c.number, c.operation, c.facts, c.tag] for c in calls])


def _load(text: bytes) -> list[Call]:
    return [Call(s, n, o, tuple((k, v) for k, v in facts), tag) for s, n, o, facts, tag in json.loads(text)]


_watches: weakref.WeakSet[Watch] = weakref.WeakSet()
_watchman: threading.Thread | None = None
_waking = threading.Lock()


def _wake_watchman() -> None:
    """Start the one watching thread of this process, with the first wait."""
    global _watchman
    with _waking:
        if _watchman is None:
            _watchman = threading.Thread(target=_keep_watch, name="weft watch", daemon=True)
            _watchman.start()


def _keep_watch() -> None:
    while True:
        time.sleep(PERIOD)
        for watch in list(_watches):
            try:
                watch.inspect()
            except RuntimeError:  # the store went away: the waits will end by themselves
                continue
