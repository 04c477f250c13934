"""What an axis talks through: the few verbs that every kind of world implements, and what their wires share.

A wire knows each call by its record, which the ranks compare: its number, the signature its options give, its fault.

A lane is where a multi-round schedule runs while the main computation goes on: on a CPU a background thread, on a
device that runs behind the host a side stream (`comm/device.py`), in a virtual world a forked clock.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from torch import Tensor

from weft.errors import Fault, error_of, name_ranks

T = TypeVar("T")
# (peer's rank on the wire, tag, contiguous tensor to send or to fill)
WireMessage = tuple[int, int, Tensor]


@dataclass(frozen=True)
class CallRecord:
    """One call of an operation on an axis: what every rank of the axis must have in common.

    ``number`` counts the calls on ``counter`` (an axis, or one lane of it); ``signature`` are the shapes, dtypes
    and options as text. ``tag`` goes on the wire with every message of the call, so that messages of different
    calls never meet. ``fault`` is the error this rank found in its arguments, if it could not make the call.
    ``integers``: how many of them the ranks gather as metadata at its beginning.
    """

    counter: str
    number: int
    operation: str
    signature: tuple[tuple[str, str], ...]
    tag: int
    fault: Fault | None = None
    integers: int = 0

    def __str__(self) -> str:
        return f"{self.operation}({', '.join(f'{name}={value}' for name, value in self.signature)})"

    @property
    def place(self) -> str:
        """Where in a program it stands, for messages."""
        return f"call {self.number}, {self.operation}"

    def agrees_with(self, other: CallRecord) -> bool:
        return (self.operation, self.signature, self.fault) == (other.operation, other.signature, other.fault)


class Pending(Generic[T]):
    """Something under way. ``wait()`` ends it and gives its value, or raises; a second ``wait()`` does so again.

    >>> Pending(lambda: 3).wait()
    3
    """

    def __init__(self, finish: Callable[[], T]) -> None:
        self._finish: Callable[[], T] | None = finish
        self._value: T | None = None
        self._error: BaseException | None = None

    def wait(self) -> T:
        if self._finish is not None:
            finish, self._finish = self._finish, None
            try:
                self._value = finish()
            except BaseException as error:
                self._error = error
                raise
        if self._error is not None:
            raise self._error
        return cast(T, self._value)


def without_gradients() -> Any:
    """The context of a lane that the caller starts now: in inference mode, if the caller is, as its tensors are."""
    return torch.inference_mode() if torch.is_inference_mode_enabled() else torch.no_grad()


class ThreadLanes:
    """Background threads, as many as there are schedules under way, side by side.

    They are daemons, unlike those of an executor: a schedule that is stuck does not keep the process from ending.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)

    def start(self, schedule: Callable[[], T]) -> Pending[T]:
        future: Future[T] = Future()
        context = without_gradients()

        def job() -> None:
            try:
                with context:
                    future.set_result(schedule())
            except BaseException as error:  # raised in the caller, who waits for it
                future.set_exception(error)

        if not self._idle.acquire(blocking=False):
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        self._jobs.put(job)
        return Pending(future.result)  # ends: every wait inside the schedule has the group's timeout

    def _work(self) -> None:
        while True:
            self._jobs.get()()
            self._idle.release()


class Wire(Protocol):
    """One rank's end of a world. Ranks are positions in the world (or in its process group)."""

    rank: int
    size: int
    host: torch.device  # where integers lie that the host sends and reads

    @property
    def numbers(self) -> Sequence[int]:
        """Of its ranks in the whole world, of which a process group may be a part."""
        ...

    def expect(self, record: CallRecord, receives: Sequence[WireMessage]) -> Pending[None]:
        """Say what will be received; ``wait()`` returns when it is there. What this returns goes into `exchange`.

        The wire decides when to post it: at once where a receive may wait for its message beside others (Gloo), with
        the exchange where all messages stand in one line (NCCL).
        """
        ...

    def exchange(self, record: CallRecord, sends: Sequence[WireMessage], expected: Pending[None]) -> Pending[None]:
        """Start these messages; ``wait()`` returns when all have been sent and what was expected is there.

        A message meets the one with the same peer and tag on the other side, in order. A wire never carries messages
        of a rank to itself.
        """
        ...

    def exchange_on_host(
        self, record: CallRecord, sends: Sequence[WireMessage], receives: Sequence[WireMessage]
    ) -> Pending[None]:
        """The same for integers the host reads: on its CPU side where a world has one."""
        ...

    def start(
        self, schedule: Callable[[], T], device: torch.device, operation: str, buffers: Sequence[Tensor]
    ) -> Pending[T]:
        """Run ``schedule`` beside the caller's computation: on a lane, one of its own for each operation.

        ``buffers``: memory of the caller's that it uses. It is the lane's until the caller has been ordered after it.
        """
        ...

    def apart(self, name: str, members: Sequence[int]) -> tuple[Wire, Sequence[int]]:
        """A wire for messages of these ranks that stand in no order with the others, and their ranks on it."""
        ...

    def agree(self, record: CallRecord, members: Sequence[int]) -> None:
        """Raise the same error on every one of ``members`` unless all make this same call without a fault."""
        ...

    def announce(self, record: CallRecord) -> None:
        """Note locally that this rank makes this call, for the error if it ever gets stuck."""
        ...

    def refuse(self, record: CallRecord) -> None:
        """Publish, for those who will wait for it, that this rank could not make this call."""
        ...

    def clock(self) -> float:
        """Seconds, for the ledger."""
        ...


class SoloWire:
    """The wire of a world of one: nothing is ever sent on it."""

    rank = 0
    size = 1
    host = torch.device("cpu")
    numbers = (0,)

    def expect(self, record: CallRecord, receives: Sequence[WireMessage]) -> Pending[None]:
        assert not receives, "a world of one receives nothing"
        return Pending(lambda: None)

    def exchange(self, record: CallRecord, sends: Sequence[WireMessage], expected: Any) -> Pending[None]:
        assert not sends, "a world of one sends nothing"
        return Pending(lambda: None)

    def exchange_on_host(self, record: CallRecord, sends: Any, receives: Any) -> Pending[None]:
        return self.exchange(record, sends, None)

    def start(
        self, schedule: Callable[[], T], device: torch.device, operation: str, buffers: Sequence[Tensor]
    ) -> Pending[T]:
        value = schedule()
        return Pending(lambda: value)

    def apart(self, name: str, members: Sequence[int]) -> tuple[Wire, Sequence[int]]:
        return self, members

    def agree(self, record: CallRecord, members: Sequence[int]) -> None:
        if record.fault is not None:
            raise error_of(record.fault)

    def announce(self, record: CallRecord) -> None:
        pass

    def refuse(self, record: CallRecord) -> None:
        pass

    def clock(self) -> float:
        return time.perf_counter()


def diagnose(records: Mapping[int, CallRecord], size: int) -> Fault | None:
    """What is wrong with the same call on several ranks: the first rank's fault, else a disagreement, else None.

    ``records`` maps a rank to its call; one that has not published any is absent.
    """
    for rank in sorted(records):
        if (fault := records[rank].fault) is not None:
            return fault
    distinct: list[tuple[CallRecord, list[int]]] = []
    for rank in sorted(records):
        for record, ranks in distinct:
            if record.agrees_with(records[rank]):
                ranks.append(rank)
                break
        else:
            distinct.append((records[rank], [rank]))
    if len(distinct) < 2:
        return None
    first = distinct[0][0]
    same_operation = all(record.operation == first.operation for record, _ in distinct)
    shown = []
    for record, ranks in distinct:
        words = ", ".join(
            f"{name}={value}"
            for name, value in record.signature
            if not same_operation or any(dict(other.signature).get(name) != value for other, _ in distinct)
        )
        shown.append(f"{name_ranks(ranks)} called {record.operation}({words})")
    silent = [rank for rank in range(size) if rank not in records]
    missing = f"; no word from {name_ranks(silent)}" if silent else ""
    return (
        "DisagreementError",
        f"{first.operation}: the ranks disagree at call {first.number}: {'; '.join(shown)}{missing}; "
        f"every rank must make the same call with the same shapes, dtypes and options",
    )


def dump_records(records: Sequence[CallRecord]) -> str:
    """Records as text that other ranks can load."""
    return json.dumps([[r.counter, r.number, r.operation, r.signature, r.tag, r.fault, r.integers] for r in records])


def load_records(text: bytes | str) -> list[CallRecord]:
    """What `dump_records` has written."""
    return [
        CallRecord(
            counter, number, operation, tuple((k, v) for k, v in signature), tag, fault and tuple(fault), integers
        )
        for counter, number, operation, signature, tag, fault, integers in json.loads(text)
    ]


def mix(digest: int, number: int) -> int:
    """A tag of 31 bits for the ``number``-th use of ``digest``."""
    return (digest + 0x9E3779B1 * number) & 0x7FFFFFFF
