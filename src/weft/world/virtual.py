"""A world of ranks in one process: the test harness with real tensors, the simulator with a machine."""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from weft.comm import ledger
from weft.comm.axis import Axis, enter_world
from weft.comm.ledger import Event, Ledger
from weft.comm.wire import CallRecord, diagnose
from weft.errors import DeadlockError, Fault, NcclRuleError, error_of
from weft.world.machine import Machine, counting
from weft.world.nccl import NcclQueues
from weft.world.network import Links, TaggedMessages
from weft.world.scheduler import Scheduler, Task
from weft.world.virtual_wire import VirtualWire

T = TypeVar("T")
RULES = ("ideal", "gloo", "nccl")


@dataclass
class WorldRun(Generic[T]):
    """What a virtual world brought back.

    results: what ``fn`` returned, by rank. ledgers: every exchange, by rank. elapsed: virtual seconds until
    the last rank was done (None without a machine). timeline: the events of all ranks, and with a machine
    that counts operators those too; ``timeline.save_trace(path)`` draws them.
    """

    results: list[T]
    ledgers: list[Ledger]
    elapsed: float | None
    timeline: Ledger


class VirtualWorld:
    """``size`` ranks as threads of this process, one at a time, in the order of their virtual clocks.

    ``rules`` says how messages behave. "ideal": each on its own. "gloo": one also waits for the notice that its receive
    is posted (see `weft.world.network`). "nccl": with NCCL's rules, and what breaks one is an error (see
    `weft.world.nccl`); every program is then run twice, with the host blocked at each issue and with the host free.

    ``device="sim"`` (with "nccl"): every rank has a simulated accelerator, ``torch.device("sim")``, with streams of its
    own. Messages of its tensors go through the class that real ranks use, lanes are streams, and a race between
    streams, memory given back too early or a mixture of devices is an error (see `weft.world.simulated`).

    >>> VirtualWorld(3).run(lambda axis: axis.rank).results
    [0, 1, 2]
    """

    def __init__(self, size: int, machine: Machine | None = None, rules: str = "ideal", device: str = "cpu") -> None:
        if size < 1:
            raise ValueError(f"VirtualWorld: size must be at least 1, got {size}")
        if rules not in RULES:
            raise ValueError(f"VirtualWorld: rules {rules!r} is not one of {', '.join(RULES)}")
        if device not in ("cpu", "sim"):
            raise ValueError(f"VirtualWorld: device {device!r} is not 'cpu' or 'sim'")
        if device == "sim" and (rules != "nccl" or machine is not None):
            raise ValueError('VirtualWorld: device="sim" wants rules="nccl" and no machine: it has no virtual time')
        # Not imported before: it stands on private names of one release of torch.
        self.emulated = importlib.import_module("weft.world.emulated_nccl") if device == "sim" else None
        if self.emulated is not None:
            self.emulated.install()
        self.size, self.machine, self.rules = size, machine, rules

    def run(self, fn: Callable[[Axis], T]) -> WorldRun[T]:
        """Run ``fn(axis)`` on every rank. ``group=None`` inside ``fn`` means this world.

        Raises `DeadlockError` saying who waits for what, `DisagreementError` where ranks made different
        calls, or the first exception of a rank with a note of which rank it was.
        """
        if self.rules == "nccl":
            WorldState(self, host_blocks=True).run(fn)
        return WorldState(self).run(fn)


@dataclass
class _Comparison:
    """A call that its ranks compare before it begins: who has made it, who waits for the others, what is wrong."""

    records: dict[int, CallRecord] = field(default_factory=dict)
    waiting: list[Task] = field(default_factory=list)
    diagnosis: Fault | None = None


class WorldState:
    """The shared side of one run: the network, the scheduler and what ranks leave for each other."""

    def __init__(self, world: VirtualWorld, host_blocks: bool = False, connected: bool = True) -> None:
        self.size, self.machine = world.size, world.machine
        self.scheduler = Scheduler(world.size, self._explain_deadlock)
        links = Links(world.size, world.machine)
        self.messages = TaggedMessages(self.scheduler, links, tcp=world.machine if world.rules == "gloo" else None)
        self.emulated = world.emulated
        self.devices = [] if world.emulated is None else [world.emulated.Rank() for _ in range(world.size)]
        self._make_queues = partial(NcclQueues, self.scheduler, links, world.size)
        self._host_blocks = host_blocks
        self.nccl: NcclQueues | None = None
        if world.rules == "nccl":
            self.nccl = self._make_queues(host_blocks, connected and world.emulated is None)
        self._apart: dict[tuple[str, Sequence[int]], NcclQueues] = {}
        self.ledgers = [Ledger() for _ in range(world.size)]
        self.operators: list[Event] = []
        self.known: dict[Any, Any] = {}
        self.calls: list[dict[str, CallRecord]] = [{} for _ in range(world.size)]
        self.refusals: list[CallRecord | None] = [None] * world.size
        self.comparing: dict[tuple[str, int], _Comparison] = defaultdict(_Comparison)

    def run(self, fn: Callable[[Axis], T]) -> WorldRun[T]:
        results: list[Any] = [None] * self.size
        ends = [0.0] * self.size

        def live(rank: int) -> None:
            with nullcontext() if self.emulated is None else self.emulated.inside_rank(self.devices[rank]):
                live_on_device(rank)

        def live_on_device(rank: int) -> None:
            axis = Axis.over(VirtualWire(self, rank, self.nccl))
            with self.inside(axis):
                results[rank] = fn(axis)
            for queues in self._queues():
                queues.check_end(rank)
            ends[rank] = self.scheduler.current.clock

        for rank in range(self.size):
            self.scheduler.spawn(rank, 0.0, lambda rank=rank: live(rank))  # type: ignore[misc]
        self.scheduler.run()
        for queues in self._queues():
            queues.check_end()
        timeline = Ledger.merge([*self.ledgers, Ledger(self.operators)])
        return WorldRun(results, self.ledgers, max(ends) if self.machine else None, timeline)

    def _queues(self) -> list[NcclQueues]:
        return [] if self.nccl is None else [self.nccl, *self._apart.values()]

    def queues_apart(self, name: str, members: Sequence[int]) -> NcclQueues:
        """Of a communicator of its own, which its ranks share. On the simulated device they meet as real ranks do."""
        key = name, tuple(members)
        if key not in self._apart:
            simulated = self.emulated is not None
            self._apart[key] = self._make_queues(self._host_blocks and simulated, not simulated)
            self._apart[key].met = set()
        return self._apart[key]

    @contextmanager
    def inside(self, axis: Axis, beside: bool = False) -> Iterator[None]:
        """This thread is part of a rank: its WORLD, its ledger, its clock. ``beside``: not the one that computes."""
        if beside and self.emulated is not None:
            self.emulated.enter_rank(self.devices[axis.wire.rank])
        enter_world(axis)
        ledger.attach(self.ledgers[axis.wire.rank])
        # On the simulated device the host's reads are seen by the device.
        reads = (
            nullcontext() if self.nccl is None or self.emulated is not None else HostReads(self.nccl, axis.wire.rank)
        )
        costs = nullcontext() if self.machine is None else counting(self.machine, self.spend, self.known)
        with reads, costs:
            yield

    def spend(self, operator: str, seconds: float) -> None:
        task = self.scheduler.current
        start, task.clock = task.clock, task.clock + seconds
        self.operators.append(Event(operator, task.rank, start=start, end=task.clock, lane="compute"))

    def _explain_deadlock(self, blocked: list[Task]) -> Exception:
        for refused in self.refusals:
            if refused is not None and refused.fault is not None:
                return error_of(refused.fault)
        latest: dict[str, dict[int, CallRecord]] = defaultdict(dict)
        for rank, calls in enumerate(self.calls):
            for counter, record in calls.items():
                latest[counter][rank] = record
        for records in latest.values():
            number = min(record.number for record in records.values())
            at_once = {rank: record for rank, record in records.items() if record.number == number}
            if diagnosis := diagnose(at_once, 0):
                return error_of(diagnosis)
        rows = [f"rank {task.rank} waits {task.waits_for()}" for task in blocked[:16] if task.waits_for]
        more = f"; and {len(blocked) - 16} more" if len(blocked) > 16 else ""
        kind = DeadlockError if self.nccl is None else NcclRuleError
        return kind(f"deadlock in a virtual world of {self.size}: {'; '.join(rows)}{more}")


_READS = {getattr(torch.Tensor, name) for name in ("item", "tolist", "numpy", "__int__", "__bool__", "__index__")}


class HostReads(TorchFunctionMode):
    """Rule 8: finds the host reading received integers. Active in every thread of such a world."""

    def __init__(self, nccl: NcclQueues, rank: int) -> None:
        super().__init__()
        self._nccl, self._rank = nccl, rank

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS:
            tensor = args[0]
            if not tensor.is_meta and tensor.untyped_storage().data_ptr() in self._nccl.received_integers:
                raise NcclRuleError(
                    f"NCCL rule 8: rank {self._rank} reads received integers {list(tensor.shape)} on the host; gather "
                    f"them as metadata, over the CPU side"
                )
        return func(*args, **(kwargs or {}))
