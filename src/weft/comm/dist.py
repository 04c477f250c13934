"""Real ranks: the only place that calls torch.distributed."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from weft.comm.axis import Axis
from weft.comm.lane import StreamLane, ThreadLanes
from weft.comm.watch import Watch
from weft.comm.wire import Message, Pending, SoloWire
from weft.errors import Call

T = TypeVar("T")

_axes: weakref.WeakKeyDictionary[Any, Axis] = weakref.WeakKeyDictionary()
_generations: dict[str, int] = {}  # how often a group of this name has been seen, to keep store keys apart


def axis_of(group: Any) -> Axis:
    """The axis of a ProcessGroup, a 1-D DeviceMesh or None (WORLD, or a world of one). Always the same one."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"Axis.of: the mesh has {group.ndim} dimensions {group.mesh_dim_names or tuple(group.shape)}; "
                f"pass one of them, for example mesh['sequence']"
            )
        group = group.get_group()
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return Axis.over(SoloWire())
        group = dist.group.WORLD
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("Axis.of: this rank is not a member of the group; call it on the group's ranks only")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"Axis.of: group must be a ProcessGroup, a 1-D DeviceMesh, an Axis or None, got {type(group).__name__}"
        )
    if group not in _axes:
        _axes[group] = Axis.over(DistWire(group), name=f"group {group.group_name}")
    return _axes[group]


class DistWire:
    """A torch.distributed process group. Every message is point-to-point.

    On Gloo a fan-out of point-to-point messages is faster than its collectives, carries only what is needed,
    and takes a tag. On NCCL (untested here) the messages of one exchange are grouped into one call.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self.rank, self.size = group.rank(), group.size()
        self.grouped = "nccl" in dist.get_backend(group)  # no tags, and one order for all messages
        self._timeout = group_timeout(group)
        self._own_lock = threading.Lock()
        self._own_mail: defaultdict[int, queue.SimpleQueue[torch.Tensor]] = defaultdict(queue.SimpleQueue)
        generation = _generations[group.group_name] = _generations.get(group.group_name, 0) + 1
        store = dist.PrefixStore(f"weft/{group.group_name}/{generation}", dist.distributed_c10d._get_default_store())
        self._watch = Watch(self.rank, self.size, store, self._timeout, self._close)
        self._threads = ThreadLanes(f"weft lane of group {group.group_name}")
        self._stream_lanes: dict[torch.device, StreamLane] = {}

    @property
    def group(self) -> dist.ProcessGroup:
        group = self._group()
        assert group is not None, "an axis does not outlive its process group"
        return group

    def exchange(self, call: Call, sends: Sequence[Message], receives: Sequence[Message]) -> Pending[None]:
        rank, group = self.rank, self.group
        for messages in (sends, receives):
            for message in messages:
                if message[0] == rank:
                    return self._exchange_with_own(call, sends, receives)
        if self.grouped:
            return self._exchange_grouped(sends, receives)
        try:
            # Receives first: a message that finds its buffer ready needs no handshake.
            works = [group.recv([buffer], peer, tag) for peer, tag, buffer in receives]
            works += [group.send([tensor], peer, tag) for peer, tag, tensor in sends]
        except RuntimeError as error:
            raise self._watch.explain(call, [m[0] for m in (*receives, *sends)]) from error

        def finish() -> None:
            peers = [message[0] for message in receives] + [message[0] for message in sends]
            stuck = self._watch.begin(call, peers)
            try:
                for work in works:
                    work.wait()
            except RuntimeError as error:
                raise self._watch.explain(call, peers) from error
            finally:
                self._watch.end(stuck)

        return Pending(finish)

    def _exchange_grouped(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending[None]:
        """All messages in one NCCL group call."""
        if not sends and not receives:
            return Pending(lambda: None)
        operations = [
            dist.P2POp(op, tensor, group=self.group, group_peer=peer)
            for op, messages in ((dist.irecv, receives), (dist.isend, sends))
            for peer, _, tensor in messages
        ]
        works = dist.batch_isend_irecv(operations)

        def finish() -> None:
            for work in works:
                work.wait()

        return Pending(finish)

    def _exchange_with_own(self, call: Call, sends: Sequence[Message], receives: Sequence[Message]) -> Pending[None]:
        """Some messages go from one lane of this rank to another: they wait in a box of this process."""
        for _, tag, tensor in (message for message in sends if message[0] == self.rank):
            with self._own_lock:
                self._own_mail[tag].put(tensor.clone())
        others = [[message for message in messages if message[0] != self.rank] for messages in (sends, receives)]
        pending = self.exchange(call, *others)

        def finish() -> None:
            pending.wait()
            for _, tag, buffer in (message for message in receives if message[0] == self.rank):
                with self._own_lock:
                    box = self._own_mail[tag]
                buffer.copy_(box.get(timeout=self._timeout.total_seconds()).view(buffer.shape))
                with self._own_lock:  # a second message of the call may already be there
                    if box.empty():
                        del self._own_mail[tag]

        return Pending(finish)

    def start(self, schedule: Callable[[], T], device: torch.device) -> Pending[T]:
        if device.type != "cuda":
            return self._threads.start(schedule)
        if device not in self._stream_lanes:
            self._stream_lanes[device] = StreamLane(device)
        return self._stream_lanes[device].start(schedule)

    def announce(self, call: Call, members: Sequence[int]) -> None:
        self._watch.announce(call)

    def agree(self, call: Call, members: Sequence[int]) -> None:
        self._watch.agree(call, members)

    def refuse(self, call: Call) -> None:
        self._watch.refuse(call)

    def clock(self) -> float:
        return time.perf_counter()

    def _close(self) -> None:
        """Make every wait on this Gloo group end: a receive that times out closes all its connections.

        A receive from a peer that is gone fails before it can time out, so all peers are tried.
        """
        for peer in range(self.size):
            if peer != self.rank:
                with suppress(RuntimeError):
                    self.group.recv([torch.empty(1)], peer, 0x7FFFFFFF).wait(timedelta(milliseconds=1))


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """How long the group's operations may take: torch has no public name for it."""
    for device in ("cpu", "cuda"):
        try:
            return group._get_backend(torch.device(device)).options._timeout
        except (RuntimeError, AttributeError):
            continue
    return dist.default_pg_timeout
