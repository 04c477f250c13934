"""The network of a virtual world: when a message leaves, when it arrives, and who waits for it.

"ideal": a message leaves when it is sent, messages of a rank leave one after the other, and a send is over when it has
arrived. "gloo": a message leaves when it is sent and the receiver's notice that it is ready has come; that is sent when
the receive is posted, and takes a delay. The messages of a rank share its link, as TCP connections do, and
a send is over when it leaves: the system's buffers take it. (NCCL's network is in `nccl`.)
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from weft.comm.wire import CallRecord, Pending, WireMessage
from weft.world.machine import Machine
from weft.world.scheduler import Scheduler, Task


class Links:
    """Every rank's link: messages leave it one after the other."""

    def __init__(self, size: int, machine: Machine | None) -> None:
        self._machine, self._free = machine, [0.0] * size

    @property
    def latency(self) -> float:
        return self._machine.latency if self._machine else 0.0

    def carry(self, rank: int, ready: float, size: int) -> float:
        """When a message of ``rank`` that could leave at ``ready`` arrives."""
        if self._machine is None:
            return ready
        self._free[rank] = max(ready, self._free[rank]) + self._machine.message_seconds(size)
        return self._free[rank] + self._machine.latency


@dataclass(eq=False)
class Flight:
    """One message, known to the sender, the receiver or both."""

    payload: torch.Tensor | None = None
    sent: float | None = None
    ready: float | None = None  # when the receiver's word reaches the sender
    over: float | None = None  # when the sender need not wait any longer
    arrival: float | None = None
    senders: list[Task] = field(default_factory=list)  # tasks that wait
    receivers: list[Task] = field(default_factory=list)

    @property
    def size(self) -> int:
        assert self.payload is not None
        return self.payload.numel() * self.payload.element_size()


class SharedLinks:
    """Every rank's link, shared alike by its connections; the messages of a connection leave one after the other."""

    def __init__(self, scheduler: Scheduler, machine: Machine, arrive: Callable[[Flight, float], None]) -> None:
        self._scheduler, self._machine, self._arrive = scheduler, machine, arrive
        # By rank and by peer: the messages that have not left whole, with the bytes of them that are left.
        self._queues: dict[int, dict[int, deque[list[Any]]]] = defaultdict(dict)
        self._clocks: dict[int, float] = defaultdict(float)
        self._plans: dict[int, int] = defaultdict(int)

    def carry(self, rank: int, peer: int, clock: float, flight: Flight) -> None:
        """A message leaves at ``clock``."""
        if self._machine.bandwidth == math.inf:
            self._arrive(flight, clock + self._machine.latency)
            return
        self._advance(rank, clock)
        self._queues[rank].setdefault(peer, deque()).append([flight, float(flight.size)])
        self._plan(rank)

    def _advance(self, rank: int, clock: float) -> None:
        """Let the link work until ``clock``, at most until one message is through."""
        queues = self._queues[rank]
        each = (clock - self._clocks[rank]) * self._machine.bandwidth / len(queues) if queues else 0.0
        self._clocks[rank] = clock
        for peer in list(queues):
            first = queues[peer][0]
            first[1] -= each
            if first[1] <= 1e-9 * first[0].size:
                queues[peer].popleft()
                self._arrive(first[0], clock + self._machine.latency)
                if not queues[peer]:
                    del queues[peer]

    def _plan(self, rank: int) -> None:
        """Come back when the next message is through; what was planned before is void."""
        queues = self._queues[rank]
        self._plans[rank] += 1
        if queues:
            number = self._plans[rank]
            left = min(queue[0][1] for queue in queues.values())
            clock = self._clocks[rank] + max(0.0, left) * len(queues) / self._machine.bandwidth
            self._scheduler.at(clock, lambda: self._come_back(rank, number, clock))

    def _come_back(self, rank: int, number: int, clock: float) -> None:
        if number == self._plans[rank]:
            self._advance(rank, clock)
            self._plan(rank)


@dataclass
class _Route:
    """Messages from one rank to another under one tag. The n-th receive gets the n-th message."""

    sent: int = 0
    asked: int = 0
    flights: dict[int, Flight] = field(default_factory=lambda: defaultdict(Flight))


class TaggedMessages:
    """Messages that meet by peer and tag, whatever else is on its way."""

    def __init__(self, scheduler: Scheduler, links: Links, tcp: Machine | None = None) -> None:
        """With ``tcp`` by Gloo's rules on that machine, else on ``links``."""
        self._scheduler, self._links = scheduler, links
        self._shared = None if tcp is None else SharedLinks(scheduler, tcp, self._arrive)
        self._routes: dict[tuple[int, int, int], _Route] = defaultdict(_Route)

    def expect(self, rank: int, record: CallRecord, receives: Sequence[WireMessage]) -> Pending[None]:
        clock = self._scheduler.current.clock
        asked = []
        for peer, tag, buffer in receives:
            route = self._routes[peer, rank, tag]
            flight = route.flights[route.asked]
            asked.append((peer, tag, route.asked, flight, buffer))
            route.asked += 1
            flight.ready = clock + self._links.latency
            if self._shared is not None and flight.sent is not None:
                self._set_off(peer, rank, flight)

        def finish() -> None:
            for peer, tag, number, flight, buffer in asked:
                if flight.arrival is None:
                    self._block(flight.receivers, f"for a message from rank {peer}", record)
                self._pass_time(flight.arrival)
                _fill(buffer, flight, record, rank, peer)
                route = self._routes[peer, rank, tag]
                del route.flights[number]
                if not route.flights and route.sent == route.asked:
                    del self._routes[peer, rank, tag]

        return Pending(finish)

    def send(self, rank: int, record: CallRecord, sends: Sequence[WireMessage]) -> Pending[None]:
        scheduler = self._scheduler
        if sends:
            scheduler.give_way()
        flights = []
        for peer, tag, tensor in sends:
            route = self._routes[rank, peer, tag]
            flight = route.flights[route.sent]
            route.sent += 1
            flight.payload = tensor if tensor.is_meta else tensor.detach().clone()
            flight.sent = scheduler.current.clock
            if self._shared is None:
                self._arrive(flight, self._links.carry(rank, flight.sent, flight.size))
                flight.over = flight.arrival
            elif flight.ready is not None:
                self._set_off(rank, peer, flight)
            flights.append((peer, flight))

        def finish() -> None:
            for peer, flight in flights:
                if flight.over is None:
                    self._block(flight.senders, f"for rank {peer} to receive", record)
                self._pass_time(flight.over)

        return Pending(finish)

    def _set_off(self, source: int, target: int, flight: Flight) -> None:
        """Both ends are known: the message leaves at the later of the two moments."""
        assert flight.sent is not None and flight.ready is not None
        leaves = max(flight.sent, flight.ready)
        if leaves <= self._scheduler.current.clock:
            self._leave(source, target, flight, leaves)
        else:
            self._scheduler.at(leaves, lambda: self._leave(source, target, flight, leaves))

    def _leave(self, source: int, target: int, flight: Flight, clock: float) -> None:
        assert self._shared is not None
        flight.over = clock
        for task in flight.senders:
            self._scheduler.wake(task)
        self._shared.carry(source, target, clock, flight)

    def _arrive(self, flight: Flight, clock: float) -> None:
        flight.arrival = clock
        for task in flight.receivers:
            self._scheduler.wake(task)

    def _block(self, waiters: list[Task], words: str, record: CallRecord) -> None:
        waiters.append(self._scheduler.current)
        self._scheduler.block(lambda: f"{words} in call {record.number}, {record}")

    def _pass_time(self, until: float | None) -> None:
        task = self._scheduler.current
        assert until is not None
        task.clock = max(task.clock, until)


def _fill(buffer: torch.Tensor, flight: Flight, record: CallRecord, rank: int, peer: int) -> None:
    payload = flight.payload
    assert payload is not None
    if payload.numel() != buffer.numel() or payload.dtype != buffer.dtype:
        raise RuntimeError(
            f"{record.operation}: rank {rank} expected {buffer.numel()} x {buffer.dtype} from rank {peer}, which sent "
            f"{payload.numel()} x {payload.dtype}"
        )
    if not buffer.is_meta:
        with torch.no_grad():
            buffer.copy_(payload.view(buffer.shape))
