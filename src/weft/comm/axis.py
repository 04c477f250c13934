"""`Axis`: one mesh axis seen from one rank, and the way to begin a call on it, which is numbered there."""

from __future__ import annotations

import os
import threading
import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NoReturn, TypeVar

import torch

from weft.comm.call import Call, Message, start_beside
from weft.comm.dist import DistWire, process_group_of
from weft.comm.opaque import Opaque
from weft.comm.rounds import gather_metadata
from weft.comm.wire import CallRecord, Pending, SoloWire, Wire, mix
from weft.errors import fault_of

T = TypeVar("T")
Signature = tuple[tuple[str, str], ...]


@dataclass
class CallCounter:
    """Counts the calls of an axis, or of one lane of it. The same on every rank that runs the same program."""

    name: str
    members: Sequence[int]  # ranks on the wire, in the order of the axis
    calls: int = 0
    lanes: int = 0
    agreed: set[str] = field(default_factory=set)
    subsets: dict[tuple[int, ...], CallCounter] = field(default_factory=dict)
    named: dict[str, CallCounter] = field(default_factory=dict)
    cache: dict[object, Any] = field(default_factory=dict)  # what an operation remembers about these ranks
    _signatures: dict[object, tuple[Signature, int]] = field(default_factory=dict)

    def next_record(
        self, operation: str, options: object, fault: Exception | None, integers: int = 0, of: int | None = None
    ) -> CallRecord:
        """Number a call. Its tag mixes number and options, so that ranks who disagree never exchange data.

        In a call that belongs to another one, as a backward to its forward, the number ``of`` that one takes its place:
        ranks may run equal backwards in different orders, but each only ever meets its own.
        """
        self.calls += 1
        key = (operation, options)
        if key not in self._signatures:
            words = () if options is None else tuple((name, _as_text(value)) for name, value in _items(options))
            if len(self._signatures) > 1024:
                self._signatures.clear()
            self._signatures[key] = words, zlib.crc32(repr((self.name, operation, words)).encode())
        words, digest = self._signatures[key]
        reason = None if fault is None else fault_of(fault)
        if of is None:
            return CallRecord(self.name, self.calls, operation, words, mix(digest, self.calls), reason, integers)
        words = (*words, ("of_call", str(of)))
        return CallRecord(self.name, self.calls, operation, words, mix(digest, of), reason, integers)

    def refused_record(self, operation: str, fault: Exception) -> CallRecord:
        """Of a call that is not made: it has the number of the next one, and is not counted."""
        return CallRecord(self.name, self.calls + 1, operation, (), 0, fault_of(fault))

    def lane(self) -> CallCounter:
        """The counter of a lane. What has been agreed on goes in here and comes back when the lane is waited for.

        Those moments have the same place in every rank's program, as a set shared between running threads would not.
        """
        self.lanes += 1
        return CallCounter(f"{self.name}/{self.lanes}", self.members, agreed=set(self.agreed))

    def must_compare(self, operation: str) -> bool:
        """Whether the ranks compare this call before it begins: the first of an operation, or WEFT_CHECK=always."""
        value = os.environ.get("WEFT_CHECK", "first")
        if value not in ("first", "always"):
            raise ValueError(f"WEFT_CHECK={value!r} is not known; use 'first' (the default) or 'always'")
        return value == "always" or operation not in self.agreed


def _items(options: object) -> list[tuple[str, object]]:
    """The fields of frozen options, which are what ranks must have in common."""
    assert is_dataclass(options), "options are a frozen dataclass"
    return [(one.name, getattr(options, one.name)) for one in fields(options) if one.compare]


def _as_text(value: object) -> str:
    if isinstance(value, torch.Size):
        return str(list(value))
    return str(value).removeprefix("torch.")


class Axis(Opaque):
    """One mesh axis seen from one rank: ``rank``, ``size`` and the ways to reach the others.

    Ranks are logical: 0 .. size-1 in the order of the axis, whatever their global numbers are.

    >>> axis = Axis.of(None)          # WORLD, or a world of one where nothing is initialised
    >>> axis.rank, axis.size
    (0, 1)
    """

    __slots__ = ("counter", "members", "rank", "wire")

    def __init__(self, wire: Wire, members: Sequence[int], rank: int, counter: CallCounter) -> None:
        self.wire, self.members, self.rank, self.counter = wire, members, rank, counter

    @property
    def size(self) -> int:
        return len(self.members)

    def __repr__(self) -> str:
        return f"Axis(rank={self.rank}, size={self.size}, {self.counter.name})"

    @staticmethod
    def of(group: Any = None) -> Axis:
        """The axis of a ``ProcessGroup``, a 1-D ``DeviceMesh``, an ``Axis`` (itself) or None (WORLD)."""
        if isinstance(group, Axis):
            return group
        if group is None and (current := getattr(_current, "axis", None)) is not None:
            return current
        group = process_group_of(group)
        if group is None:
            return Axis.over(SoloWire())
        if group not in _axes:
            _axes[group] = Axis.over(DistWire(group), name=f"group {group.group_name}")
        return _axes[group]

    @staticmethod
    def over(wire: Wire, name: str = "world") -> Axis:
        """The axis of all ranks of a wire."""
        members = range(wire.size)
        return Axis(wire, members, wire.rank, CallCounter(name, members))

    def reversed(self) -> Axis:
        """The same ranks in the opposite order."""
        return Axis(self.wire, self.members[::-1], self.size - 1 - self.rank, self.counter)

    def subset(self, ranks: Sequence[int]) -> Axis:
        """The axis of some of the ranks, this one among them, in the order given. Calls are counted apart."""
        if self.rank not in ranks or len(set(ranks)) != len(ranks) or not all(0 <= r < self.size for r in ranks):
            raise ValueError(
                f"Axis.subset: {list(ranks)} must be different ranks of 0..{self.size - 1} with rank {self.rank} "
                f"among them (rank {self.rank})"
            )
        members = tuple(self.members[rank] for rank in ranks)
        subsets = self.counter.subsets
        if members not in subsets:
            subsets[members] = CallCounter(f"{self.counter.name}[{','.join(map(str, members))}]", members)
        return Axis(self.wire, members, list(ranks).index(self.rank), subsets[members])

    def apart(self, name: str) -> Axis:
        """The same ranks, with calls counted apart: they may stand anywhere between the others.

        Where all messages of a group stand in one line (NCCL) they get a line of their own; so all its ranks must ask.
        """
        wire, members = self.wire.apart(name, self.members)
        named = self.counter.named
        if name not in named:
            named[name] = CallCounter(f"{self.counter.name} {name}", members)
        return Axis(wire, members, self.rank, named[name])

    def begin(
        self,
        operation: str,
        options: object = None,
        *,
        metadata: Sequence[int] | None = None,
        metadata_each: Sequence[Sequence[int]] | None = None,
        fault: Exception | None = None,
        of: int | None = None,
    ) -> Call:
        """Number a call of ``operation`` and return it; what is exchanged on it belongs to it.

        ``options`` is a frozen dataclass (shapes, dtypes, options) that must be the same on every rank: it is the
        call's signature. ``fault`` is an error found in this rank's arguments: it is raised here, and with the same
        type and text on the ranks that found none. ``of`` is the number of the call whose backward this is: it is part
        of the signature, so that a backward never meets that of another forward.

        The first call of an operation (with ``WEFT_CHECK=always`` every call) compares the ranks before anything is
        sent. After that:

        - With ``metadata``, a few integers, one small round starts that gathers them, the signatures, and whether a
          rank found a fault. ``call.metadata.wait()`` gives everybody's integers, by rank, or raises what is wrong
          on all ranks alike; the group stays good. ``metadata_each[r]``, as many integers for every rank, goes to
          rank r only and follows the others.
        - Without it nothing is sent. Messages carry the signature in their tag, so a rank that differs gets no answer,
          and whoever waits too long finds out why.
        """
        integers = len(metadata or ()) + (len(metadata_each[0]) if metadata_each else 0)
        record = self.counter.next_record(operation, options, fault, integers, of)
        call = Call(self.wire, self.members, self.rank, self.counter, record)
        if self.size == 1:
            if fault is not None:
                raise fault
            call.metadata = Pending(lambda: [(*(metadata or ()), *(metadata_each[0] if metadata_each else ()))])
            return call
        self.wire.announce(record)
        if self.counter.must_compare(operation):
            self.wire.agree(record, self.counter.members)
            self.counter.agreed.add(operation)
        if metadata is not None:
            call.metadata = gather_metadata(call, metadata, metadata_each)
            if fault is not None:
                call.metadata.wait()
        elif fault is not None:
            self.wire.refuse(record)
        if fault is not None:
            raise fault
        return call

    def refuse(
        self, operation: str, fault: Exception, *, metadata: int | None = None, metadata_each: int = 0
    ) -> NoReturn:
        """Begin a call with a fault of this rank, which is raised here and on all ranks.

        ``metadata`` and ``metadata_each``: how many integers the others gather, if they do. Where that is not known and
        wrong, they wait until they find out why, as in calls without ``metadata``.
        """
        blank = None if metadata is None else [0] * metadata
        each = [[0] * metadata_each] * self.size if metadata_each else None
        self.begin(operation, metadata=blank, metadata_each=each, fault=fault)
        raise AssertionError("a call with a fault does not begin")

    def publish_fault(self, operation: str, fault: Exception) -> None:
        """Leave a fault of something that sends nothing where ranks that wait for this one will find it.

        Nobody is waited for, and no call is counted: it is forgotten when this rank makes its next call.
        """
        if self.size > 1:
            self.wire.refuse(self.counter.refused_record(operation, fault))

    # Messages outside any operation, for programs and tests.

    def exchange(self, sends: Sequence[Message] = (), receives: Sequence[Message] = ()) -> Pending[None]:
        """Start messages to and from several peers at once: see `Call.exchange`."""
        return self._plain().exchange(sends, receives)

    def send(self, tensor: torch.Tensor, to: int) -> Pending[None]:
        return self.exchange(sends=[(to, tensor)])

    def receive(self, buffer: torch.Tensor, source: int) -> Pending[None]:
        return self.exchange(receives=[(source, buffer)])

    def _plain(self) -> Call:
        tag = zlib.crc32(self.counter.name.encode()) >> 1
        record = CallRecord(self.counter.name, 0, "exchange", (), tag)
        return Call(self.wire, self.members, self.rank, self.counter, record)

    def start(self, schedule: Callable[[Axis], T], device: torch.device | str = "cpu") -> Pending[T]:
        """Run ``schedule(axis)`` beside the caller's computation and without gradients; ``wait()`` gives its result.

        The schedule gets an axis of its own, on which it may begin calls.
        """
        counter = self.counter.lane()
        lane = Axis(self.wire, self.members, self.rank, counter)
        pending = start_beside(self.wire, lambda: schedule(lane), torch.device(device), "lane")

        def finish() -> T:
            value = pending.wait()
            self.counter.agreed |= counter.agreed
            return value

        return Pending(finish)


_axes: weakref.WeakKeyDictionary[Any, Axis] = weakref.WeakKeyDictionary()  # of process groups
_current = threading.local()  # .axis: WORLD for a thread that is a rank of a virtual world


def enter_world(axis: Axis) -> None:
    """Make ``axis`` what ``group=None`` means in this thread."""
    _current.axis = axis
