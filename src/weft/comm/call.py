"""`Call`: what an operation holds while it runs. Every message of the operation goes through it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from weft.comm import ledger
from weft.comm.device import stream_number, use_here
from weft.comm.wire import CallRecord, Pending, Wire, WireMessage

if TYPE_CHECKING:
    from weft.comm.axis import CallCounter

T = TypeVar("T")
Message = tuple[int, Tensor]  # (rank on the axis, contiguous tensor to send or to fill)


class _Thread(threading.local):
    is_beside = False  # it runs a lane: while it waits, the main line does not stand


_thread = _Thread()


def is_recording() -> bool:
    """Whether any ledger would take an event of this thread."""
    return bool(ledger.opened) or ledger.here.own is not None


class Expected:
    """Messages this rank will receive in a call. ``wait()`` returns when they are there."""

    __slots__ = ("event", "from_self", "messages", "pending")

    def __init__(self, messages: list[WireMessage], from_self: list[Tensor], pending: Pending[None]) -> None:
        self.messages, self.from_self, self.pending = messages, from_self, pending
        self.event: ledger.Event | None = None

    def wait(self) -> None:
        self.pending.wait()
        if self.event is not None:
            self.event.receive()


class Call:
    """One call of an operation on an axis. ``metadata`` is the round of integers, where `Axis.begin` started one.

    Ranks are those of the axis. Sums over ranks are in rank order and at least in fp32: same inputs, same bits.
    """

    __slots__ = ("_in_lane", "counter", "members", "metadata", "rank", "record", "wire")

    def __init__(self, wire: Wire, members: Sequence[int], rank: int, counter: CallCounter, record: CallRecord) -> None:
        self.wire, self.members, self.rank, self.counter, self.record = wire, members, rank, counter, record
        self.metadata: Pending[list[tuple[int, ...]]] = Pending(list)
        self._in_lane = False

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def number(self) -> int:
        """Among the calls of the axis: what its backward is known by."""
        return self.record.number

    @property
    def others(self) -> list[int]:
        """Every rank but this one."""
        return [rank for rank in range(self.size) if rank != self.rank]

    def reversed(self) -> Call:
        """The same call with the ranks in the opposite order."""
        return Call(self.wire, self.members[::-1], self.size - 1 - self.rank, self.counter, self.record)

    def among(self, ranks: Sequence[int]) -> Call:
        """The same call among some of its ranks, this one among them, who are numbered in the order given."""
        members = [self.members[rank] for rank in ranks]
        return Call(self.wire, members, ranks.index(self.rank), self.counter, self.record)

    def expect(self, receives: Sequence[Message]) -> Expected:
        """Say early what will be received: (rank, contiguous tensor to fill). Hand it to `exchange` in its round.

        Do not touch the tensors before they have been waited for. Empty tensors do not travel.
        """
        members, tag, own = self.members, self.record.tag, self.rank
        incoming = [(members[at], tag, tensor) for at, tensor in receives if at != own and tensor.numel()]
        from_self = [tensor for at, tensor in receives if at == own]
        return Expected(incoming, from_self, self.wire.expect(self.record, incoming))

    def exchange(self, sends: Sequence[Message] = (), receives: Sequence[Message] | Expected = ()) -> Pending[None]:
        """Start messages to and from several peers at once: (rank, contiguous tensor to send or to fill).

        Do not touch the tensors before ``wait()`` has returned. Empty tensors do not travel. What a rank sends to
        itself must be received in the same exchange; it is copied here.
        """
        expected = receives if isinstance(receives, Expected) else self.expect(receives)
        members, tag, own = self.members, self.record.tag, self.rank
        outgoing = [(members[to], tag, tensor) for to, tensor in sends if to != own and tensor.numel()]
        to_self = [tensor for to, tensor in sends if to == own]
        for source, target in zip(to_self, expected.from_self, strict=True):
            target.copy_(source.view(target.shape))
        if not is_recording():
            return self.wire.exchange(self.record, outgoing, expected.pending)
        expected.event = self._enter(self.record.operation, outgoing, expected.messages)
        return self._recorded(self.wire.exchange(self.record, outgoing, expected.pending), expected.event)

    def exchange_on_host(self, tag: int, sends: Sequence[Message], receives: Sequence[Message]) -> Pending[None]:
        """An exchange of integers that the host reads, under a tag of its own."""
        outgoing = [(self.members[to], tag, tensor) for to, tensor in sends if tensor.numel()]
        incoming = [(self.members[at], tag, tensor) for at, tensor in receives if tensor.numel()]
        if not is_recording():
            return self.wire.exchange_on_host(self.record, outgoing, incoming)
        event = self._enter(f"{self.record.operation}.metadata", outgoing, incoming)
        return self._recorded(self.wire.exchange_on_host(self.record, outgoing, incoming), event)

    def _enter(self, operation: str, sends: Sequence[WireMessage], receives: Sequence[WireMessage]) -> ledger.Event:
        event = ledger.Event(
            operation=operation,
            rank=self.wire.rank,
            sends=tuple((peer, tensor.numel() * tensor.element_size()) for peer, _, tensor in sends),
            receives=tuple((peer, tensor.numel() * tensor.element_size()) for peer, _, tensor in receives),
            start=self.wire.clock(),
            # Lanes come and go; those of one operation share a row of a trace.
            lane=f"{self.counter.name.partition('/')[0]} lane: {self.record.operation}" if self.in_lane
            else self.counter.name,
            tag=next((tag for _, tag, _ in (*sends, *receives)), 0),
        )  # fmt: skip
        ledger.note(event)
        return event

    def _recorded(self, pending: Pending[None], event: ledger.Event) -> Pending[None]:
        def finish() -> None:
            start = self.wire.clock()
            pending.wait()
            event.finish(self.wire.clock())
            event.waited += (event.end or start) - start
            event.beside = _thread.is_beside

        return Pending(finish)

    @property
    def in_lane(self) -> bool:
        """Whether this runs beside the main line."""
        return self._in_lane or "/" in self.counter.name

    def send(self, tensor: Tensor, to: int) -> Pending[None]:
        return self.exchange(sends=[(to, tensor)])

    def receive(self, buffer: Tensor, source: int) -> Pending[None]:
        return self.exchange(receives=[(source, buffer)])

    def all_gather(self, mine: Tensor, rows: Sequence[int] | None = None) -> Pending[list[Tensor]]:
        """Everybody's ``mine``, by rank; the own one is not copied. ``rows``: its length on each rank, if uneven."""
        return self.all_to_all([mine] * self.size, rows)

    def all_to_all(
        self, outgoing: Sequence[Tensor], rows: Sequence[int] | None = None, into: Tensor | None = None
    ) -> Pending[list[Tensor]]:
        """``outgoing[r]`` to rank r; what every rank sent here, by rank. The own one is not copied.

        ``rows``: how many rows each rank sends here; if left out, as many as ``outgoing`` has for this rank. ``into``:
        memory for all of them, one after the other; then the own ones are copied there.
        """
        mine = outgoing[self.rank].contiguous()
        counts = [len(mine)] * self.size if rows is None else rows
        if into is None:
            parts = [
                mine if rank == self.rank else mine.new_empty(counts[rank], *mine.shape[1:])
                for rank in range(self.size)
            ]
        else:
            parts = list(into.split(list(counts)))
            parts[self.rank].copy_(mine)
        sends = [(rank, outgoing[rank].contiguous()) for rank in self.others]
        pending = self.exchange(sends, [(rank, parts[rank]) for rank in self.others])

        def finish() -> list[Tensor]:
            pending.wait()
            return parts

        return Pending(finish)

    def sum_to_owners(self, outgoing: Sequence[Tensor]) -> Pending[Tensor]:
        """``outgoing[r]`` to rank r, where all that arrive are summed in rank order, at least in fp32."""
        coming = self.all_to_all(outgoing)

        def finish() -> Tensor:
            parts = coming.wait()
            total = parts[0].to(torch.promote_types(parts[0].dtype, torch.float32), copy=True)
            for part in parts[1:]:
                total += part
            return total

        return Pending(finish)

    def start(
        self, schedule: Callable[[Call], T], device: torch.device | str = "cpu", buffers: Sequence[Tensor] = ()
    ) -> Pending[T]:
        """Run ``schedule(call)`` beside the caller's computation and without gradients; ``wait()`` gives its result.

        ``buffers``: tensors of the caller's that it reads or fills. They are kept until the caller has waited.
        """
        lane = Call(self.wire, self.members, self.rank, self.counter, self.record)
        lane._in_lane = True
        return start_beside(self.wire, lambda: schedule(lane), torch.device(device), self.record.operation, buffers)


def start_beside(
    wire: Wire, schedule: Callable[[], T], device: torch.device, operation: str, buffers: Sequence[Tensor] = ()
) -> Pending[T]:
    """Start a lane. How long the main line stands waiting for it is entered in the ledgers that are open then."""

    def run() -> T:
        before, _thread.is_beside = _thread.is_beside, True
        try:
            return schedule()
        finally:
            _thread.is_beside = before

    pending = wire.start(run, device, operation, buffers)

    def finish() -> T:
        start = wire.clock()
        value = pending.wait()
        if is_recording() and not _thread.is_beside:
            ledger.note_standing(operation, start, wire.clock())
        return value

    return Pending(finish)


def exchange_coalesced(
    call: Call, sends: Sequence[tuple[int, Sequence[Tensor]]], receives: Sequence[tuple[int, Sequence[Tensor]]]
) -> Pending[None]:
    """`Call.exchange` for lists of tensors, (rank, contiguous tensors to send or to fill): one message for each."""
    buffers = [(rank, empty_coalesced(tensors)) for rank, tensors in receives]
    packed = [(rank, coalesce(tensors)) for rank, tensors in sends]
    pending = call.exchange(packed, buffers)
    made = [tensor for _, tensor in (*packed, *buffers)] + [tensor for _, some in receives for tensor in some]
    stream = stream_number(made[0].device) if made else 0

    def finish() -> None:
        pending.wait()
        use_here(made, stream)  # gradients may leave on the stream of a backward, and be waited for on another
        for (_, buffer), (_, tensors) in zip(buffers, receives, strict=True):
            split_coalesced(buffer, tensors)

    return Pending(finish)


def coalesce(tensors: Sequence[Tensor]) -> Tensor:
    """Contiguous tensors as one message: few messages on any network, one for each peer and direction on NCCL.

    One tensor travels as it is, without a copy.
    """
    return tensors[0] if len(tensors) == 1 else torch.cat([as_bytes(tensor) for tensor in tensors])


def empty_coalesced(tensors: Sequence[Tensor]) -> Tensor:
    """The buffer that receives a message of `coalesce` for these tensors: the tensor itself, if it is one."""
    if len(tensors) == 1:
        return tensors[0]
    return tensors[0].new_empty(sum(tensor.numel() * tensor.element_size() for tensor in tensors), dtype=torch.uint8)


def split_coalesced(buffer: Tensor, tensors: Sequence[Tensor]) -> None:
    """Fill the tensors from the buffer that `empty_coalesced` made for them."""
    if len(tensors) > 1:
        pieces = buffer.split([tensor.numel() * tensor.element_size() for tensor in tensors])
        for piece, tensor in zip(pieces, tensors, strict=True):
            as_bytes(tensor).copy_(piece)


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor. One of a single element may have any stride, which no view of bytes may."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
