"""The few calls of torch.distributed that `weft.comm.nccl.NcclSide` makes, on the simulated device, by NCCL's rules.

So grouping, order and streams of the class that real ranks use are what is tested, not of a double. Messages move as
`weft.world.nccl` says; a communicator has a stream that waits for the issuing one, and a wait orders the stream that is
current then.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.comm.nccl import NcclSide
from weft.comm.wire import CallRecord, Pending
from weft.errors import NcclRuleError
from weft.world.nccl import NcclExpected, NcclQueues
from weft.world.simulated import Communicator, Rank, enter_rank, host_alias, inside_rank, install

__all__ = ["EmulatedNccl", "Rank", "enter_rank", "inside_rank", "install"]


class _Operation(NamedTuple):
    """As ``torch.distributed.P2POp``."""

    op: str
    tensor: Tensor
    group: Any
    group_peer: int


class _Work:
    """What ``batch_isend_irecv`` returns: the messages of one group."""

    def __init__(self, moved: Pending[None], ordered: Any) -> None:
        self._moved, self._ordered = moved, ordered

    def wait(self) -> None:
        self._moved.wait()  # a real host would not wait here; its values are wanted at once in this world
        self._ordered.wait()

    def is_completed(self) -> bool:
        return self._ordered.is_completed()


class EmulatedNccl:
    """One rank's communicator: as ``calls``, as the backend and as the group of an `NcclSide`."""

    isend, irecv, P2POp = "isend", "irecv", _Operation

    def __init__(self, queues: NcclQueues, rank: int) -> None:
        self._queues, self._rank = queues, rank
        self._communicator = Communicator()
        self._aborted, self._thread = False, threading.current_thread()
        self.record: CallRecord | None = None  # whose messages come next: NCCL does not know, messages say it

    def side(self) -> NcclSide:
        """The class that real ranks use, on this."""
        return NcclSide(self, torch.device("sim", 0), self)

    def rank(self) -> int:
        return self._rank

    def eager_connect_single_device(self, device: torch.device) -> None:
        self._queues.connect(self._rank)

    def abort(self) -> None:
        self._aborted = True

    def batch_isend_irecv(self, operations: Sequence[_Operation]) -> list[_Work]:
        """One group. ``operations`` must not be empty, as for torch."""
        if not operations:
            raise ValueError("batch_isend_irecv takes at least one operation")
        if threading.current_thread() is not self._thread:
            raise NcclRuleError(f"NCCL: rank {self._rank} issues messages from a second thread: no order among them")
        if self._aborted:
            raise RuntimeError("NCCL communicator was aborted")
        assert self.record is not None
        record = self.record
        sent, asked = (
            [(one.group_peer, one.tensor) for one in operations if one.op == kind] for kind in (self.isend, self.irecv)
        )
        ordered = self._communicator.issue([tensor for _, tensor in sent], [tensor for _, tensor in asked])
        expected = NcclExpected(self._queues, record, [(peer, record.tag, host_alias(x)) for peer, x in asked])
        outgoing = [(peer, record.tag, host_alias(x)) for peer, x in sent]
        return [_Work(self._queues.issue(self._rank, record, outgoing, expected), ordered)]
