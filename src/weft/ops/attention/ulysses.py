"""Ulysses: heads exchanged for sequence, so that a rank attends with some of the heads over the tokens of all ranks.

On two levels, the tokens of a group of *inner* ranks: these exchange heads for sequence, and over the *outer* ranks
(one of each group, all with the same heads) keys and values then travel by gather or ring. A rank is outer * inner
ranks + inner. With one level all ranks are inner ones, and there is a single outer one.

A rank's heads go in parts (see `heads`): while one part is computed, the next comes in and the one before goes back.
All tensors of a part travel together: one message for each peer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter

import torch
from torch import Tensor

from weft.comm import Call, Pending
from weft.ops.attention.blockwise import Grads, KVSchedule, Saved, backward_by_blocks, forward_by_blocks
from weft.ops.attention.heads import HeadPart, group_runs, head_parts
from weft.ops.attention.kv_exchange import KVBlock, KVExchange
from weft.ops.attention.plan import AttentionPlan, Options
from weft.ops.sequence.runs import TokenRun

AHEAD = 2  # parts on their way before the first is computed

Piece = tuple[int, Tensor]  # [B, S, n, D] of n heads from this one on
Cut = Callable[[HeadPart], slice]
by_query, by_key = attrgetter("queries"), attrgetter("keys")


def begin_by_heads(
    options: Options, call: Call, plan: AttentionPlan, q: Tensor, k: Tensor, v: Tensor
) -> list[list[Tensor]]:
    """Pack the first parts, while lengths are gathered: packing needs only the own one."""
    heads = HeadExchange.of(options, call, plan)
    cuts = [(q, by_query), (k, by_key), (v, by_key)]
    return [heads.pack(number, cuts) for number in range(min(AHEAD, len(heads.own_parts)))]


def forward_by_heads(
    schedule: KVSchedule, options: Options, call: Call, plan: AttentionPlan, q: Tensor, k: Tensor, v: Tensor,
    packed: list[list[Tensor]] | None, sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Saved]:  # fmt: skip
    """q, k and v become more tokens of some heads; out (and lse, if asked for) goes back."""
    heads = HeadExchange.of(options, call, plan)
    kept: list[Tensor] = []

    def attend(number: int, tensors: list[Tensor]) -> list[Pending[list[list[Piece]]]]:
        mine_q, mine_k, mine_v = tensors
        if (part := heads.own_parts[number]).heads:
            own = None if sinks is None else sinks[part.queries]
            out, lse, saved = forward_by_blocks(
                schedule, options, heads.outer, heads.plan, mine_q, mine_k, mine_v, None, own
            )  # fmt: skip
        else:
            out, lse = mine_v, mine_q.new_empty(mine_q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
            saved = mine_q, mine_k, mine_v, out, lse
        kept.extend(saved)
        going = [heads.to_tokens(number, [out], by_query)]
        return going + ([heads.to_tokens(number, [lse[..., None]], by_query)] if options.return_lse else [])

    out, *lse = heads.in_parts([(q, by_query), (k, by_key), (v, by_key)], attend, packed or [])
    return out, lse[0][..., 0] if lse else out.new_empty(0), tuple(kept)


def backward_by_heads(
    schedule: KVSchedule, options: Options, call: Call, plan: AttentionPlan, saved: Saved, grad: Tensor,
    grad_lse: Tensor | None, sinks: Tensor | None,
) -> Grads:  # fmt: skip
    """The gradient of out (first that of lse) comes in, those of q, k and v go back: whole sums, but for keys of heads
    that are split.

    Those of the sinks stay: of this rank's heads, for the tokens that it computed; of others zero.
    """
    heads = HeadExchange.of(options, call, plan)
    dsinks = None if sinks is None else torch.zeros_like(sinks, dtype=saved[4].dtype)
    of_lse: list[Tensor] = []
    if grad_lse is not None:
        of_lse = [pending.wait()[0][..., 0] for pending in heads.bring([(grad_lse[..., None], by_query)])]

    def wire(part: HeadPart) -> torch.dtype:
        return wire_dtype(part, options.dtype, options.grad_dtype)

    def attend(number: int, tensors: list[Tensor]) -> list[Pending[list[list[Piece]]]]:
        mine, part = saved[5 * number : 5 * number + 5], heads.own_parts[number]
        dq, dk, dv = mine[:3]
        if part.heads:
            own = None if sinks is None else sinks[part.queries]
            dlse = of_lse[number] if of_lse else None
            dq, dk, dv, of_sinks = backward_by_blocks(
                schedule, options, heads.outer, heads.plan, mine, tensors[0], dlse, own
            )  # fmt: skip
            if dsinks is not None and of_sinks is not None:
                dsinks[part.queries] = of_sinks
        return [
            heads.to_tokens(number, [dq.to(options.dtype)], by_query),
            heads.to_tokens(number, [dk.to(wire(part)), dv.to(wire(part))], by_key, wire),
        ]

    dq, dk, dv = heads.in_parts([(grad, by_query)], attend, [])
    return dq, dk, dv, dsinks


def wire_dtype(part: HeadPart, dtype: torch.dtype, grad_dtype: torch.dtype | None) -> torch.dtype:
    """Of dk and dv on their way: what is summed when it arrives is not rounded before, unless that is asked for."""
    return grad_dtype or (torch.promote_types(dtype, torch.float32) if part.is_split else dtype)


@dataclass(frozen=True)
class HeadExchange:
    """A rank's place among the inner ranks, who exchange heads for sequence, and among the outer ones."""

    inner: Call
    outer: Call
    plan: AttentionPlan  # of the outer ranks, each with the tokens of its group in the order of the sequence
    lengths: tuple[int, ...]  # tokens of each inner rank
    runs: tuple[TokenRun, ...]  # of the inner ranks, in the order of the sequence; offsets within the group
    parts: tuple[tuple[HeadPart, ...], ...]  # by inner rank

    @staticmethod
    def of(options: Options, call: Call, plan: AttentionPlan) -> HeadExchange:
        inner = options.inner or call.size
        group, member = divmod(call.rank, inner)
        runs, placed = group_runs(plan.runs, call.size // inner, inner)
        lengths = [plan.lengths[at : at + inner] for at in range(0, call.size, inner)]
        return HeadExchange(
            call.among(range(group * inner, (group + 1) * inner)),
            call.among(range(member, call.size, inner)),
            options.plan_runs(runs, tuple(map(sum, lengths))),
            lengths[group],
            placed[group],
            head_parts(options.q[1], options.kv_heads, inner),
        )

    @property
    def own_parts(self) -> tuple[HeadPart, ...]:
        return self.parts[self.inner.rank]

    def bring(self, tensors: Sequence[tuple[Tensor, Cut]]) -> list[Pending[list[Tensor]]]:
        """``tensors``, all parts at once."""
        found = []
        for number, part in enumerate(self.own_parts):
            cuts = [(cut(part), x.shape[3]) for x, cut in tensors]
            shapes = [(heads.stop - heads.start, dim) for heads, dim in cuts]
            found.append(self.to_heads(self.pack(number, tensors), shapes))
        return found

    def in_parts(
        self,
        tensors: Sequence[tuple[Tensor, Cut]],
        attend: Callable[[int, list[Tensor]], list[Pending[list[list[Piece]]]]],
        packed: Sequence[list[Tensor]],
    ) -> list[Tensor]:
        """Bring ``tensors`` in part by part, ahead of ``attend``, and join what it sends back: ``[B, S, h, D]``."""
        count = len(self.own_parts)

        def send_for(number: int) -> Pending[list[Tensor]]:
            ready = packed[number] if number < len(packed) else self.pack(number, tensors)
            cuts = [(cut(self.own_parts[number]), x.shape[3]) for x, cut in tensors]
            return self.to_heads(ready, [(heads.stop - heads.start, dim) for heads, dim in cuts])

        coming = [send_for(number) for number in range(min(AHEAD, count))]
        going: list[list[Pending[list[list[Piece]]]]] = []
        back: list[list[list[Piece]]] = []

        def take_back() -> None:
            back.append([pieces for pending in going[len(back)] for pieces in pending.wait()])

        for number in range(count):
            if number >= AHEAD:
                take_back()  # messages are waited for in the order in which they were sent
            going.append(attend(number, coming[number].wait()))
            if number + AHEAD < count:
                coming.append(send_for(number + AHEAD))
        while len(back) < count:
            take_back()
        return [_join(chain.from_iterable(zip(*parts, strict=True))) for parts in zip(*back, strict=True)]

    def pack(self, number: int, tensors: Sequence[tuple[Tensor, Cut]]) -> list[Tensor]:
        """For each inner rank the heads of its part of all ``[B, S, h, D]``, as ``[S, B, elements]``: one message."""
        flat = [(x.transpose(0, 1).flatten(2), cut, x.shape[3]) for x, cut in tensors]

        def columns(heads: slice, dim: int) -> slice:
            return slice(heads.start * dim, heads.stop * dim)

        return [
            torch.cat([x[..., columns(cut(parts[number]), dim)] for x, cut, dim in flat], dim=2) for parts in self.parts
        ]

    def to_heads(self, packed: Sequence[Tensor], shapes: Sequence[tuple[int, int]]) -> Pending[list[Tensor]]:
        """Each tensor becomes ``[B, tokens of the group, n, D]`` of this rank's part, in the order of the sequence.

        ``shapes``: (n, D) of each.
        """
        widths = [heads * dim for heads, dim in shapes]
        whole = packed[0].new_empty(sum(self.lengths), packed[0].shape[1], sum(widths))
        slices = whole.split(list(self.lengths))
        coming = self.inner.exchange(list(enumerate(packed)), list(enumerate(slices)))

        def finish() -> list[Tensor]:
            coming.wait()
            pieces = [slices[run.rank][run.start : run.start + run.length] for run in self.runs]
            ordered = whole if self._is_ordered() else torch.cat(pieces)
            split = ordered.split(widths, dim=2)
            return [x.unflatten(2, shape).transpose(0, 1) for x, shape in zip(split, shapes, strict=True)]

        return Pending(finish)

    def _is_ordered(self) -> bool:
        """Whether the ranks' slices, one after the other, are in the order of the sequence."""
        return all(sum(self.lengths[: run.rank]) + run.start == run.offset for run in self.runs)

    def to_tokens(
        self, number: int, tensors: Sequence[Tensor], cut: Cut, dtype: Callable[[HeadPart], torch.dtype] | None = None
    ) -> Pending[list[list[Piece]]]:
        """The way back: ``[B, tokens of the group, n, D]`` of this rank's part becomes ``[B, S, n, D]`` of the parts of
        all inner ranks, for each tensor. ``dtype``: that of a part, where it is not the same for all.
        """
        whole = torch.cat([x.transpose(0, 1).flatten(2) for x in tensors], dim=2)
        outgoing = []
        for rank in range(self.inner.size):
            runs = sorted((run for run in self.runs if run.rank == rank), key=lambda run: run.start)
            cuts = [whole[run.offset : run.offset + run.length] for run in runs] or [whole[:0]]
            outgoing.append((rank, cuts[0] if len(cuts) == 1 else torch.cat(cuts)))
        parts = [(part, cut(part).stop - cut(part).start) for part in (parts[number] for parts in self.parts)]
        dims = [x.shape[3] for x in tensors]
        shape = self.lengths[self.inner.rank], whole.shape[1]
        back = [
            whole.new_empty(*shape, heads * sum(dims), dtype=whole.dtype if dtype is None else dtype(part))
            for part, heads in parts
        ]
        coming = self.inner.exchange(outgoing, list(enumerate(back)))

        def finish() -> list[list[Piece]]:
            coming.wait()
            split = [x.split([heads * dim for dim in dims], dim=2) for x, (_, heads) in zip(back, parts, strict=True)]
            return [
                [
                    (cut(part).start, columns[index].unflatten(2, (heads, dim)).transpose(0, 1))
                    for columns, (part, heads) in zip(split, parts, strict=True)
                ]
                for index, dim in enumerate(dims)
            ]

        return Pending(finish)


def _join(pieces: Iterable[Piece]) -> Tensor:
    """All heads of ``[B, S, h, D]``. Pieces of the same head are summed, in the order given and at least in fp32."""
    joined: dict[int, Tensor] = {}
    for first, x in pieces:
        if first in joined and x.shape[2]:
            joined[first] = joined[first].to(torch.promote_types(x.dtype, torch.float32)) + x
        elif x.shape[2]:
            joined[first] = x
    return torch.cat(list(joined.values()), dim=2)


def own_only(kv: KVExchange) -> Iterator[KVBlock]:
    """The single block of a rank that holds the whole sequence."""
    yield from kv.own(slice(0, kv.query_heads))
