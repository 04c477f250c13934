"""Ulysses: heads exchanged for sequence, so that every rank attends over the whole sequence with some of the heads.

A rank's key/value heads go in parts, each with its query heads: while one part is computed, the next comes in and
the one before goes back. All tensors of a part travel together: one message for each peer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from weft.comm import Axis, Call, Pending
from weft.comm.wire import SoloWire
from weft.ops.attention.blockwise import Grads, Saved, backward_by_blocks, forward_by_blocks
from weft.ops.attention.gather import choose_strides
from weft.ops.attention.kv_exchange import KVBlock, KVExchange
from weft.ops.attention.plan import AttentionPlan, Options, plan_attention
from weft.ops.sequence.layout import TokenRun

AHEAD = 2  # parts on their way before the first is computed


def begin_by_heads(options: Options, call: Call, plan: AttentionPlan, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Pack the first parts, while lengths are gathered: packing needs only the own one."""
    return [_pack(call.size, [q, k, v], part, k.shape[2]) for part in _parts(k.shape[2], call.size)[:AHEAD]]


def forward_by_heads(
    options: Options, call: Call, plan: AttentionPlan, q: Tensor, k: Tensor, v: Tensor, packed: list[Tensor] | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Saved]:  # fmt: skip
    """q, k and v become whole sequences of some heads; out (and lse, if asked for) goes back."""
    alone, whole = _alone(options, plan)
    kept: list[Tensor] = []

    def compute(part: int, tensors: list[Tensor]) -> list[Pending[list[Tensor]]]:
        mine_q, mine_k, mine_v = tensors
        mine_sinks = None if sinks is None else _own_part(call, sinks, _parts(k.shape[2], call.size)[part], k.shape[2])
        out, lse, saved = forward_by_blocks(_own_only, options, alone, whole, mine_q, mine_k, mine_v, None, mine_sinks)
        kept.extend(saved)
        going = [_to_tokens(call, plan, [out])]
        return going + ([_to_tokens(call, plan, [lse[..., None]])] if options.return_lse else [])

    out, *lse = _in_parts(call, plan, [q, k, v], k.shape[2], compute, packed or [])
    return out, lse[0][..., 0] if lse else out.new_empty(0), tuple(kept)


def backward_by_heads(
    options: Options, call: Call, plan: AttentionPlan, saved: Saved, grad: Tensor, grad_lse: Tensor | None,
    sinks: Tensor | None,
) -> Grads:  # fmt: skip
    """The gradient of out (first that of lse) comes in, those of q, k and v go back: whole sums already. Those of the
    sinks stay: of this rank's heads they are whole, of the others zero."""
    alone, whole = _alone(options, plan)
    dtype = saved[0].dtype
    kv_heads = call.size * sum(keys.shape[2] for keys in saved[1::5])
    dsinks = None if sinks is None else torch.zeros_like(sinks, dtype=saved[4].dtype)

    of_lse: Tensor | None = None
    if grad_lse is not None:
        every = slice(0, kv_heads // call.size)
        packed = _pack(call.size, [grad_lse[..., None]], every, kv_heads)
        of_lse = _to_heads(call, plan, packed, [(grad_lse.shape[2] // call.size, 1)]).wait()[0][..., 0]

    def compute(part: int, tensors: list[Tensor]) -> list[Pending[list[Tensor]]]:
        mine = saved[5 * part : 5 * part + 5]
        own = _parts(kv_heads, call.size)[part]
        mine_sinks = None if sinks is None else _own_part(call, sinks, own, kv_heads)
        heads = slice(*(edge * mine[0].shape[2] // mine[1].shape[2] for edge in (own.start, own.stop)))
        mine_lse = None if of_lse is None else of_lse[:, :, heads]
        dq, dk, dv, of_sinks = backward_by_blocks(
            _own_only, options, alone, whole, mine, tensors[0], mine_lse, mine_sinks
        )
        if dsinks is not None and of_sinks is not None:
            _own_part(call, dsinks, own, kv_heads).copy_(of_sinks)
        wire = options.grad_dtype or dtype
        return [
            _to_tokens(call, plan, [dq.to(dtype)]),
            _to_tokens(call, plan, [dk.to(wire), dv.to(wire)]),
        ]

    dq, dk, dv = _in_parts(call, plan, [grad], kv_heads, compute, [])
    return dq, dk, dv, dsinks


def _own_part(call: Call, x: Tensor, part: slice, kv_heads: int) -> Tensor:
    """A view of a number for each query head ``[H]``: those of a part of this rank's heads."""
    return x.view(call.size, kv_heads // call.size, -1)[call.rank, part].flatten()


def _parts(kv_heads: int, size: int) -> list[slice]:
    """A rank's key/value heads in parts, from a single head on: nothing hides the first part and the last."""
    strides = choose_strides(kv_heads // size, kv_heads // size)
    return [slice(end - stride, end) for end, stride in zip(accumulate(strides), strides, strict=True)]


def _in_parts(
    call: Call,
    plan: AttentionPlan,
    tensors: Sequence[Tensor],
    kv_heads: int,
    compute: Callable[[int, list[Tensor]], list[Pending[list[Tensor]]]],
    packed: Sequence[Tensor],
) -> list[Tensor]:
    """Bring ``tensors`` in part by part, ahead of ``compute``, and join what it sends back: ``[B, S, h, D]``."""
    parts = _parts(kv_heads, call.size)

    def send_for(number: int) -> Pending[list[Tensor]]:
        ready = packed[number] if number < len(packed) else _pack(call.size, tensors, parts[number], kv_heads)
        width = parts[number].stop - parts[number].start
        return _to_heads(call, plan, ready, [(x.shape[2] // kv_heads * width, x.shape[3]) for x in tensors])

    coming = [send_for(number) for number in range(min(AHEAD, len(parts)))]
    going: list[list[Pending[list[Tensor]]]] = []
    back: list[list[Tensor]] = []

    def take_back() -> None:
        back.append([tensor for pending in going[len(back)] for tensor in pending.wait()])

    for number in range(len(parts)):
        if number >= AHEAD:
            take_back()  # messages are waited for in the order in which they were sent
        going.append(compute(number, coming[number].wait()))
        if number + AHEAD < len(parts):
            coming.append(send_for(number + AHEAD))
    while len(back) < len(parts):
        take_back()
    return [torch.cat(pieces, dim=3).flatten(2, 3) for pieces in zip(*back, strict=True)]


def _pack(size: int, tensors: Sequence[Tensor], part: slice, kv_heads: int) -> Tensor:
    """A part of all heads of ``[B, S, h, D]``, as ``[P, S, B, numbers of all tensors]``: contiguous for each peer."""
    cut = [x.unflatten(2, (size, kv_heads // size, -1))[:, :, :, part].flatten(3) for x in tensors]
    return torch.cat(cut, dim=3).permute(2, 1, 0, 3).contiguous()


def _to_heads(
    call: Call, plan: AttentionPlan, packed: Tensor, sizes: Sequence[tuple[int, int]]
) -> Pending[list[Tensor]]:
    """Each tensor becomes ``[B, total, n, D]`` of a part of this rank's heads, in the order of the sequence.

    ``sizes``: (n, D) of each.
    """
    whole = packed.new_empty(sum(plan.lengths), *packed.shape[2:])
    coming = call.all_to_all(list(packed), plan.lengths, into=whole)

    def finish() -> list[Tensor]:
        slices, ordered = coming.wait(), whole
        if len(plan.runs) > call.size:  # zigzag: the ranks' slices are not in the order of the sequence
            ordered = torch.cat([slices[run.rank][run.start : run.start + run.length] for run in plan.runs])
        columns = ordered.split([heads * dim for heads, dim in sizes], dim=2)
        return [x.unflatten(2, size).transpose(0, 1) for x, size in zip(columns, sizes, strict=True)]

    return Pending(finish)


def _to_tokens(call: Call, plan: AttentionPlan, tensors: Sequence[Tensor]) -> Pending[list[Tensor]]:
    """The way back: ``[B, total, n, D]`` of this rank's heads becomes ``[B, S, P, n, D]`` of its tokens."""
    whole = torch.cat([x.transpose(0, 1).flatten(2) for x in tensors], dim=2)
    runs = [[whole[r.offset : r.offset + r.length] for r in plan.runs if r.rank == rank] for rank in range(call.size)]
    outgoing = [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in runs]
    tokens = plan.lengths[call.rank]
    back = whole.new_empty(call.size * tokens, *whole.shape[1:])
    coming = call.all_to_all(outgoing, into=back)

    def finish() -> list[Tensor]:
        coming.wait()
        joined = back.view(call.size, tokens, *back.shape[1:])  # [P, S, B, numbers of all tensors]
        columns = joined.split([x.shape[2] * x.shape[3] for x in tensors], dim=3)
        return [x.unflatten(3, y.shape[2:]).permute(2, 1, 0, 3, 4) for x, y in zip(columns, tensors, strict=True)]

    return Pending(finish)


def _own_only(kv: KVExchange) -> Iterator[KVBlock]:
    """The single block of a rank that holds the whole sequence."""
    yield from kv.own(slice(0, kv.query_heads))


def _alone(options: Options, plan: AttentionPlan) -> tuple[Call, AttentionPlan]:
    """A world of one, with the same sequence on it."""
    total = sum(plan.lengths)
    run = TokenRun(0, 0, total, 0)
    whole = plan_attention((run,), (total,), options.cu_seqlens, options.causal, options.window, options.mask)
    return Axis.over(SoloWire()).begin("ulysses"), whole
