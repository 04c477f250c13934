"""What an axis talks through: the few verbs that every kind of world implements."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar, cast

import torch

from weft.errors import Call

T = TypeVar("T")
# (peer's rank on the wire, tag, contiguous tensor to send or to fill)
Message = tuple[int, int, torch.Tensor]


class Pending(Generic[T]):
    """Something under way. ``wait()`` ends it and gives its value; a second ``wait()`` gives it again.

    >>> Pending(lambda: 3).wait()
    3
    """

    def __init__(self, finish: Callable[[], T]) -> None:
        self._finish: Callable[[], T] | None = finish
        self._value: T | None = None

    def wait(self) -> T:
        if self._finish is not None:
            finish, self._finish = self._finish, None
            self._value = finish()
        return cast(T, self._value)


class Wire(Protocol):
    """One rank's end of a world. Ranks are positions in the world (or in its process group)."""

    rank: int
    size: int

    def exchange(self, call: Call, sends: Sequence[Message], receives: Sequence[Message]) -> Pending[None]:
        """Start these messages; ``wait()`` returns when all have been sent and received.

        A message meets the one with the same peer and tag on the other side, in order. A rank may write to
        itself, from one lane to another; that costs nothing.
        """
        ...

    def start(self, schedule: Callable[[], T], device: torch.device) -> Pending[T]:
        """Run ``schedule`` beside the caller's computation: see `weft.comm.lane`."""
        ...

    def agree(self, call: Call, members: Sequence[int]) -> None:
        """Raise `DisagreementError` on every one of ``members`` unless all make this same call."""
        ...

    def announce(self, call: Call, members: Sequence[int]) -> None:
        """Note locally that this rank makes this call, for the error if it ever gets stuck."""
        ...

    def refuse(self, call: Call) -> None:
        """Let the others know, should they wait for it, that this rank does not make this call."""
        ...

    def clock(self) -> float:
        """Seconds, for the ledger."""
        ...


class SoloWire:
    """The wire of a world of one: nothing is ever sent on it."""

    rank = 0
    size = 1

    def exchange(self, call: Call, sends: Sequence[Message], receives: Sequence[Message]) -> Pending[None]:
        assert not sends and not receives, "a world of one sends nothing"
        return Pending(lambda: None)

    def start(self, schedule: Callable[[], T], device: torch.device) -> Pending[T]:
        value = schedule()
        return Pending(lambda: value)

    def agree(self, call: Call, members: Sequence[int]) -> None:
        pass

    def announce(self, call: Call, members: Sequence[int]) -> None:
        pass

    def refuse(self, call: Call) -> None:
        pass

    def clock(self) -> float:
        return time.perf_counter()
