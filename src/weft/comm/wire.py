"""What an axis talks through: the few verbs that every kind of world implements."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar, cast

import torch

from weft.errors import CallRecord, error_of

T = TypeVar("T")
# (peer's rank on the wire, tag, contiguous tensor to send or to fill)
WireMessage = tuple[int, int, torch.Tensor]


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

    def start(self, schedule: Callable[[], T], device: torch.device) -> Pending[T]:
        """Run ``schedule`` beside the caller's computation: see `weft.comm.lane`."""
        ...

    def agree(self, record: CallRecord, members: Sequence[int]) -> None:
        """Raise the same error on every one of ``members`` unless all make this same call without a fault."""
        ...

    def announce(self, record: CallRecord) -> None:
        """Note locally that this rank makes this call, for the error if it ever gets stuck."""
        ...

    def refuse(self, record: CallRecord) -> None:
        """Leave word, for those who will wait for it, that this rank could not make this call."""
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

    def start(self, schedule: Callable[[], T], device: torch.device) -> Pending[T]:
        value = schedule()
        return Pending(lambda: value)

    def agree(self, record: CallRecord, members: Sequence[int]) -> None:
        if record.fault is not None:
            raise error_of(record.fault)

    def announce(self, record: CallRecord) -> None:
        pass

    def refuse(self, record: CallRecord) -> None:
        pass

    def clock(self) -> float:
        return time.perf_counter()
