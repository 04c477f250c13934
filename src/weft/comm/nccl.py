"""Messages between devices, by NCCL or XCCL: one line of groups on each communicator, no tags. No GPU has run this yet.

The calls of torch.distributed it makes are few, and are given to it, so that the same class runs in a virtual world
against an emulation that holds it to NCCL's rules (`weft.world.emulated_nccl`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from weft.comm.device import is_capturing
from weft.comm.hang import HangDetector
from weft.comm.wire import CallRecord, Pending, WireMessage
from weft.errors import CommError

TAGLESS = frozenset({"nccl", "xccl"})  # torch's names of backends with one line for each communicator: CUDA, ROCm; XPU


class PostedWithExchange(Pending[None]):
    """Receives that are expected. They are posted with their exchange, and over when that is."""

    def __init__(self, record: CallRecord, messages: Sequence[WireMessage]) -> None:
        self.messages = messages
        self._works: list[Any] | None = None if messages else []
        super().__init__(lambda: None)
        self._place = record.place

    def join(self, works: list[Any]) -> None:
        """The works of the exchange they were posted with."""
        self._works = works

    def wait(self) -> None:
        if self._works is None:
            raise CommError(f"{self._place}: a receive was waited for before the exchange that posts it on NCCL")
        wait_for(self._works)


def wait_for(works: Sequence[Any]) -> None:
    """Order the current stream after these; the host goes on."""
    for work in works:
        work.wait()


class NcclSide:
    """The NCCL backend of a group, on the device of this process.

    Messages match in the order of issue, so all ranks must group them alike, with at most one message for each peer and
    direction in a group. What is wrong must be found before a batch is issued: an error in between would leave NCCL's
    group open. All is issued by the thread that computes.
    """

    def __init__(self, backend: Any, device: torch.device, calls: Any = dist) -> None:
        """``calls``: what has ``P2POp``, ``isend``, ``irecv`` and ``batch_isend_irecv``."""
        self._backend, self.device, self._calls = backend, device, calls
        backend.eager_connect_single_device(device)  # else the first message needs all ranks of the group

    def carries(self, messages: Sequence[WireMessage]) -> bool:
        """Whether these travel here: a batch is on one device."""
        return bool(messages) and messages[0][2].device.type == self.device.type

    def exchange(
        self,
        group: Any,
        record: CallRecord,
        sends: Sequence[WireMessage],
        expected: PostedWithExchange,
        detector: HangDetector | None = None,
    ) -> Pending[None]:
        """Start the messages of one group, those that are expected among them. ``wait()`` orders the current stream."""
        for messages in (sends, expected.messages):
            peers = [peer for peer, _, _ in messages]
            if len(set(peers)) < len(peers) or any(
                tensor.device != self.device or not tensor.is_contiguous() for _, _, tensor in messages
            ):
                raise CommError(
                    f"NCCL takes one contiguous message on {self.device} for each peer and direction, got "
                    f"{[(peer, str(tensor.device)) for peer, _, tensor in messages]} (rank {group.rank()})"
                )
        calls = self._calls
        operations = [
            calls.P2POp(op, tensor, group=group, group_peer=peer)
            for op, messages in ((calls.irecv, expected.messages), (calls.isend, sends))
            for peer, _, tensor in messages
        ]
        works = calls.batch_isend_irecv(operations) if operations else []
        expected.join(works)
        if works and detector is not None and not is_capturing(self.device):
            detector.follow(record, works)
        return Pending(lambda: wait_for(works))

    def meet(self, group: Any, name: str, members: Sequence[int]) -> None:
        """A byte from each of ``members`` to each other: the first messages of a pair hold up the host, later ones not.

        All of them must call it.
        """
        record = CallRecord(name, 0, "meet", (), 0)
        others = [rank for rank in members if rank != group.rank()]
        mine, theirs = (torch.zeros(len(others), 1, dtype=torch.uint8, device=self.device) for _ in range(2))
        expected = PostedWithExchange(record, [(rank, 0, theirs[at]) for at, rank in enumerate(others)])
        self.exchange(group, record, [(rank, 0, mine[at]) for at, rank in enumerate(others)], expected).wait()

    def close(self) -> None:
        """Make every wait on this communicator end."""
        with suppress(RuntimeError):
            self._backend.abort()
