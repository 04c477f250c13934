"""What an axis talks through: the few verbs that every kind of world implements, and what their wires share.

A lane is where a multi-round schedule runs while the main computation goes on: on a CPU a background thread, on a
device that runs behind the host a side stream (`comm/device.py`), in a virtual world a forked clock.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from torch import Tensor

from weft.comm.records import CallRecord
from weft.errors import error_of

T = TypeVar("T")
# (peer's rank on the wire, tag, contiguous tensor to send or to fill)
WireMessage = tuple[int, int, Tensor]


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
