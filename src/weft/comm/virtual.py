"""A world of ranks in one process: the test harness with real tensors, the simulator with a machine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from weft.comm import ledger
from weft.comm.axis import Axis, enter_world
from weft.comm.cost import counting
from weft.comm.ledger import Event, Ledger
from weft.comm.machine import Machine
from weft.comm.scheduler import Scheduler, Task
from weft.comm.wire import Message, Pending
from weft.errors import Call, DeadlockError, DisagreementError, describe_disagreement, name_ranks

T = TypeVar("T")


@dataclass
class Run(Generic[T]):
    """What a virtual world brought back.

    results: what ``fn`` returned, by rank. ledgers: every exchange, by rank. elapsed: virtual seconds until
    the last rank was done (None without a machine). timeline: the events of all ranks, and with a machine
    that counts operators those too; ``timeline.save_trace(path)`` draws them.
    """

    results: list[T]
    ledgers: list[Ledger]
    elapsed: float | None
    timeline: Ledger


@dataclass
class _Parcel:
    payload: torch.Tensor
    arrival: float


@dataclass
class _Route:
    """Messages from one rank to another under one tag. The n-th receive gets the n-th message, as on Gloo."""

    sent: int = 0
    asked: int = 0
    parcels: dict[int, _Parcel] = field(default_factory=dict)
    waiting: dict[int, Task] = field(default_factory=dict)


class VirtualWorld:
    """``size`` ranks as threads of this process, one at a time, in the order of their virtual clocks.

    >>> VirtualWorld(3).run(lambda axis: axis.rank).results
    [0, 1, 2]
    """

    def __init__(self, size: int, machine: Machine | None = None) -> None:
        if size < 1:
            raise ValueError(f"VirtualWorld: size must be at least 1, got {size}")
        self.size, self.machine = size, machine

    def run(self, fn: Callable[[Axis], T]) -> Run[T]:
        """Run ``fn(axis)`` on every rank. ``group=None`` inside ``fn`` means this world.

        Raises `DeadlockError` saying who waits for what, `DisagreementError` where ranks made different
        calls, or the first exception of a rank with a note of which rank it was.
        """
        return _Switchboard(self.size, self.machine).run(fn)


class _Switchboard:
    """The shared side of one run: mail boxes, links and the scheduler."""

    def __init__(self, size: int, machine: Machine | None) -> None:
        self.size, self.machine = size, machine
        self.scheduler = Scheduler(size, self._explain_deadlock)
        self.ledgers = [Ledger() for _ in range(size)]
        self.operators: list[Event] = []
        self.known: dict[Any, Any] = {}
        self.link_free = [0.0] * size
        self.routes: dict[tuple[int, int, int], _Route] = defaultdict(_Route)
        self.board: dict[tuple[str, int], dict[int, Call]] = defaultdict(dict)
        self.verdicts: dict[tuple[str, int], str | None] = {}
        self.readers: dict[tuple[str, int], list[Task]] = defaultdict(list)
        self.calls: list[dict[str, Call]] = [{} for _ in range(size)]

    def run(self, fn: Callable[[Axis], T]) -> Run[T]:
        results: list[Any] = [None] * self.size
        ends = [0.0] * self.size

        def live(rank: int) -> None:
            axis = Axis.over(VirtualWire(self, rank))
            self.furnish(axis, lambda: results.__setitem__(rank, fn(axis)))
            ends[rank] = self.scheduler.current.clock

        for rank in range(self.size):
            self.scheduler.spawn(rank, 0.0, lambda rank=rank: live(rank))  # type: ignore[misc]
        self.scheduler.run()
        timeline = Ledger.merge([*self.ledgers, Ledger(self.operators)])
        return Run(results, self.ledgers, max(ends) if self.machine else None, timeline)

    def furnish(self, axis: Axis, body: Callable[[], None]) -> None:
        """Run ``body`` as part of a rank: its WORLD, its ledger, its clock."""
        enter_world(axis)
        ledger.settle_in(self.ledgers[axis.wire.rank])
        if self.machine is not None and self.machine.counts_operators:
            with counting(self.machine, self._spend, self.known):
                body()
        else:
            body()

    def _spend(self, operator: str, seconds: float) -> None:
        task = self.scheduler.current
        start, task.clock = task.clock, task.clock + seconds
        self.operators.append(Event(operator, task.rank, start=start, end=task.clock, lane="compute"))

    def _explain_deadlock(self, blocked: list[Task]) -> Exception:
        latest: dict[str, dict[int, Call]] = defaultdict(dict)
        for rank, calls in enumerate(self.calls):
            for space, call in calls.items():
                latest[space][rank] = call
        for calls_by_rank in latest.values():
            number = min(call.number for call in calls_by_rank.values())
            at_once = {rank: call for rank, call in calls_by_rank.items() if call.number == number}
            if message := describe_disagreement(at_once, 0):
                return DisagreementError(message)
        rows = [f"rank {task.rank} waits {task.waits_for()}" for task in blocked[:16] if task.waits_for]
        more = f"; and {len(blocked) - 16} more" if len(blocked) > 16 else ""
        return DeadlockError(f"deadlock in a virtual world of {self.size}: {'; '.join(rows)}{more}")


class VirtualWire:
    """One virtual rank's end of the switchboard."""

    def __init__(self, board: _Switchboard, rank: int) -> None:
        self._board, self.rank, self.size = board, rank, board.size

    def clock(self) -> float:
        return self._board.scheduler.current.clock

    def announce(self, call: Call, members: Sequence[int]) -> None:
        self._board.calls[self.rank][call.space] = call

    def refuse(self, call: Call) -> None:
        pass  # the error that follows ends the run

    def exchange(self, call: Call, sends: Sequence[Message], receives: Sequence[Message]) -> Pending[None]:
        board, scheduler = self._board, self._board.scheduler
        if sends and board.machine:
            scheduler.give_way()
        latest = scheduler.current.clock
        for peer, tag, tensor in sends:
            arrival = scheduler.current.clock
            if board.machine and peer != self.rank:
                size = tensor.numel() * tensor.element_size()
                start = max(scheduler.current.clock, board.link_free[self.rank])
                board.link_free[self.rank] = start + board.machine.message_seconds(size)
                arrival = board.link_free[self.rank] + board.machine.latency
            latest = max(latest, arrival)
            payload = tensor if tensor.is_meta else tensor.detach().clone()
            route = board.routes[self.rank, peer, tag]
            route.parcels[route.sent] = _Parcel(payload, arrival)
            if waiter := route.waiting.pop(route.sent, None):
                scheduler.wake(waiter)
            route.sent += 1
        asked = []
        for peer, tag, buffer in receives:
            route = board.routes[peer, self.rank, tag]
            asked.append((peer, tag, route.asked, buffer))
            route.asked += 1

        def finish() -> None:
            for peer, tag, number, buffer in asked:
                self._take(call, peer, tag, number, buffer)
            # A send is over when it has arrived, as on Gloo and NCCL. Its link was free again before that.
            scheduler.current.clock = max(scheduler.current.clock, latest)

        return Pending(finish)

    def _take(self, call: Call, peer: int, tag: int, number: int, buffer: torch.Tensor) -> None:
        board, scheduler = self._board, self._board.scheduler
        route = board.routes[peer, self.rank, tag]
        if number not in route.parcels:
            route.waiting[number] = scheduler.current
            scheduler.block(lambda: f"for a message from rank {peer} in call {call.number}, {call}")
        parcel = route.parcels.pop(number)
        if route.sent == route.asked and not route.parcels and not route.waiting:
            board.routes.pop((peer, self.rank, tag), None)
        if parcel.payload.numel() != buffer.numel() or parcel.payload.dtype != buffer.dtype:
            raise RuntimeError(
                f"{call.operation}: rank {self.rank} expected {buffer.numel()} x {buffer.dtype} from rank {peer}, "
                f"which sent {parcel.payload.numel()} x {parcel.payload.dtype}"
            )
        if not buffer.is_meta:
            with torch.no_grad():
                buffer.copy_(parcel.payload.view(buffer.shape))
        scheduler.current.clock = max(scheduler.current.clock, parcel.arrival)

    def start(self, schedule: Callable[[], T], device: torch.device) -> Pending[T]:
        """Fork the rank's clock: the schedule's time passes beside the caller's."""
        board, scheduler = self._board, self._board.scheduler
        outcome: list[T] = []
        axis = Axis.of(None)

        def body() -> None:
            with torch.no_grad():
                board.furnish(axis, lambda: outcome.append(schedule()))

        task = scheduler.spawn(self.rank, scheduler.current.clock, body)

        def finish() -> T:
            scheduler.join(task)
            return outcome[0]

        return Pending(finish)

    def agree(self, call: Call, members: Sequence[int]) -> None:
        """Wait until every member has made this call, then compare: costs no virtual time and no message."""
        board, scheduler = self._board, self._board.scheduler
        where = (call.space, call.number)
        posted = board.board[where]
        posted[self.rank] = call
        if len(posted) < len(members):
            board.readers[where].append(scheduler.current)
            scheduler.block(lambda: f"for {name_ranks(set(members) - set(posted))} to make call {call.number}, {call}")
        else:
            calls = {index: posted[member] for index, member in enumerate(members)}
            board.verdicts[where] = describe_disagreement(calls, len(members))
            del board.board[where]
            for reader in board.readers.pop(where, []):
                scheduler.wake(reader)
        if verdict := board.verdicts[where]:
            raise DisagreementError(verdict)
