"""Threads that run one at a time, in the order of their virtual clocks.

Each rank (and each lane of it) is a task with a clock and a thread of its own. Exactly one runs; when it has to wait,
the next is always the ready task whose clock is behind all others. So runs repeat exactly, link times are given out in
time order, and "nobody is ready" is a deadlock, found at once.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable

from weft.errors import name_failing_rank


class Abandoned(BaseException):
    """Ends a task whose world has failed. Not an Exception: user code must not catch it by accident."""


class Task:
    """One thread of a virtual rank."""

    __slots__ = ("rank", "clock", "turn", "body", "started", "waits_for", "watchers", "over")

    def __init__(self, rank: int, clock: float, body: Callable[[], None]) -> None:
        self.rank, self.clock, self.body = rank, clock, body
        self.turn = threading.Lock()
        self.turn.acquire()
        self.started = self.over = False
        self.waits_for: Callable[[], str] | None = None
        self.watchers: list[Task] = []  # tasks that wait for the end of this one


class Scheduler:
    """Runs one task at a time until all have ended."""

    def __init__(self, size: int, explain_deadlock: Callable[[list[Task]], Exception]) -> None:
        self.failure: BaseException | None = None
        self._size = size
        self._explain_deadlock = explain_deadlock
        self._ready: list[tuple[float, int, Task | Callable[[], None]]] = []
        self._serial = 0
        self._blocked: dict[int, Task] = {}
        self._finished = threading.Lock()
        self._finished.acquire()
        self._threads: list[threading.Thread] = []
        self._local = threading.local()

    @property
    def current(self) -> Task:
        return self._local.task

    def spawn(self, rank: int, clock: float, body: Callable[[], None]) -> Task:
        """A new task that is ready to run; it starts when its turn comes."""
        task = Task(rank, clock, body)
        self.at(clock, task)
        return task

    def run(self) -> None:
        """Run until every task has ended; raise what made one fail, with its rank."""
        self._run_next()
        try:
            self._finished.acquire()
        except KeyboardInterrupt as error:
            self.failure = self.failure or error
            self._finished.acquire()
        for thread in self._threads:
            thread.join()  # a thread that is still ending when the process exits takes it down
        if self.failure is not None:
            raise self.failure

    def give_way(self) -> None:
        """Let everything that is behind in time go first."""
        task = self.current
        if self._ready and self._ready[0][0] < task.clock:
            self.at(task.clock, task)
            self._wait_for_turn(task)

    def block(self, waits_for: Callable[[], str]) -> None:
        """Stop the current task until `wake`. ``waits_for`` says what for, in a deadlock's message."""
        task = self.current
        task.waits_for = waits_for
        self._blocked[id(task)] = task
        self._wait_for_turn(task)

    def wake(self, task: Task) -> None:
        """Make a blocked task ready again; it runs when its turn comes."""
        del self._blocked[id(task)]
        task.waits_for = None
        self.at(task.clock, task)

    def join(self, task: Task) -> None:
        """Wait for the end of a lane; the waiter's clock is then at least the lane's."""
        if not task.over:
            task.watchers.append(self.current)
            self.block(lambda: "for its lane to end")
        self.current.clock = max(self.current.clock, task.clock)

    def at(self, clock: float, what: Task | Callable[[], None]) -> None:
        """Run a task, or what happens in the network between the ranks' turns, when no task is behind ``clock``."""
        self._serial += 1
        heapq.heappush(self._ready, (clock, self._serial, what))

    def _wait_for_turn(self, task: Task) -> None:
        self._run_next()
        task.turn.acquire()
        if self.failure is not None:
            raise Abandoned

    def _run_next(self) -> None:
        task = self._next_task()
        if task is None:
            self._finished.release()
        elif task.started:
            task.turn.release()
        else:
            task.started = True
            thread = threading.Thread(target=self._run_task, args=(task,), name=f"rank {task.rank}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _next_task(self) -> Task | None:
        """The task whose turn it is, after what happens in the network before that."""
        while True:
            if not self._ready and self._blocked:
                if self.failure is None:
                    self.failure = self._explain_deadlock(list(self._blocked.values()))
                self.wake(next(iter(self._blocked.values())))  # to unwind it
            if not self._ready:
                return None
            what = heapq.heappop(self._ready)[2]
            if isinstance(what, Task):
                return what
            if self.failure is None:
                what()

    def _run_task(self, task: Task) -> None:
        self._local.task = task
        try:
            if self.failure is None:
                task.body()
        except Abandoned:
            pass
        except BaseException as error:
            if self.failure is None:
                self.failure = name_failing_rank(error, task.rank, self._size)
        task.over = True
        for watcher in task.watchers:
            if id(watcher) in self._blocked:
                self.wake(watcher)
        self._run_next()
