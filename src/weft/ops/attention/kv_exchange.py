"""What gather and ring share: keys that are at hand for a while, and gradients that go back to their owner.

Keys and values travel together, token first: ``[tokens, B * heads * (D + E)]``, a token's keys (of size D) before its
values (E). So a range of tokens is one message without a copy for each receiver, and ranges from several owners are one
tensor of keys for the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.comm import Call, Pending
from weft.ops.attention.plan import AttentionPlan, KeySpan, Range, Ranges, count


@dataclass
class KVBlock:
    """Keys that this rank's queries can be computed against now. Gradients are added to the last two."""

    query_heads: slice  # that are computed against them
    spans: tuple[KeySpan, ...]
    keys: Tensor  # [B, w, N, D]
    values: Tensor  # [B, w, N, E]
    grad_keys: Tensor | None  # as keys, at least fp32; None in the forward
    grad_values: Tensor | None  # as values


@dataclass
class KVExchange:
    """One rank's part in a forward or backward: its own keys and values, and the way to everybody else's.

    ``dk`` and ``dv`` (backward only) sum, at least in fp32, what this and the other ranks say about the own keys:
    first the own block as far as it is computed first, then the others in the method's fixed order.
    """

    call: Call
    plan: AttentionPlan
    k: Tensor  # [B, S, Hk, D]
    v: Tensor  # [B, S, Hk, E]
    query_heads: int
    strides: tuple[int, ...] | None  # None: `gather` chooses
    dk: Tensor | None = None
    dv: Tensor | None = None
    grad_dtype: torch.dtype | None = None  # of gradients on their way
    local_first: bool = True  # False is a baseline for tests and benchmarks: nothing hides the first messages
    started: bool = False  # the own block of `head_start` was computed while lengths were gathered

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
    def shared(self) -> int:
        """Query heads of a key/value head."""
        return self.query_heads // self.kv_heads

    def own(self, query_heads: slice) -> list[KVBlock]:
        """The rank's own keys, which never travel; nothing where there are none of them."""
        if query_heads.start >= query_heads.stop or not self.k.shape[1]:
            return []
        heads = slice(query_heads.start // self.shared, -(-query_heads.stop // self.shared))
        spans = tuple(self.plan.place(self.rank, ((0, self.k.shape[1]),)))
        mine = [None if x is None else x[:, :, heads].transpose(1, 2) for x in (self.k, self.v, self.dk, self.dv)]
        assert mine[0] is not None and mine[1] is not None
        return [KVBlock(query_heads, spans, mine[0], mine[1], mine[2], mine[3])]

    @property
    def head_start(self) -> slice:
        """The query heads whose own block a forward computes while lengths are gathered: those of one key/value head,
        of a single one half. The rest hides the first keys. The cut is always the same, and so are the bits."""
        if self.is_backward or not self.local_first:
            return slice(0, 0)
        return slice(0, self.shared if self.kv_heads > 1 else self.shared // 2)

    @property
    def _first(self) -> int:
        """Query heads whose own block comes before the others' keys, to hide the first messages.

        The forward sends nothing at its end, so all come first. The backward's last gradients travel under the second
        half (with a single head: under all of it).
        """
        return self.shared * (0 if not self.local_first else self.kv_heads // 2 if self.is_backward else self.kv_heads)

    def own_first(self) -> list[KVBlock]:
        """The own blocks that come before the others' keys."""
        rest = self.own(slice(self.head_start.stop, self._first))
        return rest if self.started else self.own(self.head_start) + rest

    def own_last(self) -> list[KVBlock]:
        """The own blocks that come after the others' keys."""
        return self.own(slice(self._first, self.query_heads))

    def buffer(self, tokens: int, heads: int, dtype: torch.dtype | None = None) -> Tensor:
        """Memory for the keys and values of some tokens, flat."""
        return self.k.new_empty(tokens * self._width(heads), dtype=dtype)

    def view(self, memory: Tensor, tokens: int, heads: int) -> Tensor:
        """The beginning of a `buffer` as ``[tokens, B * heads * (D + E)]``."""
        return memory[: tokens * self._width(heads)].view(tokens, self._width(heads))

    def _width(self, heads: int) -> int:
        return self.k.shape[0] * heads * (self.k.shape[3] + self.v.shape[3])

    def split(self, kv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
        """The keys ``[tokens, B, heads, D]`` and values ``[tokens, B, heads, E]`` in a `view`."""
        batch, middle = self.k.shape[0], self.k.shape[0] * heads * self.k.shape[3]
        keys, values = kv[:, :middle], kv[:, middle:]
        return keys.unflatten(1, (batch, heads, self.k.shape[3])), values.unflatten(1, (batch, heads, self.v.shape[3]))

    def pack(self, memory: Tensor, ranges: Ranges, heads: slice) -> Tensor:
        """Copy the rank's own ranges into ``memory``, one after the other."""
        packed = self.view(memory, count(ranges), heads.stop - heads.start)
        parts = self.split(packed, heads.stop - heads.start)
        at = 0
        for start, length in ranges:
            for part, x in zip(parts, (self.k, self.v), strict=True):
                part[at : at + length].copy_(x[:, start : start + length, heads].movedim(1, 0))
            at += length
        return packed

    def block(self, kv: Tensor, spans: Sequence[KeySpan], heads: slice, grads: Tensor | None) -> KVBlock:
        """Keys and values that have arrived, in a `view`; ``grads``: where to add their gradients, in another."""
        query_heads, width = slice(heads.start * self.shared, heads.stop * self.shared), heads.stop - heads.start
        keys, values = (x.permute(1, 2, 0, 3) for x in self.split(kv, width))
        grad_keys, grad_values = (
            (None, None) if grads is None else (x.permute(1, 2, 0, 3) for x in self.split(grads, width))
        )
        return KVBlock(query_heads, tuple(spans), keys, values, grad_keys, grad_values)

    def add_grads(self, received: Tensor, ranges: Ranges, heads: slice) -> None:
        """Add what came home for the rank's own ranges, one after the other in a `view`."""
        at = 0
        for start, length in ranges:
            parts = self.split(received[at : at + length], heads.stop - heads.start)
            for part, total in zip(parts, (self.dk, self.dv), strict=True):
                assert total is not None
                total[:, start : start + length, heads].add_(part.movedim(0, 1))
            at += length


def take(memory: Tensor, wanted: Ranges, present: Ranges, at: int = 0) -> Tensor:
    """``wanted`` out of ``memory``, which holds ``present`` from ``at`` on: a view where they are neighbours there.

    One tensor, and so one message for each peer, whatever the mask looks like.
    """
    places = [(at + place, length) for place, length in _locate(wanted, present)]
    if not places:
        return memory[:0]
    first, tokens = places[0][0], count(wanted)
    if places[-1][0] + places[-1][1] == first + tokens:
        return memory[first : first + tokens]
    joined = memory.new_empty(tokens, *memory.shape[1:])
    filled = 0
    for start, length in places:
        joined[filled : filled + length] = memory[start : start + length]
        filled += length
    return joined


def rearrange(memory: Tensor, spans: Sequence[KeySpan], wanted: Sequence[KeySpan], out: Tensor) -> Tensor:
    """Tokens that lie as ``spans`` say, one after the other as ``wanted`` says, in ``out``."""
    found = {span.offset: memory[span.at : span.at + span.length] for span in spans}
    return torch.cat([found[span.offset] for span in wanted], out=out)


def _locate(wanted: Ranges, present: Ranges) -> list[Range]:
    """Where ``wanted`` lies in memory that holds ``present``, which has all of it, one after the other."""
    found: list[Range] = []
    number = at = 0
    for start, length in wanted:
        while sum(present[number]) <= start:
            at += present[number][1]
            number += 1
        assert present[number][0] <= start and start + length <= sum(present[number]), f"{wanted} is not in {present}"
        found.append((at + start - present[number][0], length))
    return found


class GradReturn:
    """Gradients of others' keys on their way to their owners, one batch at a time while the next is computed."""

    def __init__(
        self, kv: KVExchange, tokens: int, own_tokens: int, heads: int,
        order: tuple[Sequence[KeySpan], Sequence[KeySpan]] | None = None,
    ) -> None:  # fmt: skip
        """Buffers for ``tokens`` that this rank computes and for ``own_tokens`` that others compute, at most.

        ``order``: how they lie, and how they travel, if that is not the same.
        """
        self._kv, self._order = kv, order
        wide = torch.promote_types(kv.k.dtype, torch.float32)
        self._rounded = kv.buffer(tokens, heads, kv.grad_dtype) if kv.grad_dtype != wide else None
        self._rearranged = kv.buffer(tokens, heads, kv.grad_dtype) if order is not None else None
        copied = self._rounded is not None or self._rearranged is not None
        self._sums = [kv.buffer(tokens, heads, wide) for _ in range(1 if copied else 2)]
        self._received = kv.buffer(own_tokens, heads, kv.grad_dtype)
        self._pending: tuple[Pending[None], Tensor, list[tuple[int, Ranges]], slice] | None = None
        self._turn = 0

    def zeros(self, tokens: int, heads: int) -> Tensor:
        """Zeros to sum the next batch in, as a `view`; the batch before, or a copy, may still be travelling."""
        self._turn = (self._turn + 1) % len(self._sums)
        return self._kv.view(self._sums[self._turn], tokens, heads).zero_()

    def send(
        self,
        sums: Tensor,
        owners: Sequence[tuple[int, Ranges, Ranges, int]],
        readers: Sequence[tuple[int, Ranges]],
        heads: slice,
    ) -> None:
        """Send a batch home: to each (owner, ranges, ranges present, where they begin); take what readers send."""
        self.flush()
        kv, width = self._kv, heads.stop - heads.start
        if self._rounded is not None:
            sums = kv.view(self._rounded, sums.shape[0], width).copy_(sums)
        if self._rearranged is not None and self._order is not None:
            sums = rearrange(sums, *self._order, kv.view(self._rearranged, sums.shape[0], width))
        outgoing = [(owner, take(sums, ranges, present, at)) for owner, ranges, present, at in owners]
        received = kv.view(self._received, sum(count(ranges) for _, ranges in readers), width)
        incoming, at = [], 0
        for reader, ranges in readers:
            incoming.append((reader, received[at : at + count(ranges)]))
            at += count(ranges)
        self._pending = kv.call.exchange(outgoing, incoming), received, list(readers), heads

    def flush(self) -> None:
        """Wait for the batch under way and add it to the own gradients, reader by reader."""
        if self._pending is None:
            return
        pending, received, readers, heads = self._pending
        pending.wait()
        self._pending = None
        at = 0
        for _, ranges in readers:
            self._kv.add_grads(received[at : at + count(ranges)], ranges, heads)
            at += count(ranges)
