"""Real ranks, over torch.distributed. What is for NCCL stands in `comm/nccl.py`."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from weft.comm.device import StreamLane, own_device, runs_behind
from weft.comm.hang import HangDetector
from weft.comm.nccl import TAGLESS, NcclSide, PostedWithExchange
from weft.comm.wire import CallRecord, Pending, ThreadLanes, Wire, WireMessage

T = TypeVar("T")

_generations: dict[str, int] = {}  # how often a group of this name has been seen, to keep store keys apart


def process_group_of(group: Any) -> dist.ProcessGroup | None:
    """The process group that a ProcessGroup, a 1-D DeviceMesh or None (WORLD) stands for; None in a world of one.

    What is wrong with a group is raised on this rank alone: without a group there is nobody to tell.
    """
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"Axis.of: the mesh has {group.ndim} dimensions {group.mesh_dim_names or tuple(group.shape)}; "
                f"pass one of them, for example mesh['sequence'] (raised on this rank alone)"
            )
        group = group.get_group()
    if group is None:
        return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "Axis.of: this rank is not a member of the group; call it on the group's ranks only (raised on this rank "
            "alone)"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"Axis.of: group must be a ProcessGroup, a 1-D DeviceMesh, an Axis or None, got {type(group).__name__} "
            f"(raised on this rank alone)"
        )
    return group


class _Posted(Pending[None]):
    """Receives that are posted, with their works."""

    def __init__(
        self, wire: DistWire, record: CallRecord, messages: Sequence[WireMessage], works: list[Any], kind: str
    ) -> None:
        super().__init__(lambda: wire.finish(record, messages, works, kind))


class DistWire:
    """A torch.distributed process group. Every message is point-to-point.

    On Gloo a fan-out of point-to-point messages is faster than its collectives, carries only what is needed,
    and takes a tag. On NCCL the messages of one exchange are grouped into one call. Which of the two a message
    takes is decided by the device its tensor is on.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self.rank, self.size = group.rank(), group.size()
        self.numbers = dist.get_process_group_ranks(group)
        self._timeout = _timeout_of(group)
        self._nccl = _nccl_side_of(group)
        self.host = self._nccl.device if self._nccl and _backend_of(group, "cpu") is None else torch.device("cpu")
        generation = _generations[group.group_name] = _generations.get(group.group_name, 0) + 1
        store = dist.PrefixStore(f"weft/{group.group_name}/{generation}", dist.distributed_c10d._get_default_store())
        self._detector = HangDetector(self.rank, self.size, store, self._timeout, self._close)
        self._threads = ThreadLanes(f"weft lane of group {group.group_name}")
        self._lanes: dict[tuple[torch.device, str], StreamLane] = {}
        self._apart: dict[tuple[str, tuple[int, ...]], DistWire] = {}

    @property
    def group(self) -> dist.ProcessGroup:
        group = self._group()
        assert group is not None, "an axis does not outlive its process group"
        return group

    def expect(self, record: CallRecord, receives: Sequence[WireMessage], kind: str = "data") -> Pending[None]:
        """A message that finds its receive posted needs no handshake, so it is posted at once. Not on NCCL."""
        if self._nccl is not None and (self._nccl.carries(receives) or not receives):
            return PostedWithExchange(record, receives)
        return _Posted(self, record, receives, self._post(self.group.recv, record, receives), kind)

    def exchange(
        self, record: CallRecord, sends: Sequence[WireMessage], expected: Any, kind: str = "data"
    ) -> Pending[None]:
        if self._nccl is not None and self._nccl.carries(sends or getattr(expected, "messages", ())):
            return self._nccl.exchange(self.group, record, sends, expected, self._detector)
        works = self._post(self.group.send, record, sends)

        def finish() -> None:
            expected.wait()  # a Gloo receive must not be waited for twice, and may have been already
            self.finish(record, sends, works, kind)

        return Pending(finish)

    def _post(self, post: Callable[..., Any], record: CallRecord, messages: Sequence[WireMessage]) -> list[Any]:
        works = []
        for peer, tag, tensor in messages:
            try:
                works.append(post([tensor], peer, tag))
            except RuntimeError as error:
                raise self._detector.explain(record, peer, error) from error
        return works

    def exchange_on_host(
        self, record: CallRecord, sends: Sequence[WireMessage], receives: Sequence[WireMessage]
    ) -> Pending[None]:
        return self.exchange(record, sends, self.expect(record, receives, "metadata"), "metadata")

    def finish(self, record: CallRecord, messages: Sequence[WireMessage], works: Sequence[Any], kind: str) -> None:
        """Wait for messages; one that fails is explained."""
        if not works:
            return
        with self._detector.waiting(record, kind):
            for (peer, _, _), work in zip(messages, works, strict=True):
                try:
                    work.wait()
                except RuntimeError as error:
                    raise self._detector.explain(record, peer, error) from error

    def start(
        self, schedule: Callable[[], T], device: torch.device, operation: str, buffers: Sequence[Tensor]
    ) -> Pending[T]:
        if not runs_behind(device):
            return self._threads.start(schedule)
        if (device, operation) not in self._lanes:
            self._lanes[device, operation] = StreamLane(device)
        return self._lanes[device, operation].start(schedule, buffers)

    def apart(self, name: str, members: Sequence[int]) -> tuple[Wire, Sequence[int]]:
        """On NCCL a communicator of their own, which these ranks make together; tags keep messages apart elsewhere."""
        if self._nccl is None:
            return self, members
        key = name, tuple(members)
        if key not in self._apart:
            ranks = [self.numbers[member] for member in members]
            group = dist.new_group(ranks, self._timeout, use_local_synchronization=True, sort_ranks=False)
            self._apart[key] = wire = DistWire(group)
            if wire._nccl is not None:
                wire._nccl.meet(group, name, range(len(ranks)))
        return self._apart[key], range(len(members))

    def announce(self, record: CallRecord) -> None:
        self._detector.announce(record)

    def agree(self, record: CallRecord, members: Sequence[int]) -> None:
        self._detector.agree(record, members)

    def refuse(self, record: CallRecord) -> None:
        self._detector.refuse(record)

    def clock(self) -> float:
        return time.perf_counter()

    def _close(self) -> None:
        """Make every wait on this group end.

        On Gloo a receive that times out closes all its connections. A receive from a peer that is gone fails before
        it can time out, and then the next one is tried.
        """
        if self._nccl is not None:
            self._nccl.close()
        if self.host.type != "cpu":
            return
        for peer in range(self.size):
            if peer != self.rank:
                try:
                    self.group.recv([torch.empty(1)], peer, 0x7FFFFFFF).wait(timedelta(milliseconds=1))
                except RuntimeError as error:
                    if "timed out" in str(error).lower():
                        return


def _backend_of(group: dist.ProcessGroup, device: str) -> Any:
    """What carries tensors of this kind of device in the group, or None if nothing does."""
    try:
        return group._get_backend(torch.device(device))
    except RuntimeError:
        return None


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long the group's operations may take: torch has no public name for it."""
    for device in (torch.device("cpu"), own_device()):
        try:
            return group._get_backend(device).options._timeout
        except (RuntimeError, AttributeError):
            continue
    return dist.default_pg_timeout


def _nccl_side_of(group: dist.ProcessGroup) -> NcclSide | None:
    """If tensors of this process's accelerator travel without tags in this group: its name does not always say so."""
    device = own_device()
    backend = _backend_of(group, device.type) if runs_behind(device) else None
    return NcclSide(backend, device) if backend is not None and backend.name() in TAGLESS else None
