"""NCCL's rules in a virtual world, so that what would hang, mismatch or overwrite there is found without a GPU.

1. Each rank has one queue of groups (the messages of an exchange): a group starts when the one before it is complete, a
   message moves when the groups at both its ends have started, a group is complete when all its messages have moved.
2. No tags: messages of a pair match in order. weft's tag checks that the right ones met; size and dtype too.
3. Both ends group alike: a rank's k-th group with a peer mirrors the peer's k-th with it. At most one message for each
   peer and direction in a group.
4. The first exchange needs all ranks, unless the group was connected before.
5. Lanes run inline, in the order of the host. Every case is run twice: the host blocked at each issue until the group
   is complete, as at the first contact of two ranks, and the host free.
6. A message is read when it moves, not when it is issued; a received tensor holds nothing until it was waited for.
7. At the end every queue is empty and everything was waited for.
8. The host does not read received integers: counts and lengths go over the CPU side.
Lifetimes of memory and streams are seen on the simulated device: see `VirtualWorld`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from weft.comm.call import as_bytes
from weft.comm.wire import CallRecord, Pending, WireMessage, diagnose
from weft.errors import DisagreementError, NcclRuleError, name_ranks
from weft.world.network import Links
from weft.world.scheduler import Scheduler, Task


@dataclass(eq=False)
class _Message:
    """One end of a message: a tensor to read, with what it held at issue, or one to fill."""

    peer: int
    tag: int
    tensor: torch.Tensor
    group: _Group
    snapshot: torch.Tensor | None = None
    other: _Message | None = None
    arrived: torch.Tensor | None = None
    arrival: float | None = None


@dataclass(eq=False)
class _Group:
    """The messages of one exchange of one rank."""

    rank: int
    record: CallRecord
    issued: float
    sends: list[_Message] = field(default_factory=list)
    receives: list[_Message] = field(default_factory=list)
    started: float | None = None
    complete: float | None = None
    waited: bool = False
    waiters: list[Task] = field(default_factory=list)

    @property
    def messages(self) -> list[_Message]:
        return [*self.sends, *self.receives]

    def __str__(self) -> str:
        parts = [f"to {name_ranks(m.peer for m in self.sends)}"] if self.sends else []
        parts += [f"from {name_ranks(m.peer for m in self.receives)}"] if self.receives else []
        return f"a group {' and '.join(parts)} in {self.record.place}"


class NcclExpected(Pending[None]):
    """Receives that are expected: they are posted with their exchange."""

    def __init__(self, nccl: NcclQueues, record: CallRecord, messages: Sequence[WireMessage]) -> None:
        super().__init__(self._finish)
        self._nccl, self._record, self.messages = nccl, record, messages
        self.group: _Group | None = None

    def _finish(self) -> None:
        if self.group is not None:
            self._nccl.wait(self.group)
        elif self.messages:
            raise NcclRuleError(
                f"NCCL rule 1: {self._record.place}: a receive was waited for before the exchange that posts it"
            )


class NcclQueues:
    """Every rank's queue of groups."""

    def __init__(self, scheduler: Scheduler, links: Links, size: int, host_blocks: bool, connected: bool) -> None:
        self._scheduler, self._links, self._size = scheduler, links, size
        self._host_blocks, self._connected = host_blocks, connected
        self._joined: list[Task] = []  # who waits for the others at the first exchange
        self._eager: set[int] = set()
        self.met: set[tuple[int, int]] | None = None  # pairs that have, where only first contacts block
        self._queues: list[deque[_Group]] = [deque() for _ in range(size)]
        self._ends = [0.0] * size  # when the last group of a rank was complete
        # Messages of a pair of ranks that have not met: sent ones, and receives.
        self._unmet: dict[tuple[int, int], tuple[deque[_Message], deque[_Message]]]
        self._unmet = defaultdict(lambda: (deque(), deque()))
        self._shapes: dict[tuple[int, int], list[tuple[bool, bool, CallRecord]]] = defaultdict(list)
        self._groups: list[_Group] = []
        self.received_integers: dict[int, torch.UntypedStorage] = {}

    def connect(self, rank: int) -> None:
        """This rank makes the communicator before its first use."""
        self._eager.add(rank)

    def issue(self, rank: int, record: CallRecord, sends: Sequence[WireMessage], expected: Any) -> Pending[None]:
        receives = expected.messages
        group = _Group(rank, record, self._scheduler.current.clock)
        expected.group = group
        if not sends and not receives:
            group.complete, group.waited = group.issued, True
            return Pending(lambda: None)
        self._connect(group)
        for mine, messages in ((group.sends, sends), (group.receives, receives)):
            peers = [peer for peer, _, _ in messages]
            if len(set(peers)) < len(peers):
                twice = name_ranks({peer for peer in peers if peers.count(peer) > 1})
                raise NcclRuleError(
                    f"NCCL rule 3: {record.place}: rank {rank} has more than one message in one direction "
                    f"for {twice} in a group"
                )
            mine += [_Message(peer, tag, tensor, group) for peer, tag, tensor in messages]
        for message in group.sends:
            message.snapshot = None if message.tensor.is_meta else message.tensor.detach().clone()
        for _, _, tensor in receives:
            _poison(tensor)
            if not tensor.is_floating_point() and not tensor.is_meta:
                memory = tensor.untyped_storage()
                self.received_integers[memory.data_ptr()] = memory
        self._check_mirror(group)
        self._match(group)
        self._groups.append(group)
        self._queues[rank].append(group)
        if len(self._queues[rank]) == 1:
            self._start(group)
        if self._blocks_host(group):
            self._block_until_complete(group)
        return Pending(lambda: self.wait(group))

    def _blocks_host(self, group: _Group) -> bool:
        """Rule 5: always, or where only first contacts count, if this group has one."""
        if self.met is None or not self._host_blocks:
            return self._host_blocks
        pairs = {(group.rank, message.peer) for message in group.messages} - self.met
        self.met |= pairs
        return bool(pairs)

    def wait(self, group: _Group) -> None:
        """Until the group is complete; what it received is there then."""
        self._block_until_complete(group)
        task = self._scheduler.current
        assert group.complete is not None
        task.clock = max(task.clock, group.complete)
        if not group.waited:
            group.waited = True
            for message in group.receives:
                if message.arrived is not None:
                    with torch.no_grad():
                        message.tensor.copy_(message.arrived.view(message.tensor.shape))

    def _block_until_complete(self, group: _Group) -> None:
        if group.complete is None:
            group.waiters.append(self._scheduler.current)
            self._scheduler.block(lambda: f"for {group}, behind {len(self._queues[group.rank]) - 1} more (NCCL rule 1)")

    def _connect(self, group: _Group) -> None:
        """Rule 4: without an earlier connection the first exchange waits for everybody's first."""
        if self._connected or group.rank in self._eager:
            return
        if len(self._joined) + 1 < self._size:
            self._joined.append(self._scheduler.current)
            self._scheduler.block(lambda: f"for all ranks to join at the first exchange, {group} (NCCL rule 4)")
        else:
            self._connected = True
            for task in self._joined:
                self._scheduler.wake(task)

    def _check_mirror(self, group: _Group) -> None:
        """Rule 3: what this rank's k-th group with a peer does, the peer's k-th with it must mirror."""
        to, at = {m.peer for m in group.sends}, {m.peer for m in group.receives}
        for peer in sorted(to | at):
            mine, theirs = self._shapes[group.rank, peer], self._shapes[peer, group.rank]
            mine.append((peer in to, peer in at, group.record))
            if len(theirs) >= len(mine):
                sends, receives, record = theirs[len(mine) - 1]
                if (receives, sends) != (peer in to, peer in at):
                    words = (
                        f"group {len(mine)} between ranks {group.rank} and {peer} does not mirror: rank {group.rank} "
                        f"({_words(peer in to, peer in at)}) in {group.record.place}; rank {peer} "
                        f"({_words(sends, receives)}) in {record.place}"
                    )
                    self._object({group.rank: group.record, peer: record}, f"NCCL rule 3: {words}")

    def _match(self, group: _Group) -> None:
        """Rule 2: the n-th message of a pair and direction meets the n-th receive."""
        for index, message in enumerate(group.messages):
            sends = index < len(group.sends)
            sent, asked = self._unmet[(group.rank, message.peer) if sends else (message.peer, group.rank)]
            (sent if sends else asked).append(message)
            if sent and asked:
                one, other = sent.popleft(), asked.popleft()
                one.other, other.other = other, one
                self._check_met(one, other)

    def _check_met(self, sent: _Message, asked: _Message) -> None:
        a, b = sent.group, asked.group
        if sent.tag != asked.tag:
            words = f"rank {b.rank}, in {b.record.place}, would receive what rank {a.rank} sent in {a.record.place}"
            self._object({a.rank: a.record, b.rank: b.record}, f"NCCL rule 2: {words}")
        if sent.tensor.numel() != asked.tensor.numel() or sent.tensor.dtype != asked.tensor.dtype:
            raise NcclRuleError(
                f"NCCL rule 2: {a.record.place}: rank {a.rank} sent {sent.tensor.numel()} x {sent.tensor.dtype}, rank "
                f"{b.rank} expects {asked.tensor.numel()} x {asked.tensor.dtype}"
            )

    def _object(self, records: dict[int, CallRecord], words: str) -> None:
        """Raise: as a disagreement where ranks made the same call differently, else as a broken rule."""
        if len({(record.counter, record.number) for record in records.values()}) == 1 and (
            diagnosis := diagnose(records, 0)
        ):
            raise DisagreementError(diagnosis[1])
        raise NcclRuleError(words)

    def _start(self, group: _Group) -> None:
        """Rule 1, as far as it goes: start the group, move what can move, complete, and start what was behind."""
        todo = [group]
        while todo:
            group = todo.pop()
            if group.started is None:
                group.started = max(group.issued, self._ends[group.rank])
            touched = {id(group): group}
            for message in group.messages:
                other = message.other
                if message.arrival is None and other is not None and other.group.started is not None:
                    self._move(*((message, other) if message in group.sends else (other, message)))
                    touched[id(other.group)] = other.group
            for one in touched.values():
                if one.complete is None and all(message.arrival is not None for message in one.messages):
                    one.complete = max(message.arrival or 0.0 for message in one.messages)
                    queue = self._queues[one.rank]
                    assert queue.popleft() is one
                    self._ends[one.rank] = one.complete
                    for task in one.waiters:
                        self._scheduler.wake(task)
                    if queue:
                        todo.append(queue[0])

    def _move(self, sent: _Message, asked: _Message) -> None:
        """Rule 6: the message is read now."""
        a, b = sent.group, asked.group
        if sent.snapshot is not None:
            now = sent.tensor.detach()
            if not torch.equal(as_bytes(now), as_bytes(sent.snapshot)):  # so that NaN equals itself
                raise NcclRuleError(
                    f"NCCL rule 6: {a.record.place}: rank {a.rank} changed what it sends to rank {b.rank} before it "
                    f"had been sent"
                )
            asked.arrived = now.clone()
        assert a.started is not None and b.started is not None
        size = sent.tensor.numel() * sent.tensor.element_size()
        sent.arrival = asked.arrival = self._links.carry(a.rank, max(a.started, b.started), size)

    def check_end(self, rank: int | None = None) -> None:
        """Rule 7, of one rank's program that has ended or of all of them."""
        for group in self._groups:
            if group.rank == rank and not group.waited:
                raise NcclRuleError(f"NCCL rule 7: rank {rank} never waited for {group}")
            if rank is None and group.complete is None:
                raise NcclRuleError(f"NCCL rule 7: rank {group.rank} ended with {group} not complete")


def _words(sends: bool, receives: bool) -> str:
    return "sends and receives" if sends and receives else "sends" if sends else "receives"


@torch.no_grad()
def _poison(tensor: torch.Tensor) -> None:
    if not tensor.is_meta and tensor.dtype != torch.bool:
        tensor.fill_(torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)
