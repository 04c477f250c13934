"""The same step without communication: what was received once is kept, and copied in again at once.

With every message already there, a step does the same local work, on buffers of the same sizes, and waits for nobody.
What a step takes beyond that is what communication costs it, whatever hid it: messages, handshakes, and waiting for
ranks that are late.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from weft.comm import Axis, Pending
from weft.comm.wire import CallRecord, Wire, WireMessage
from weft.parallel.mesh import ParallelMesh
from weft.train.batches import Batch
from weft.train.config import TrainConfig
from weft.train.trainer import Trainer

LIVE, RECORD, REPLAY = "live", "record", "replay"
_Received = dict[tuple[int, int], list[Tensor]]  # by (peer, bytes), in the order in which they are expected


@dataclass
class _Call:
    """The messages of one call: the mode of the step in which it began, copies, and how many of each kind came."""

    mode: str
    received: _Received
    seen: dict[tuple[int, int], int] = field(default_factory=lambda: defaultdict(int))


class Recording:
    """What a rank received in one step, by call. Shared by all its wires.

    A call belongs to the step in which it began, also if it ends in the next, as a prefetch does.
    """

    def __init__(self) -> None:
        self._mode = LIVE
        self._received: dict[tuple[str, int], _Received] = {}
        self._count: dict[str, int] = defaultdict(int)  # calls of this step, by operation
        self._calls: weakref.WeakKeyDictionary[CallRecord, _Call] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()  # lanes receive too

    def begin_step(self, mode: str) -> None:
        """Of a step: `LIVE`; `RECORD`, live and kept; or `REPLAY`: nothing is sent, and a receive gets what it got when
        it was recorded. All ranks must choose alike.
        """
        with self._lock:
            self._mode = mode
            self._count.clear()
            if mode == RECORD:
                self._received = {}

    def begin_call(self, record: CallRecord) -> None:
        """In the mode of this step."""
        with self._lock:
            key = record.operation, self._count[record.operation]
            self._count[record.operation] += 1
            if self._mode == REPLAY and key not in self._received:
                raise RuntimeError(f"replay: a step without messages calls {key[0]} more often than the recorded one")
            received = self._received[key] if self._mode == REPLAY else defaultdict(list)
            if self._mode == RECORD:
                self._received[key] = received
            self._calls[record] = _Call(self._mode, received)

    def copies(self, record: CallRecord, receives: Sequence[WireMessage]) -> tuple[str, list[Tensor]]:
        """The mode of a call, and where these messages of it are kept, by their order among those of their kind."""
        found: list[Tensor] = []
        with self._lock:
            call = self._calls[record]
            for peer, _, buffer in receives if call.mode != LIVE else ():
                kind = peer, buffer.numel() * buffer.element_size()
                kept, at = call.received[kind], call.seen[kind]
                call.seen[kind] += 1
                if call.mode == RECORD:
                    kept.append(buffer.new_empty(buffer.shape))
                if at >= len(kept):
                    raise RuntimeError(
                        f"replay: {record.operation} receives {kind[1]} bytes from rank {peer} {at + 1} times, "
                        f"{len(kept)} times when it was recorded"
                    )
                found.append(kept[at])
        return call.mode, found


class _Expected(Pending[None]):
    """Receives; ``posted`` is what the wire below knows of them, None if it does not."""

    def __init__(self, finish: Callable[[], None], posted: Pending[None] | None) -> None:
        super().__init__(finish)
        self.posted = posted


class ReplayWire:
    """A wire in front of another, with a recording."""

    def __init__(self, below: Wire, recording: Recording) -> None:
        self._below, self._recording = below, recording
        self.rank, self.size, self.host, self.numbers = below.rank, below.size, below.host, below.numbers
        self.start, self.agree, self.refuse, self.clock = below.start, below.agree, below.refuse, below.clock

    def announce(self, record: CallRecord) -> None:
        self._recording.begin_call(record)
        self._below.announce(record)

    def apart(self, name: str, members: Sequence[int]) -> tuple[Wire, Sequence[int]]:
        below, members = self._below.apart(name, members)
        return (self if below is self._below else ReplayWire(below, self._recording)), members

    def expect(self, record: CallRecord, receives: Sequence[WireMessage]) -> _Expected:
        mode, copies = self._recording.copies(record, receives)
        posted = None if mode == REPLAY else self._below.expect(record, receives)

        def finish() -> None:
            if posted is not None:
                posted.wait()
            for copy, (_, _, buffer) in zip(copies, receives, strict=mode != LIVE):
                if mode == RECORD:
                    copy.copy_(buffer)
                else:
                    buffer.copy_(copy.view(buffer.dtype).view(buffer.shape))

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


def with_replay(mesh: ParallelMesh, recording: Recording) -> ParallelMesh:
    """The same mesh, whose messages can be replayed."""
    made: dict[int, Axis] = {}

    def axis_with(axis: Axis) -> Axis:
        if id(axis) not in made:
            made[id(axis)] = Axis(ReplayWire(axis.wire, recording), axis.members, axis.rank, axis.counter)
        return made[id(axis)]

    return ParallelMesh(
        axis_with(mesh.data), axis_with(mesh.context), axis_with(mesh.tensor), axis_with(mesh.tokens),
        axis_with(mesh.world), mesh.device_mesh,
    )  # fmt: skip


class _OneBatch:
    """The same batch again and again."""

    position = 0

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def __next__(self) -> Batch:
        return self._batch

    peek = __next__

    def close(self) -> None:
        pass


class ReplayTrainer(Trainer):
    """A trainer whose steps, all on one batch, can be taken without communication: see `Recording.begin_step`."""

    def __init__(self, config: TrainConfig, mesh: ParallelMesh) -> None:
        self.recording = Recording()
        # Ranks compare their rates, and what was received must be right again: they stay the same.
        super().__init__(replace(config, warmup=0, lr_end=1.0), with_replay(mesh, self.recording))
        batches: Any = self._batches
        self._batches: Any = _OneBatch(next(batches))
        batches.close()

    def record_step(self) -> None:
        """A step that can then be replayed, and one more: what began in the recorded step ends in the next."""
        for mode in (RECORD, LIVE):
            self.recording.begin_step(mode)
            self.take_step()
