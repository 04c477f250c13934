"""A command as local ranks: processes that start, are signalled and end together."""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from weft.parallel.rendezvous import LocalRank, loopback_settings, open_store

GRACE = 10.0  # seconds the other ranks have to end by themselves after one has failed
PATIENCE = 120.0  # seconds that all have after a signal: to finish a step and save
MOST_RANKS = 512  # processes of one machine; more is a slip of the keyboard
SAME_SIGNAL = 1.0  # seconds within which signals count as one: `timeout` and the like send to a process and its group
_LOOK = 0.05  # seconds between two looks
_TAIL = 20_000  # characters of a failed rank's standard error


def check_count(ranks: int, words: str) -> None:
    """Refuse numbers of local ranks that no machine should be asked for."""
    if not isinstance(ranks, int):
        raise TypeError(f"{words}: ranks must be an int, got {ranks!r}")
    if not 1 <= ranks <= MOST_RANKS:
        raise ValueError(f"{words}: ranks must be at least 1 and at most {MOST_RANKS} on one machine, got {ranks}")


def run_ranks(command: Sequence[str], count: int, name: str, patience: float = PATIENCE, quiet: bool = False) -> int:
    """Run ``command`` as ``count`` ranks that meet on the loopback of this machine; returns their exit status.

    Rank 0 keeps the terminal. Of the others only the error that ended the run is shown, under ``name``. A rank that
    fails ends the others. SIGINT and SIGTERM are passed on once, and the ranks have ``patience`` seconds to end; a
    second one, or one before all ranks have met, ends them at once. The ranks end if this process does.
    """
    check_count(count, name)
    folder = Path(tempfile.mkdtemp(prefix="weft-"))  # nobody else may look into it
    ranks = _Ranks(name, count, patience)
    try:
        with ranks.taking_signals():
            ranks.start(command, folder, quiet)
            ranks.wait()
        return ranks.explain()
    finally:
        ranks.end()
        shutil.rmtree(folder, ignore_errors=True)


class _Ranks:
    def __init__(self, name: str, count: int, patience: float) -> None:
        self.name, self.count, self.patience = name, count, patience
        self.ranks: list[LocalRank] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self.statuses: dict[int, int] = {}  # of those that ended by themselves, in that order
        self.signals: list[tuple[int, float]] = []  # and when they came
        self.passed_on = False
        self.deadline = math.inf
        self.lifeline: int | None = None

    def start(self, command: Sequence[str], folder: Path, quiet: bool) -> None:
        """Each in a session of its own: Ctrl-C at the terminal comes to this process alone."""
        self.store = open_store()  # the server: it lives as long as this object
        theirs, self.lifeline = os.pipe()
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)  # they find what this process finds
        shared = {"OMP_NUM_THREADS": "1", **os.environ, **loopback_settings(), "PYTHONPATH": path}
        try:
            for number in range(self.count):
                rank = LocalRank(number, self.store.port, theirs, folder)
                with rank.stderr_file.open("wb") as stderr:
                    process = subprocess.Popen(
                        command, env={**shared, **rank.environment(self.count)}, pass_fds=[theirs],
                        start_new_session=True, stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL if quiet else None, stderr=stderr if number else None,
                    )  # fmt: skip
                self.ranks.append(rank)
                self.processes.append(process)
        finally:
            os.close(theirs)

    @contextmanager
    def taking_signals(self) -> Iterator[None]:
        """What is ignored (by nohup or a shell) stays so. Only the main thread can take signals."""

        def take(number: int, frame: Any) -> None:
            self.signals.append((number, time.monotonic()))

        before = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    before[number] = signal.signal(number, take)
        try:
            yield
        finally:
            for known, handler in before.items():
                signal.signal(known, handler)

    def wait(self) -> None:
        """Until all have ended by themselves, or must be ended: a rank failed, or somebody asked for it."""
        while True:
            for rank, process in enumerate(self.processes):
                if rank not in self.statuses and (status := process.poll()) is not None:
                    self.statuses[rank] = status
                    if status and not self.passed_on:
                        self.deadline = min(self.deadline, time.monotonic() + GRACE)
            if len(self.statuses) == self.count or self.must_end() or time.monotonic() > self.deadline:
                return
            time.sleep(_LOOK)

    def must_end(self) -> bool:
        """Pass the first signal on; is there a second, or has nothing begun that could be saved?"""
        if not self.signals:
            return False
        number, since = self.signals[0]
        if self.signals[-1][1] - since > SAME_SIGNAL:
            return True
        if not self.passed_on:
            if not all(rank.has_joined() for rank in self.ranks):
                return True
            self.passed_on = True
            self.deadline = min(self.deadline, time.monotonic() + self.patience)
            for process in self.processes:
                process.send_signal(number)  # nothing to those that have ended
        return False

    def end(self) -> None:
        """At once, those that are left."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        if self.lifeline is not None:
            os.close(self.lifeline)

    def explain(self) -> int:
        """The exit status of all, after a word about the rank that failed first if it could not say it itself."""
        failed = [rank for rank, status in self.statuses.items() if status]
        if not failed:
            if len(self.statuses) == self.count:
                return 0
            name = signal.Signals(self.signals[0][0]).name
            if not self.passed_on:
                self.say(f"{name}: ended before all ranks had begun")
            elif time.monotonic() > self.deadline:
                self.say(f"{name}: not done after {self.patience:g} s, ended")
            return 128 + self.signals[0][0]
        notes = {rank: note for rank in failed if (note := self.ranks[rank].failure()) is not None}
        # Killed ones have no time to leave a note, and what the others note then is that somebody is gone.
        killed = [rank for rank in failed if self.statuses[rank] < 0 and rank not in notes]
        first = killed[0] if killed else min(notes, key=notes.__getitem__, default=failed[0])
        status = self.statuses[first]
        if status < 0:
            if not self.signals:
                self.say(f"rank {first} of {self.count} was ended by {signal.Signals(-status).name}")
            return 128 - status
        noted = notes.get(first, (0, ""))[1]
        if first and noted != notes.get(0, (0, None))[1] and not self.signals:
            text = self.ranks[first].stderr_file.read_text(errors="replace")[-_TAIL:].strip()
            self.say(f"rank {first} of {self.count} ended with status {status}: {text or noted}")
        return status

    def say(self, words: str) -> None:
        print(f"{self.name}: {words}", file=sys.stderr, flush=True)
