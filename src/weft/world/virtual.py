"""A world of ranks in one process: the test harness with real tensors, the simulator with a machine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from weft.comm import ledger
from weft.comm.axis import Axis, enter_world
from weft.comm.ledger import Event, Ledger
from weft.comm.records import CallRecord, diagnose
from weft.comm.wire import Pending, WireMessage, without_gradients
from weft.errors import DeadlockError, Fault, NcclRuleError, error_of, name_ranks
from weft.world.machine import Machine, counting
from weft.world.nccl import HostReads, NcclExpected, NcclQueues
from weft.world.network import Links, TaggedMessages
from weft.world.scheduler import Scheduler, Task

T = TypeVar("T")
RULES = ("ideal", "gloo", "nccl")


@dataclass
class WorldRun(Generic[T]):
    """What a virtual world brought back.

    results: what ``fn`` returned, by rank. ledgers: every exchange, by rank. elapsed: virtual seconds until
    the last rank was done (None without a machine). timeline: the events of all ranks, and with a machine
    that counts operators those too; ``timeline.save_trace(path)`` draws them.
    """

    results: list[T]
    ledgers: list[Ledger]
    elapsed: float | None
    timeline: Ledger


class VirtualWorld:
    """``size`` ranks as threads of this process, one at a time, in the order of their virtual clocks.

    ``rules`` says how messages behave. "ideal": each on its own. "gloo": one also waits for the notice that its receive
    is posted (see `weft.world.network`). "nccl": with NCCL's rules, and what breaks one is an error (see
    `weft.world.nccl`); every program is then run twice, with the host blocked at each issue and with the host free.

    >>> VirtualWorld(3).run(lambda axis: axis.rank).results
    [0, 1, 2]
    """

    def __init__(self, size: int, machine: Machine | None = None, rules: str = "ideal") -> None:
        if size < 1:
            raise ValueError(f"VirtualWorld: size must be at least 1, got {size}")
        if rules not in RULES:
            raise ValueError(f"VirtualWorld: rules {rules!r} is not one of {', '.join(RULES)}")
        self.size, self.machine, self.rules = size, machine, rules

    def run(self, fn: Callable[[Axis], T]) -> WorldRun[T]:
        """Run ``fn(axis)`` on every rank. ``group=None`` inside ``fn`` means this world.

        Raises `DeadlockError` saying who waits for what, `DisagreementError` where ranks made different
        calls, or the first exception of a rank with a note of which rank it was.
        """
        if self.rules == "nccl":
            _WorldState(self, host_blocks=True).run(fn)
        return _WorldState(self).run(fn)


@dataclass
class _Comparison:
    """A call that its ranks compare before it begins: who has made it, who waits for the others, what is wrong."""

    records: dict[int, CallRecord] = field(default_factory=dict)
    waiting: list[Task] = field(default_factory=list)
    diagnosis: Fault | None = None


class _WorldState:
    """The shared side of one run: the network, the scheduler and what ranks leave for each other."""

    def __init__(self, world: VirtualWorld, host_blocks: bool = False, connected: bool = True) -> None:
        self.size, self.machine = world.size, world.machine
        self.scheduler = Scheduler(world.size, self._explain_deadlock)
        links = Links(world.size, world.machine)
        self.messages = TaggedMessages(self.scheduler, links, tcp=world.machine if world.rules == "gloo" else None)
        self.nccl: NcclQueues | None = None
        if world.rules == "nccl":
            self.nccl = NcclQueues(self.scheduler, links, world.size, host_blocks, connected)
        self.ledgers = [Ledger() for _ in range(world.size)]
        self.operators: list[Event] = []
        self.known: dict[Any, Any] = {}
        self.calls: list[dict[str, CallRecord]] = [{} for _ in range(world.size)]
        self.refusals: list[CallRecord | None] = [None] * world.size
        self.comparing: dict[tuple[str, int], _Comparison] = defaultdict(_Comparison)

    def run(self, fn: Callable[[Axis], T]) -> WorldRun[T]:
        results: list[Any] = [None] * self.size
        ends = [0.0] * self.size

        def live(rank: int) -> None:
            axis = Axis.over(VirtualWire(self, rank))
            with self.inside(axis):
                results[rank] = fn(axis)
            if self.nccl is not None:
                self.nccl.check_end(rank)
            ends[rank] = self.scheduler.current.clock

        for rank in range(self.size):
            self.scheduler.spawn(rank, 0.0, lambda rank=rank: live(rank))  # type: ignore[misc]
        self.scheduler.run()
        if self.nccl is not None:
            self.nccl.check_end()
        timeline = Ledger.merge([*self.ledgers, Ledger(self.operators)])
        return WorldRun(results, self.ledgers, max(ends) if self.machine else None, timeline)

    @contextmanager
    def inside(self, axis: Axis) -> Iterator[None]:
        """This thread is part of a rank: its WORLD, its ledger, its clock."""
        enter_world(axis)
        ledger.attach(self.ledgers[axis.wire.rank])
        reads = nullcontext() if self.nccl is None else HostReads(self.nccl, axis.wire.rank)
        costs = nullcontext() if self.machine is None else counting(self.machine, self.spend, self.known)
        with reads, costs:
            yield

    def spend(self, operator: str, seconds: float) -> None:
        task = self.scheduler.current
        start, task.clock = task.clock, task.clock + seconds
        self.operators.append(Event(operator, task.rank, start=start, end=task.clock, lane="compute"))

    def _explain_deadlock(self, blocked: list[Task]) -> Exception:
        for refused in self.refusals:
            if refused is not None and refused.fault is not None:
                return error_of(refused.fault)
        latest: dict[str, dict[int, CallRecord]] = defaultdict(dict)
        for rank, calls in enumerate(self.calls):
            for counter, record in calls.items():
                latest[counter][rank] = record
        for records in latest.values():
            number = min(record.number for record in records.values())
            at_once = {rank: record for rank, record in records.items() if record.number == number}
            if diagnosis := diagnose(at_once, 0):
                return error_of(diagnosis)
        rows = [f"rank {task.rank} waits {task.waits_for()}" for task in blocked[:16] if task.waits_for]
        more = f"; and {len(blocked) - 16} more" if len(blocked) > 16 else ""
        kind = DeadlockError if self.nccl is None else NcclRuleError
        return kind(f"deadlock in a virtual world of {self.size}: {'; '.join(rows)}{more}")


class VirtualWire:
    """One virtual rank's end of the world."""

    host = torch.device("cpu")

    def __init__(self, world: _WorldState, rank: int) -> None:
        self._world, self.rank, self.size = world, rank, world.size
        self.numbers = range(world.size)

    def clock(self) -> float:
        return self._world.scheduler.current.clock

    def spend(self, what: str, seconds: float) -> None:
        """Let this rank compute for so long, in a world with a machine."""
        self._world.spend(what, seconds)

    def announce(self, record: CallRecord) -> None:
        self._world.calls[self.rank][record.counter] = record
        self._world.refusals[self.rank] = None

    def refuse(self, record: CallRecord) -> None:
        self._world.refusals[self.rank] = record

    def expect(self, record: CallRecord, receives: Sequence[WireMessage]) -> Pending[None]:
        if self._world.nccl is not None:
            return NcclExpected(self._world.nccl, record, receives)
        return self._world.messages.expect(self.rank, record, receives)

    def exchange(self, record: CallRecord, sends: Sequence[WireMessage], expected: Pending[None]) -> Pending[None]:
        if self._world.nccl is not None:
            return self._world.nccl.issue(self.rank, record, sends, expected)
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():  # a network's copies cost no rank time
            return self._both(expected, self._world.messages.send(self.rank, record, sends))

    def exchange_on_host(
        self, record: CallRecord, sends: Sequence[WireMessage], receives: Sequence[WireMessage]
    ) -> Pending[None]:
        messages = self._world.messages
        return self._both(messages.expect(self.rank, record, receives), messages.send(self.rank, record, sends))

    @staticmethod
    def _both(expected: Pending[None], sent: Pending[None]) -> Pending[None]:
        def finish() -> None:
            with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
                expected.wait()
                sent.wait()

        return Pending(finish)

    def apart(self, name: str, members: Sequence[int]) -> tuple[VirtualWire, Sequence[int]]:
        return self, members

    def start(
        self, schedule: Callable[[], T], device: torch.device, operation: str, buffers: Sequence[torch.Tensor]
    ) -> Pending[T]:
        """Fork the rank's clock: the schedule's time passes beside the caller's."""
        scheduler = self._world.scheduler
        if self._world.nccl is not None:
            return self._start_inline(schedule)
        future: Future[T] = Future()
        axis, context = Axis.of(None), without_gradients()

        def body() -> None:
            with context, self._world.inside(axis):
                try:
                    future.set_result(schedule())
                except Exception as error:  # raised in the caller, who waits for it
                    future.set_exception(error)

        task = scheduler.spawn(self.rank, scheduler.current.clock, body)

        def finish() -> T:
            scheduler.join(task)
            return future.result()

        return Pending(finish)

    def _start_inline(self, schedule: Callable[[], T]) -> Pending[T]:
        """As on a side stream: issued now, in the order of the host, while the main line's clock stands still."""
        task = self._world.scheduler.current
        start = task.clock
        with without_gradients():
            value = schedule()
        end, task.clock = task.clock, start

        def finish() -> T:
            current = self._world.scheduler.current
            current.clock = max(current.clock, end)
            return value

        return Pending(finish)

    def agree(self, record: CallRecord, members: Sequence[int]) -> None:
        """Wait until every member has made this call, then compare: costs no virtual time and no message."""
        world, scheduler, where = self._world, self._world.scheduler, (record.counter, record.number)
        comparison = world.comparing[where]
        records = comparison.records
        records[self.rank] = record
        if len(records) < len(members):
            comparison.waiting.append(scheduler.current)
            scheduler.block(
                lambda: f"for {name_ranks(set(members) - set(records))} to make call {record.number}, {record}"
            )
        else:
            comparison.diagnosis = diagnose({at: records[one] for at, one in enumerate(members)}, len(members))
            del world.comparing[where]
            for task in comparison.waiting:
                scheduler.wake(task)
        if comparison.diagnosis is not None:
            raise error_of(comparison.diagnosis if record.fault is None else record.fault)
