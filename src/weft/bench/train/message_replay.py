"""The same step without communication: what was received once is kept, and handed out again at once.

With every message already there, a step does the same local work, on buffers of the same sizes, and waits for nobody.
What a step takes beyond that is what communication costs it, whatever hid it: messages, handshakes, and waiting for
ranks that are late.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from weft.comm import Axis, Pending
from weft.comm.wire import Wire, WireMessage
from weft.errors import CallRecord
from weft.parallel.mesh import ParallelMesh

T = TypeVar("T")
_Kind = tuple[int, int]  # (peer, bytes): what a call receives of one kind is told apart by its order


@dataclass
class _Scene:
    """The messages of one call: how they are to be treated, and what was received of each kind."""

    mode: str
    kept: dict[_Kind, list[Tensor | None]]
    seen: dict[_Kind, int] = field(default_factory=lambda: defaultdict(int))


class Tape:
    """What a rank received in one step, by call. Shared by all its wires.

    A call belongs to the step in which it began, also if it ends in the next, as a prefetch does.
    """

    def __init__(self) -> None:
        self._mode = "through"
        self._kept: dict[tuple[str, int], dict[_Kind, list[Tensor | None]]] = {}
        self._calls: dict[str, int] = defaultdict(int)  # of this step, by operation
        self._scenes: weakref.WeakKeyDictionary[CallRecord, _Scene] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()  # lanes receive too

    def wind(self, mode: str) -> None:
        """Begin a step: "through" to the ranks, "recording" it besides, or "playing": nothing is sent, and a receive
        is given what it got when it was recorded. All ranks must be told alike.
        """
        with self._lock:
            self._mode = mode
            self._calls.clear()
            if mode == "recording":
                self._kept = {}

    def begin(self, record: CallRecord) -> None:
        """A call."""
        with self._lock:
            key = record.operation, self._calls[record.operation]
            self._calls[record.operation] += 1
            if self._mode == "playing" and key not in self._kept:
                raise RuntimeError(f"replay: a step without messages calls {key[0]} more often than the recorded one")
            kept = self._kept[key] if self._mode == "playing" else defaultdict(list)
            if self._mode == "recording":
                self._kept[key] = kept
            self._scenes[record] = _Scene(self._mode, kept)

    def mode(self, record: CallRecord) -> str:
        """How the messages of a call are treated."""
        with self._lock:
            return self._scenes[record].mode

    def places(self, record: CallRecord, receives: Sequence[WireMessage]) -> list[tuple[list[Tensor | None], int]]:
        """Where these messages are kept, by their order among those of their kind."""
        found = []
        with self._lock:
            scene = self._scenes[record]
            for peer, _, buffer in receives:
                kind = peer, buffer.numel() * buffer.element_size()
                kept, at = scene.kept[kind], scene.seen[kind]
                scene.seen[kind] += 1
                if scene.mode == "recording":
                    kept.append(None)
                if at >= len(kept):
                    raise RuntimeError(
                        f"replay: {record.operation} receives {kind[1]} bytes from rank {peer} {at + 1} times, "
                        f"{len(kept)} times when it was recorded"
                    )
                found.append((kept, at))
        return found


def _keep(places: Sequence[tuple[list[Tensor | None], int]], receives: Sequence[WireMessage]) -> None:
    for (kept, at), (_, _, buffer) in zip(places, receives, strict=True):
        kept[at] = buffer.clone()


def _give(places: Sequence[tuple[list[Tensor | None], int]], receives: Sequence[WireMessage]) -> None:
    for (kept, at), (_, _, buffer) in zip(places, receives, strict=True):
        value = kept[at]
        assert value is not None, "it was waited for before it is played"
        buffer.copy_(value.view(buffer.dtype).view(buffer.shape))


class _Expected(Pending[None]):
    """Receives; ``posted`` is what the wire below knows of them, None if it does not."""

    def __init__(self, finish: Callable[[], None], posted: Pending[None] | None) -> None:
        super().__init__(finish)
        self.posted = posted


class ReplayWire:
    """A wire in front of another, with a tape."""

    def __init__(self, below: Wire, tape: Tape) -> None:
        self._below, self._tape = below, tape
        self.rank, self.size, self.host = below.rank, below.size, below.host

    @property
    def numbers(self) -> Sequence[int]:
        """Of the wire below."""
        return self._below.numbers

    @property
    def group(self) -> Any:
        """The process group, for what torch does with it."""
        below: Any = self._below
        return below.group

    def expect(self, record: CallRecord, receives: Sequence[WireMessage]) -> _Expected:
        mode = self._tape.mode(record)
        if mode == "playing":
            places = self._tape.places(record, receives)
            return _Expected(lambda: _give(places, receives), None)
        posted = self._below.expect(record, receives)
        if mode == "through":
            return _Expected(posted.wait, posted)
        places = self._tape.places(record, receives)

        def finish() -> None:
            posted.wait()
            _keep(places, receives)

        return _Expected(finish, posted)

    def exchange(self, record: CallRecord, sends: Sequence[WireMessage], expected: Any) -> Pending[None]:
        if expected.posted is None:
            return Pending(expected.wait)
        pending = self._below.exchange(record, sends, expected.posted)

        def finish() -> None:
            pending.wait()
            expected.wait()

        return Pending(finish)

    def exchange_on_host(
        self, record: CallRecord, sends: Sequence[WireMessage], receives: Sequence[WireMessage]
    ) -> Pending[None]:
        return self.exchange(record, sends, self.expect(record, receives))

    def start(self, schedule: Callable[[], T], device: torch.device) -> Pending[T]:
        return self._below.start(schedule, device)

    def agree(self, record: CallRecord, members: Sequence[int]) -> None:
        self._below.agree(record, members)

    def announce(self, record: CallRecord) -> None:
        self._tape.begin(record)
        self._below.announce(record)

    def refuse(self, record: CallRecord) -> None:
        self._below.refuse(record)

    def clock(self) -> float:
        return self._below.clock()


def with_replay(mesh: ParallelMesh, tape: Tape) -> ParallelMesh:
    """The same mesh, whose messages can be replayed."""
    made: dict[int, Axis] = {}

    def axis_with(axis: Axis) -> Axis:
        if id(axis) not in made:
            made[id(axis)] = Axis(ReplayWire(axis.wire, tape), axis.members, axis.rank, axis.counter)
        return made[id(axis)]

    return ParallelMesh(
        axis_with(mesh.data), axis_with(mesh.context), axis_with(mesh.tensor), axis_with(mesh.tokens),
        axis_with(mesh.world), mesh.device_mesh,
    )  # fmt: skip
