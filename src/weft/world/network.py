"""The network of a virtual world: when a message leaves, when it arrives, and who waits for it.

"ideal": a message leaves when it is sent. "gloo": it leaves when it is sent and the receiver's word that it is ready
has come; the receiver gives that word when it posts the receive, and it takes a delay. (NCCL's network is in `nccl`.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from weft.comm.wire import Pending, WireMessage
from weft.errors import CallRecord
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


@dataclass
class Flight:
    """One message, known to the sender, the receiver or both."""

    payload: torch.Tensor | None = None
    sent: float | None = None
    ready: float | None = None  # when the receiver's word reaches the sender
    arrival: float | None = None
    waiters: list[Task] = field(default_factory=list)


@dataclass
class _Route:
    """Messages from one rank to another under one tag. The n-th receive gets the n-th message."""

    sent: int = 0
    asked: int = 0
    flights: dict[int, Flight] = field(default_factory=lambda: defaultdict(Flight))


class Mail:
    """Messages that meet by peer and tag, whatever else is on its way."""

    def __init__(self, scheduler: Scheduler, links: Links, handshake: bool) -> None:
        self._scheduler, self._links, self._handshake = scheduler, links, handshake
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
            if self._handshake and flight.sent is not None:
                self._set_off(peer, flight)

        def finish() -> None:
            for peer, tag, number, flight, buffer in asked:
                self._await(flight, f"for a message from rank {peer}", record)
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
            if not self._handshake:
                self._leave(rank, flight, flight.sent)
            elif flight.ready is not None:
                self._set_off(rank, flight)
            flights.append((peer, flight))

        def finish() -> None:  # a send is over when it has arrived; its link was free again before that
            for peer, flight in flights:
                self._await(flight, f"for rank {peer} to receive", record)

        return Pending(finish)

    def _set_off(self, source: int, flight: Flight) -> None:
        """Both ends are known: the message leaves at the later of the two moments."""
        assert flight.sent is not None and flight.ready is not None
        leaves = max(flight.sent, flight.ready)
        if leaves <= self._scheduler.current.clock:
            self._leave(source, flight, leaves)
        else:
            self._scheduler.at(leaves, lambda: self._leave(source, flight, leaves))

    def _leave(self, source: int, flight: Flight, clock: float) -> None:
        assert flight.payload is not None
        size = flight.payload.numel() * flight.payload.element_size()
        flight.arrival = self._links.carry(source, clock, size)
        for task in flight.waiters:
            self._scheduler.wake(task)

    def _await(self, flight: Flight, words: str, record: CallRecord) -> None:
        task = self._scheduler.current
        if flight.arrival is None:
            flight.waiters.append(task)
            self._scheduler.block(lambda: f"{words} in call {record.number}, {record}")
        assert flight.arrival is not None
        task.clock = max(task.clock, flight.arrival)


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
