"""What gather and ring share: keys that are at hand for a while, and gradients that go back to their owner.

Keys and values travel together, token first: ``[tokens, 2, B, heads, D]``. So a range of tokens is one message
without a copy for each receiver, and ranges from several owners are one tensor of keys for the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.attention.geometry import Geometry, Held, Ranges, count, locate
from weft.comm import Axis, Pending
from weft.comm.axis import Message


@dataclass
class Stage:
    """Keys that this rank's queries can be computed against now. Gradients are added to the last two."""

    heads: slice  # of the key/value heads
    held: tuple[Held, ...]
    keys: Tensor  # [B, w, N, D]
    values: Tensor
    grad_keys: Tensor | None  # as keys, at least fp32; None in the forward
    grad_values: Tensor | None


@dataclass
class Trip:
    """One rank's part in a forward or backward: its own keys and values, and the way to everybody else's.

    ``dk`` and ``dv`` (backward only) sum, at least in fp32, what this and the other ranks say about the own keys:
    first the own block as far as it is computed first, then the others in the method's fixed order.
    """

    call: Axis
    geometry: Geometry
    k: Tensor  # [B, S, Hk, D]
    v: Tensor
    strides: tuple[int, ...]
    grad_dtype: torch.dtype
    dk: Tensor | None = None
    dv: Tensor | None = None
    local_first: bool = True  # False is a yardstick for tests and benchmarks: the first messages are in the open

    @property
    def rank(self) -> int:
        return self.call.rank

    @property
    def is_backward(self) -> bool:
        return self.dk is not None

    @property
    def kv_heads(self) -> int:
        return self.k.shape[2]

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.call.size) if rank != self.rank]

    def own(self, heads: slice) -> list[Stage]:
        """The rank's own keys, which never travel; nothing where there are none of them."""
        if heads.start >= heads.stop or not self.k.shape[1]:
            return []
        held = tuple(self.geometry.place(self.rank, ((0, self.k.shape[1]),)))
        mine = [None if x is None else x[:, :, heads].transpose(1, 2) for x in (self.k, self.v, self.dk, self.dv)]
        assert mine[0] is not None and mine[1] is not None
        return [Stage(heads, held, mine[0], mine[1], mine[2], mine[3])]

    def split_own(self) -> tuple[slice, slice]:
        """The heads whose own block comes before the others' keys, to hide the first messages, and after them.

        The forward sends nothing at its end, so all come first. The backward's last gradients travel under the second
        half (with a single head: under all of it).
        """
        first = 0 if not self.local_first else self.kv_heads // 2 if self.is_backward else self.kv_heads
        return slice(0, first), slice(first, self.kv_heads)

    def room(self, tokens: int, heads: int, dtype: torch.dtype | None = None) -> Tensor:
        """Memory for the keys and values of some tokens, flat."""
        return self.k.new_empty(tokens * 2 * self.k.shape[0] * heads * self.k.shape[3], dtype=dtype)

    def shape(self, memory: Tensor, tokens: int, heads: int) -> Tensor:
        """The beginning of `room` as ``[tokens, 2, B, heads, D]``."""
        size = (tokens, 2, self.k.shape[0], heads, self.k.shape[3])
        return memory[: tokens * 2 * self.k.shape[0] * heads * self.k.shape[3]].view(size)

    def pack(self, memory: Tensor, ranges: Ranges, heads: slice) -> Tensor:
        """Copy the rank's own ranges into ``memory``, one after the other."""
        packed = self.shape(memory, count(ranges), heads.stop - heads.start)
        at = 0
        for start, length in ranges:
            for index, x in enumerate((self.k, self.v)):
                packed[at : at + length, index].copy_(x[:, start : start + length, heads].movedim(1, 0))
            at += length
        return packed

    def stage(self, kv: Tensor, held: Sequence[Held], heads: slice, grads: Tensor | None) -> Stage:
        """Keys and values that have arrived as ``[N, 2, B, w, D]``."""
        parts = [None, None] if grads is None else [grads[:, index].permute(1, 2, 0, 3) for index in (0, 1)]
        return Stage(heads, tuple(held), kv[:, 0].permute(1, 2, 0, 3), kv[:, 1].permute(1, 2, 0, 3), *parts)


def messages(peer: int, memory: Tensor, wanted: Ranges, present: Ranges, at: int = 0) -> list[Message]:
    """One message a range: ``wanted`` out of ``memory``, which holds ``present`` from ``at`` on."""
    found = []
    for start, length in wanted:
        first = at + locate(present, start)
        found.append((peer, memory[first : first + length]))
    return found


class Returns:
    """Gradients of borrowed keys on their way to their owners, one batch at a time while the next is computed."""

    def __init__(self, trip: Trip, tokens: int, borrowed: int, heads: int) -> None:
        """Room for ``tokens`` that this rank computes and for ``borrowed`` of its own that others compute, at most."""
        self._trip = trip
        wide = torch.promote_types(trip.k.dtype, torch.float32)
        self._sums = [trip.room(tokens, heads, wide) for _ in range(2)]
        rounded = trip.grad_dtype != wide
        self._rounded = trip.room(tokens, heads, trip.grad_dtype) if rounded else None
        self._inbox = trip.room(borrowed, heads, trip.grad_dtype)
        self._flying: tuple[Pending[None], Tensor, list[tuple[int, Ranges]], slice] | None = None
        self._turn = 0

    def blank(self, tokens: int, heads: int) -> Tensor:
        """Zeros to sum the next batch in, ``[tokens, 2, B, heads, D]``; the batch before may still be travelling."""
        self._turn = 1 - self._turn
        return self._trip.shape(self._sums[self._turn], tokens, heads).zero_()

    def send(
        self,
        sums: Tensor,
        owners: Sequence[tuple[int, Ranges, Ranges, int]],
        borrowers: Sequence[tuple[int, Ranges]],
        heads: slice,
    ) -> None:
        """Send a batch home: to each (owner, ranges, ranges present, where they begin); take what borrowers send."""
        self.settle()
        trip, width = self._trip, heads.stop - heads.start
        if self._rounded is not None:
            sums = trip.shape(self._rounded, sums.shape[0], width).copy_(sums)
        outgoing = [
            message
            for owner, ranges, present, at in owners
            for message in messages(owner, sums, ranges, present, at)
        ]  # fmt: skip
        inbox = trip.shape(self._inbox, sum(count(ranges) for _, ranges in borrowers), width)
        incoming, at = [], 0
        for borrower, ranges in borrowers:
            incoming += messages(borrower, inbox, ranges, ranges, at)
            at += count(ranges)
        self._flying = trip.call.exchange(outgoing, incoming), inbox, list(borrowers), heads

    def settle(self) -> None:
        """Wait for the batch under way and add it to the own gradients, borrower by borrower."""
        if self._flying is None:
            return
        pending, inbox, borrowers, heads = self._flying
        pending.wait()
        self._flying = None
        at = 0
        for _, ranges in borrowers:
            for start, length in ranges:
                for index, total in enumerate((self._trip.dk, self._trip.dv)):
                    assert total is not None
                    total[:, start : start + length, heads].add_(inbox[at : at + length, index].movedim(0, 1))
                at += length
