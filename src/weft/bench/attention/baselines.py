"""What people use today for context-parallel softmax attention, written for the benchmark with weft's block kernels.

They differ from `weft.attention` only in what they send and when they wait, so the table compares schedules.

- ``strided``: all-gather by head strides on a contiguous layout. Everybody gets everything, the own keys are
  gathered with the rest, and nothing hides the first gather and the last reduction.
- ``ring``: whole blocks of keys and values go all the way round; in the backward their gradients go with them,
  one hop more, so that every rank adds to them in turn.
- ``local``: not a method: all keys are already here. The time no schedule can beat on this layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from weft.comm import Axis, Pending
from weft.ops.attention.blockwise import KVSchedule, backward_by_blocks, forward_by_blocks
from weft.ops.attention.kv_exchange import KVBlock, KVExchange
from weft.ops.attention.plan import KeySpan, Options
from weft.ops.sequence.layout import ANY_LENGTHS, Sequence, resolve, shard_runs


class Baseline(torch.autograd.Function):
    """Causal attention with one of the schedules below."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: Options, axis: Axis, schedule: KVSchedule
    ) -> Tensor:
        name, lengths, bounds = schedule.__name__, options.lengths, options.cu_seqlens
        call = axis.begin(name, options, metadata=(q.shape[1],) if lengths is None else None)
        if lengths is None:
            where = resolve(name, call, axis, options.layout, bounds)
        else:
            dealt = options.layout not in ANY_LENGTHS
            runs = shard_runs(sum(lengths), options.layout, axis.size, bounds) if dealt else None
            where = Sequence(axis, options.layout, lengths, bounds, runs)
        plan = options.plan(where)
        out, _, saved = forward_by_blocks(schedule, options, call, plan, q, k, v, begun=None)
        ctx.save_for_backward(*saved)
        ctx.how = options, axis, schedule, plan
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        options, axis, schedule, plan = ctx.how
        call = axis.begin(f"{schedule.__name__}.backward", options)
        dq, dk, dv, _ = backward_by_blocks(schedule, options, call, plan, ctx.saved_tensors, grad)
        return dq, dk, dv, None, None, None


def options_for(
    q: Tensor, k: Tensor, layout: str, strides: tuple[int, ...], sequence: Sequence | None = None
) -> Options:
    """The options of a baseline: causal, the same strides both ways; one document, or those of ``sequence``."""
    bounds, lengths = (None, None) if sequence is None else (sequence.bounds, sequence.lengths)
    return Options(
        q=(q.shape[0], *q.shape[2:]), kv_heads=k.shape[2], dtype=q.dtype, device=q.device.type, causal=True,
        scale=q.shape[-1] ** -0.5, window=(-1, -1), cu_seqlens=bounds, layout=layout, lengths=lengths, method="gather",
        strides=strides,
        backward_strides=strides, backward=None, grad_dtype=None, return_lse=False, gradients=(True,) * 3,
    )  # fmt: skip


def _everything(kv: KVExchange) -> tuple[list[KeySpan], list[int]]:
    """Where every rank's tokens lie in memory that holds all of them, and where each rank's begin."""
    begins = [0, *accumulate(kv.plan.lengths)]
    spans = [
        one
        for owner, length in enumerate(kv.plan.lengths)
        for one in kv.plan.place(owner, ((0, length),), begins[owner])
    ]
    return spans, begins


def strided(kv: KVExchange) -> Iterator[KVBlock]:
    """All-gather a few heads, compute them; reduce their gradients while the next are computed."""
    spans, begins = _everything(kv)
    assert kv.strides is not None
    steps = [slice(end - width, end) for end, width in zip(accumulate(kv.strides), kv.strides, strict=True)]
    mine = ((0, kv.k.shape[1]),)

    def fetch(heads: slice) -> tuple[Pending[None], Tensor]:
        width = heads.stop - heads.start
        whole = kv.view(kv.buffer(begins[-1], width), begins[-1], width)
        own = kv.pack(kv.buffer(kv.k.shape[1], width), mine, heads)
        whole[begins[kv.rank] : begins[kv.rank + 1]] = own
        incoming = [(other, whole[begins[other] : begins[other + 1]]) for other in kv.call.others]
        return kv.call.exchange([(other, own) for other in kv.call.others], incoming), whole

    returning: tuple[Pending[list[Tensor]], slice] | None = None
    coming = fetch(steps[0])
    for number, heads in enumerate(steps):
        pending, keys = coming
        pending.wait()
        if number + 1 < len(steps):
            coming = fetch(steps[number + 1])
        grads = torch.zeros_like(keys, dtype=kv.grad_dtype) if kv.is_backward else None
        yield kv.block(keys, spans, heads, grads)
        if grads is not None:
            if returning is not None:
                _add_up(kv, *returning)
            parts = [grads[begins[rank] : begins[rank + 1]] for rank in range(kv.call.size)]
            returning = kv.call.all_to_all(parts), heads  # also where the mask has left zeros
    if returning is not None:
        _add_up(kv, *returning)


def _add_up(kv: KVExchange, coming: Pending[list[Tensor]], heads: slice) -> None:
    for part in coming.wait():
        kv.add_grads(part, ((0, len(part)),), heads)


def ring(kv: KVExchange) -> Iterator[KVBlock]:
    """Pass whole blocks on while the one before is computed; lengths must be equal."""
    size, rank, tokens = kv.call.size, kv.rank, kv.k.shape[1]
    heads, whole = slice(0, kv.kv_heads), ((0, tokens),)
    after, before = (rank + 1) % size, (rank - 1) % size
    keys = kv.pack(kv.buffer(tokens, kv.kv_heads), whole, heads)
    arriving: tuple[Pending[None], Tensor] | None = None
    for hop in range(size):
        owner = (rank - hop) % size
        if hop + 1 < size:
            received = torch.empty_like(keys)
            pending_keys = kv.call.exchange([(after, keys)], [(before, received)])
        own = torch.zeros_like(keys, dtype=kv.grad_dtype) if kv.is_backward else None
        yield kv.block(keys, kv.plan.place(owner, whole), heads, own)
        if own is not None:
            if arriving is not None:
                arriving[0].wait()
                own += arriving[1]
            grads = torch.empty_like(own)
            arriving = kv.call.exchange([(after, own)], [(before, grads)]), grads
        if hop + 1 < size:
            pending_keys.wait()
            keys = received
    if arriving is not None:  # the sums are back at their owner
        pending, sums = arriving
        pending.wait()
        _add_up(kv, Pending(lambda: [sums]), heads)


def local(kv: KVExchange) -> Iterator[KVBlock]:
    """All keys at once, and nothing sent: what stands in for the others' is this rank's own."""
    spans, begins = _everything(kv)
    heads = slice(0, kv.kv_heads)
    keys = kv.view(kv.buffer(begins[-1], kv.kv_heads), begins[-1], kv.kv_heads)
    for begin, end in pairwise(begins):
        kv.pack(keys[begin:end].view(-1), ((0, min(end - begin, kv.k.shape[1])),), heads)
    grads = torch.zeros_like(keys, dtype=kv.grad_dtype) if kv.is_backward else None
    yield kv.block(keys, spans, heads, grads)
