"""What a virtual rank talks through: by the world's rules, or on the simulated device as a real rank does by NCCL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from weft.comm.axis import Axis
from weft.comm.device import StreamLane, runs_behind
from weft.comm.nccl import PostedWithExchange
from weft.comm.wire import CallRecord, Pending, WireMessage, diagnose, without_gradients
from weft.errors import error_of, name_ranks
from weft.world.nccl import NcclExpected, NcclQueues

if TYPE_CHECKING:
    from weft.world.virtual import WorldState

T = TypeVar("T")


class VirtualWire:
    """One virtual rank's end of the world."""

    host = torch.device("cpu")

    def __init__(self, world: WorldState, rank: int, queues: NcclQueues | None) -> None:
        """``queues``: of the communicator it stands for, by NCCL's rules."""
        self._world, self.rank, self.size, self._queues = world, rank, world.size, queues
        self.numbers = range(world.size)
        self._lanes: dict[str, StreamLane] = {}
        self._apart: dict[tuple[str, Sequence[int]], VirtualWire] = {}
        self._side: Any = None
        if world.emulated is not None:
            self._communicator = world.emulated.EmulatedNccl(queues, rank)
            self._side = self._communicator.side()

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
        if self._side is not None and (self._side.carries(receives) or not receives):
            return PostedWithExchange(record, receives)
        if self._queues is not None and self._side is None:
            return NcclExpected(self._queues, record, receives)
        return self._world.messages.expect(self.rank, record, receives)

    def exchange(self, record: CallRecord, sends: Sequence[WireMessage], expected: Any) -> Pending[None]:
        if self._side is not None and self._side.carries(sends or getattr(expected, "messages", ())):
            self._communicator.record = record
            return self._side.exchange(self._communicator, record, sends, expected)
        if self._queues is not None and self._side is None:
            return self._queues.issue(self.rank, record, sends, expected)
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():  # a network's copies cost no rank time
            return self._both(expected, self._world.messages.send(self.rank, record, sends))

    def exchange_on_host(
        self, record: CallRecord, sends: Sequence[WireMessage], receives: Sequence[WireMessage]
    ) -> Pending[None]:
        if self.host.type != "cpu":  # a group without a CPU side
            return self.exchange(record, sends, self.expect(record, receives))
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
        if self._queues is None:
            return self, members
        key = name, tuple(members)
        if key not in self._apart:
            self._apart[key] = wire = VirtualWire(self._world, self.rank, self._world.queues_apart(name, members))
            if wire._side is not None:
                wire._communicator.record = CallRecord(name, 0, "meet", (), 0)
                wire._side.meet(wire._communicator, name, members)
        return self._apart[key], members

    def start(
        self, schedule: Callable[[], T], device: torch.device, operation: str, buffers: Sequence[torch.Tensor]
    ) -> Pending[T]:
        """Fork the rank's clock: the schedule's time passes beside the caller's. On a device: a side stream."""
        scheduler = self._world.scheduler
        if runs_behind(device):
            if operation not in self._lanes:
                self._lanes[operation] = StreamLane(device)
            return self._lanes[operation].start(schedule, buffers)
        if self._queues is not None and self._side is None:
            return self._start_inline(schedule)
        future: Future[T] = Future()
        axis, context = Axis.of(None), without_gradients()

        def body() -> None:
            with context, self._world.inside(axis, beside=True):
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
