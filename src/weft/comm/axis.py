"""`Axis`: one mesh axis seen from one rank, and the numbering of the calls made on it."""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import torch

from weft.comm import ledger
from weft.comm.wire import Message as WireMessage
from weft.comm.wire import Pending, Wire
from weft.errors import REFUSED, Call

T = TypeVar("T")
Message = tuple[int, torch.Tensor]  # (rank on the axis, contiguous tensor to send or to fill)


@dataclass
class Space:
    """Where calls are counted: an axis, or one lane of it. The same on every rank that runs the same program."""

    name: str
    members: Sequence[int]  # ranks on the wire, in the order of the axis
    calls: int = 0
    lanes: int = 0
    agreed: set[str] = field(default_factory=set)
    digests: dict[object, tuple[tuple[tuple[str, str], ...], int]] = field(default_factory=dict)
    subsets: dict[tuple[int, ...], Space] = field(default_factory=dict)
    notes: dict[object, Any] = field(default_factory=dict)  # what an operation remembers about these ranks

    def next_call(self, operation: str, facts: dict[str, object]) -> Call:
        """Number a call. Its tag mixes number and facts, so that ranks who disagree never exchange data."""
        self.calls += 1
        key = (operation, *facts.items())
        if key not in self.digests:
            words = tuple((name, _as_text(value)) for name, value in facts.items())
            if len(self.digests) > 1024:
                self.digests.clear()
            self.digests[key] = words, zlib.crc32(repr((self.name, operation, words)).encode())
        words, digest = self.digests[key]
        return Call(self.name, self.calls, operation, words, (digest + 0x9E3779B1 * self.calls) & 0x7FFFFFFF)


def _as_text(value: object) -> str:
    if isinstance(value, torch.Size):
        return str(list(value))
    return str(value).removeprefix("torch.")


class Axis:
    """One mesh axis seen from one rank: ``rank``, ``size`` and the ways to reach the others.

    Ranks are logical: 0 .. size-1 in the order of the axis, whatever their global numbers are.

    >>> axis = Axis.of(None)          # WORLD, or a world of one where nothing is initialised
    >>> axis.rank, axis.size
    (0, 1)
    """

    __slots__ = ("call", "members", "places", "rank", "space", "wire")

    def __init__(
        self,
        wire: Wire,
        members: Sequence[int],
        rank: int,
        space: Space,
        call: Call | None = None,
        places: Sequence[int] | None = None,
    ) -> None:
        self.wire, self.members, self.rank, self.space = wire, members, rank, space
        self.call, self.places = call, places

    @property
    def size(self) -> int:
        return len(self.members)

    def __repr__(self) -> str:
        return f"Axis(rank={self.rank}, size={self.size}, {self.space.name})"

    @staticmethod
    def of(group: Any = None) -> Axis:
        """The axis of a ``ProcessGroup``, a 1-D ``DeviceMesh``, an ``Axis`` (itself) or None (WORLD)."""
        if isinstance(group, Axis):
            return group
        if group is None and (current := getattr(_current, "axis", None)) is not None:
            return current
        from weft.comm.dist import axis_of  # it builds axes, so it cannot be imported first

        return axis_of(group)

    @staticmethod
    def over(wire: Wire, name: str = "world") -> Axis:
        """The axis of all ranks of a wire."""
        members = range(wire.size)
        return Axis(wire, members, wire.rank, Space(name, members))

    def reversed(self) -> Axis:
        """The same ranks in the opposite order: a suffix scan is the prefix schedule on this axis."""
        places = None if self.places is None else self.places[::-1]
        return Axis(self.wire, self.members[::-1], self.size - 1 - self.rank, self.space, self.call, places)

    def path(self, stops: Sequence[int], places: Sequence[int], position: int) -> Axis:
        """The axis of a path through ranks ``stops`` that passes this one at ``position``, within this call.

        A rank may occur several times (a zigzag layout passes every rank twice); it then runs the schedule once
        for each, on lanes of their own. ``places`` names the stops, so that messages of two paths, or of
        two places on the same ranks, never mix.
        """
        assert self.call is not None and stops[position] == self.rank
        return Axis(self.wire, [self.members[s] for s in stops], position, self.space, self.call, places)

    def subset(self, ranks: Sequence[int]) -> Axis:
        """The axis of some of the ranks, this one among them, in the order given. Calls are counted apart."""
        if self.rank not in ranks or len(set(ranks)) != len(ranks) or not all(0 <= r < self.size for r in ranks):
            raise ValueError(
                f"Axis.subset: {list(ranks)} must be different ranks of 0..{self.size - 1} with rank {self.rank} "
                f"among them (rank {self.rank})"
            )
        members = tuple(self.members[rank] for rank in ranks)
        if members not in self.space.subsets:
            self.space.subsets[members] = Space(f"{self.space.name}[{','.join(map(str, members))}]", members)
        return Axis(self.wire, members, list(ranks).index(self.rank), self.space.subsets[members])

    def begin(self, operation: str, **facts: object) -> Axis:
        """Number a call of ``operation``; exchanges on the axis returned belong to it.

        ``facts`` (shapes, dtypes, options) must be the same on every rank. The first call of an operation
        (with ``WEFT_CHECK=always`` every call) asks the other ranks and raises the same
        `DisagreementError` on all of them. Later calls send nothing: their messages carry the facts in
        their tag, so a rank that differs gets no answer, and whoever waits too long finds out why.
        """
        call = self.space.next_call(operation, facts)
        if self.size > 1:
            self.wire.announce(call, self.space.members)
            if _checks_always() or operation not in self.space.agreed:
                self.wire.agree(call, self.space.members)
                self.space.agreed.add(operation)
        return Axis(self.wire, self.members, self.rank, self.space, call)

    def refuse(self, operation: str, error: Exception) -> NoReturn:
        """Raise ``error``, found in this rank's arguments, in place of a call: on this rank and on the others.

        Before the first agreed call everybody raises at once; later the others raise when they have waited.
        """
        call = self.space.next_call(operation, {REFUSED: error})
        if self.size > 1:
            self.wire.announce(call, self.space.members)
            if _checks_always() or operation not in self.space.agreed:
                self.wire.agree(call, self.space.members)
            else:
                self.wire.refuse(call)
        raise error

    def exchange(self, sends: Sequence[Message] = (), receives: Sequence[Message] = ()) -> Pending[None]:
        """Start messages to and from several peers at once: (rank, contiguous tensor to send or to fill).

        Do not touch the tensors before ``wait()`` has returned. Empty tensors do not travel.
        """
        call = self.call or Call(self.space.name, 0, "exchange", (), zlib.crc32(self.space.name.encode()) >> 1)
        members, rank = self.members, self.rank
        if self.places is None:
            outgoing = [(members[to], call.tag, tensor) for to, tensor in sends if tensor.numel()]
            incoming = [(members[at], call.tag, tensor) for at, tensor in receives if tensor.numel()]
        else:
            outgoing = [(members[to], self._tag(call, rank, to), tensor) for to, tensor in sends if tensor.numel()]
            incoming = [(members[at], self._tag(call, at, rank), tensor) for at, tensor in receives if tensor.numel()]
        if not ledger.is_recording():
            return self.wire.exchange(call, outgoing, incoming)
        event = ledger.Event(
            operation=call.operation,
            rank=self.wire.rank,
            sends=self._sizes(outgoing),
            receives=self._sizes(incoming),
            start=self.wire.clock(),
            lane=self.space.name,
            tag=call.tag,
        )
        ledger.note(event)
        pending = self.wire.exchange(call, outgoing, incoming)

        def finish() -> None:
            pending.wait()
            event.finish(self.wire.clock())

        return Pending(finish)

    def _tag(self, call: Call, source: int, to: int) -> int:
        """On a path, where two ranks may meet at several places, the places are part of the tag."""
        assert self.places is not None
        return (call.tag + 0x632BE5AB * ((self.places[source] << 16) + self.places[to] + 1)) & 0x7FFFFFFF

    def _sizes(self, messages: Sequence[WireMessage]) -> tuple[tuple[int, int], ...]:
        """(peer, bytes) for the ledger; what a rank hands to itself does not travel."""
        return tuple(
            (peer, tensor.numel() * tensor.element_size()) for peer, _, tensor in messages if peer != self.wire.rank
        )

    def send(self, tensor: torch.Tensor, to: int) -> Pending[None]:
        return self.exchange(sends=[(to, tensor)])

    def receive(self, buffer: torch.Tensor, source: int) -> Pending[None]:
        return self.exchange(receives=[(source, buffer)])

    def start(self, schedule: Callable[[Axis], T], device: torch.device | str = "cpu") -> Pending[T]:
        """Run ``schedule(axis)`` beside the caller's computation and without gradients; ``wait()`` gives its result.

        The schedule gets an axis of its own, on which it may begin calls or go on with this one.
        """
        self.space.lanes += 1
        # What has been agreed on goes in at the start and comes back at the wait: moments that have the same
        # place in every rank's program, as a set shared between running threads would not.
        lane = Space(f"{self.space.name}/{self.space.lanes}", self.space.members, agreed=set(self.space.agreed))
        axis = Axis(self.wire, self.members, self.rank, lane, self.call, self.places)
        pending = self.wire.start(lambda: schedule(axis), torch.device(device))

        def finish() -> T:
            value = pending.wait()
            self.space.agreed |= lane.agreed
            return value

        return Pending(finish)


def _checks_always() -> bool:
    value = os.environ.get("WEFT_CHECK", "first")
    if value not in ("first", "always"):
        raise ValueError(f"WEFT_CHECK={value!r} is not known; use 'first' (the default) or 'always'")
    return value == "always"


_current = threading.local()  # .axis: WORLD for a thread that is a rank of a virtual world


def enter_world(axis: Axis) -> None:
    """Make ``axis`` what ``group=None`` means in this thread."""
    _current.axis = axis
