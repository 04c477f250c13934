"""Ranks, streams and events, with vector clocks; and which stream is current, also inside a backward.

Operators run at once, in the order of the host. What would be wrong on a device is found by clocks.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from weft.world.simulated.clocks import Clock, Freed, HostCopy, clocks_by_stream, covers, merge
from weft.world.simulated.places import Place, SimulatedDeviceError, describe, place

_C: Any = torch._C  # private: _current_graph_task_id, _autograd._get_sequence_nr, DeviceType
_PRIVATE_USE = int(_C._autograd.DeviceType.PrivateUse1)
_KEPT_SWITCHES = 4096
_stream_ids = itertools.count(1)


class Rank:
    """What one process would have: a host with its clock, a default stream, freed memory, and counts of host syncs."""

    def __init__(self) -> None:
        self.host: Clock = {}  # what the host knows to be done
        self.issued: Clock = {}  # the last operator of every stream
        self.host_syncs: Counter[str] = Counter()
        self.host_sync_places: Counter[tuple[str, Place]] = Counter()
        self.syncs_forbidden = False
        self.freed: dict[int, list[Freed]] = defaultdict(list)  # by the stream it was allocated on
        self.host_copies: list[HostCopy] = []
        self.default_stream = Stream(rank=self)

    def reach(self, clock: Clock) -> None:
        """The host has waited until all that ``clock`` knows was done."""
        merge(self.host, clock)
        if self.host_copies:
            done = [copy for copy in self.host_copies if self.host.get(copy.stream, 0) >= copy.count]
            self.host_copies = [copy for copy in self.host_copies if copy not in done]
            for copy in done:
                copy.finish()

    def follow(self, other: Rank) -> None:
        """This host waits for everything ``other`` has issued: for tensors that one rank leaves to another's thread."""
        self.reach(dict(other.issued))

    def places_of_syncs(self) -> dict[str, int]:
        """How often the host waited, by kind and place, as text."""
        return {f"{kind} at {describe(where)}": n for (kind, where), n in self.host_sync_places.most_common()}


class Stream(torch.Stream):
    """A `torch.Stream` with an id of its own, which is what `Tensor.record_stream` brings to us."""

    rank: Rank
    count: int
    clock: Clock  # what everything issued from now on comes after
    _asked: Clock

    def __new__(cls, device: Any = None, priority: int = 0, *, rank: Rank | None = None) -> Stream:
        new: Any = super().__new__
        self = new(cls, stream_id=next(_stream_ids), device_index=0, device_type=_PRIVATE_USE)
        self.rank, self.count, self.clock, self._asked = rank or current_rank(), 0, {}, {}
        clocks_by_stream[self.stream_id] = self.clock
        return self

    def __init__(self, device: Any = None, priority: int = 0, *, rank: Rank | None = None) -> None: ...

    def tick(self) -> int:
        """The number of the operator that is issued now."""
        self.count += 1
        self.clock[self.stream_id] = self.rank.issued[self.stream_id] = self.count
        if self.rank.host:
            merge(self.clock, self.rank.host)
        return self.count

    def record_event(self, event: Any = None) -> Any:
        """An event that is over when all that was issued so far is."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Any) -> None:
        """What is issued from now on comes after the event. The host goes on."""
        merge(self.clock, event.clock)

    def wait_stream(self, stream: Any) -> None:
        """What is issued from now on comes after all that ``stream`` was given so far. The host goes on."""
        merge(self.clock, stream.clock)

    def synchronize(self) -> None:
        """The host waits."""
        host_sync("synchronize", self.clock)

    def query(self) -> bool:
        """See `Event.query`."""
        _ask()
        if covers(self.rank.host, self.clock):
            return True
        if not self._asked:
            self._asked = dict(self.clock)
            return False
        self.rank.reach(self._asked)
        self._asked = {}
        return covers(self.rank.host, self.clock)

    def __enter__(self) -> Any:
        this_thread.entered.append((this_thread.stream, this_thread.task))
        set_stream(self)
        return self

    def __exit__(self, *_: object) -> None:
        stream, task = this_thread.entered.pop()
        set_stream(stream or current_rank().default_stream)
        this_thread.task = task


class Event:
    """As `torch.cuda.Event`. Where it was never recorded, there is nothing to wait for."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.clock: Clock = {}
        self._asked, self._recorded_at = False, 0.0

    def record(self, stream: Any = None) -> None:
        """It is over when all that ``stream`` (default: the current one) was given so far is."""
        self.clock, self._asked, self._recorded_at = (
            dict((stream or current_stream()).clock),
            False,
            time.perf_counter(),
        )

    def wait(self, stream: Any = None) -> None:
        """What ``stream`` is given from now on comes after it. The host goes on."""
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        """The host waits."""
        host_sync("synchronize", self.clock)

    def query(self) -> bool:
        """Whether it is over: at first it is not, unless the host knows better, and the second time it is.

        So nobody can rely on a first answer, and loops that ask until it is over come to an end.
        """
        _ask()
        rank = current_rank()
        if covers(rank.host, self.clock):
            return True
        if self._asked:
            rank.reach(self.clock)
        self._asked = not self._asked
        return not self._asked

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds of the host between the two records."""
        return 1000 * (end._recorded_at - self._recorded_at)


class _Thread(threading.local):
    """Of each thread: its rank, the current stream and the graph task in which that was set, and earlier streams."""

    def __init__(self) -> None:
        self.rank: Rank | None = None
        self.stream: Stream | None = None
        self.task = -1
        self.entered: list[tuple[Stream | None, int]] = []
        self.switches: list[
            tuple[int, Stream]
        ] = []  # the number the next autograd node had, and the stream from there on
        self.backward: Backward | None = None


class Backward(Protocol):
    """A backward that runs: see `weft.world.simulated.backward`."""

    def stream_of_node(self) -> Stream: ...


this_thread = _Thread()
backwards: list[Backward] = []  # the latest is for the engine's thread of the device, which knows no rank
_first_rank: list[Rank] = []
whole_process: list[bool] = []
_captures: list[Rank] = []  # that capture a graph


def current_rank() -> Rank:
    """The rank of this thread; threads that entered none belong to the first."""
    if this_thread.rank is not None:
        return this_thread.rank
    if not _first_rank:
        _first_rank.append(Rank.__new__(Rank))
        _first_rank[0].__init__()  # type: ignore[misc]  # its default stream asks for no other rank
    return _first_rank[0]


def is_accelerator() -> bool:
    """Whether the simulated device is the accelerator of the program: in ranks, or where the whole process uses it."""
    return this_thread.rank is not None or bool(whole_process)


def enter_rank(rank: Rank | None) -> None:
    """From now on this thread belongs to ``rank``, on its default stream; None: to the first rank, as at the start.

    The backwards of a thread that entered a rank run in this thread: the engine's own thread would not know the rank.
    """
    this_thread.__init__()  # type: ignore[misc]
    this_thread.rank = rank


@contextmanager
def inside_rank(rank: Rank) -> Iterator[Rank]:
    """Within it this thread belongs to ``rank``."""
    before = dict(this_thread.__dict__)
    enter_rank(rank)
    try:
        yield rank
    finally:
        this_thread.__dict__.update(before)


def set_stream(stream: Stream) -> None:
    """It is current from now on, for this thread. The backward of what is called now will run on it too."""
    this_thread.stream, this_thread.task = stream, _C._current_graph_task_id()
    switches = this_thread.switches
    switches.append((_C._autograd._get_sequence_nr(), stream))
    if len(switches) > _KEPT_SWITCHES:
        del switches[: _KEPT_SWITCHES // 2]


def current_stream(device: Any = None) -> Stream:
    """What operators are issued to now."""
    if _C._current_graph_task_id() == this_thread.task:
        return this_thread.stream or current_rank().default_stream
    backward = this_thread.backward or (backwards[-1] if backwards else None)
    return backward.stream_of_node() if backward is not None else current_rank().default_stream


def host_sync(kind: str, clock: Clock | None = None) -> None:
    """The host waits, for the current stream or for what ``clock`` knows; counted by kind and place."""
    rank, where = current_rank(), place()
    rank.host_syncs[kind] += 1
    rank.host_sync_places[kind, where[:1]] += 1
    if rank.syncs_forbidden:
        raise SimulatedDeviceError(f"host synchronisation where it is forbidden: {kind} at {describe(where)}")
    rank.reach(dict(current_stream().clock if clock is None else clock))


@contextmanager
def no_host_sync() -> Iterator[None]:
    """Within it a synchronisation of this rank's host raises `SimulatedDeviceError`, with its place."""
    rank = current_rank()
    before, rank.syncs_forbidden = rank.syncs_forbidden, True
    try:
        yield
    finally:
        rank.syncs_forbidden = before


@contextmanager
def capturing() -> Iterator[None]:
    """As while this rank captures a graph: its host must not wait, and no thread may ask whether work is over."""
    rank = current_rank()
    _captures.append(rank)
    try:
        with no_host_sync():
            yield
    finally:
        _captures.remove(rank)


def is_capturing() -> bool:
    """Whether this thread's rank captures a graph."""
    return current_rank() in _captures


def _ask() -> None:
    """Somebody asks whether work is over; a thread without a rank may be any capturing rank's."""
    if _captures and (this_thread.rank is None or this_thread.rank in _captures):
        raise SimulatedDeviceError(f"asked whether work is over while a graph is captured, at {describe(place())}")
