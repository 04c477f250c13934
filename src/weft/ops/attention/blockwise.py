"""Forward and backward over blocks of keys, whoever brings them: their results are merged by (out, lse)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.comm import Call
from weft.ops.attention.flash_calls import FlashCall, calls_of
from weft.ops.attention.kernels import attend_block, attend_block_backward, takes_flash
from weft.ops.attention.kv_exchange import KVBlock, KVExchange
from weft.ops.attention.plan import AttentionPlan, Block, Options

KVSchedule = Callable[[KVExchange], Iterator[KVBlock]]
Grads = tuple[Tensor, Tensor, Tensor, Tensor | None]  # of q, k, v and the sinks
Saved = tuple[Tensor, ...]  # q, k, v, out, lse, of tokens or of heads


@dataclass
class PartialResult:
    """out and lse ``[B, S, H, E]``, ``[B, S, H]``, at least in fp32, so far.

    ``touched`` says for each query head whether anything was added. ``plan`` is the one it is computed by, at first
    perhaps a prediction.
    """

    plan: AttentionPlan
    out: Tensor
    lse: Tensor
    touched: list[bool]

    @staticmethod
    def empty(plan: AttentionPlan, q: Tensor, v: Tensor) -> PartialResult:
        out = q.new_zeros(*q.shape[:3], v.shape[3], dtype=torch.promote_types(q.dtype, torch.float32))
        return PartialResult(plan, out, out.new_full(q.shape[:3], -torch.inf), [False] * q.shape[2])

    def add(self, rank: int, block: KVBlock, q: Tensor, options: Options) -> None:
        """Compute and merge one block of keys."""
        heads, out, lse = block.query_heads, self.out, self.lse
        fresh = not any(self.touched[heads])
        self.touched[heads] = [True] * (heads.stop - heads.start)
        flash = takes_flash(q, block.values, options.scale, options.softcap, of_lse=False)
        for rows, cut, piece, first in _work(self.plan, rank, block, flash, len(q) == 1):
            queries, keys, values = q[:, rows, heads].transpose(1, 2), block.keys[:, :, cut], block.values[:, :, cut]
            part, part_lse = attend_block(queries, keys, values, piece, options.scale, options.softcap)
            part, part_lse = part.transpose(1, 2), part_lse.transpose(1, 2)
            if fresh and first:
                out[:, rows, heads], lse[:, rows, heads] = part, part_lse
            else:
                merge_into(out[:, rows, heads], lse[:, rows, heads], part, part_lse)


def _work(
    plan: AttentionPlan, rank: int, block: KVBlock, flash: bool, several: bool
) -> Iterator[tuple[slice, slice, Block | FlashCall, bool]]:
    """(queries, keys, what a kernel computes of them, whether it is the first with any of these queries)."""
    if flash:
        for call in calls_of(plan, rank, block.spans, several):
            yield call.rows, call.keys, call, call.first
        return
    for tile, pieces in plan.blocks(rank, block.spans):
        for number, piece in enumerate(pieces):
            rows, keys = slice(tile.start, tile.start + tile.length), slice(piece.at, piece.at + piece.length)
            yield rows, keys, piece, tile.first and number == 0


def merge_into(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Add a block to ``out`` ``[B, n, h, E]`` and ``lse`` ``[B, n, h]`` in place: out = sum exp(lse_i - lse) out_i.

    A row that is fully masked enters with lse -inf, on either side or on both.
    """
    total = torch.logaddexp(lse, block_lse)
    finite = total.clamp_min(torch.finfo(total.dtype).min)  # -inf - -inf is no number
    out.mul_((lse - finite).exp_()[..., None])
    out.addcmul_(block_out.to(out.dtype), (block_lse - finite).exp_()[..., None])
    lse.copy_(total)


def begin_by_blocks(
    options: Options, call: Call, plan: AttentionPlan, q: Tensor, k: Tensor, v: Tensor
) -> PartialResult:
    """The own block of a few heads, on a predicted plan, while the ranks' lengths are gathered."""
    begun = PartialResult.empty(plan, q, v)
    kv = KVExchange(call, plan, k, v, q.shape[2], None, local_first=options.local_first)
    for block in kv.own(kv.head_start):
        begun.add(call.rank, block, q, options)
    return begun


def forward_by_blocks(
    schedule: KVSchedule, options: Options, call: Call, plan: AttentionPlan, q: Tensor, k: Tensor, v: Tensor,
    begun: PartialResult | None, sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Saved]:  # fmt: skip
    """out in the input's dtype, lse, and what the backward wants. ``sinks`` ``[H]`` enter when all keys are in."""
    if begun is not None and begun.plan.lengths != plan.lengths:
        begun = None
    result = begun or PartialResult.empty(plan, q, v)
    kv = KVExchange(
        call, plan, k, v, q.shape[2], options.strides, local_first=options.local_first, started=begun is not None
    )
    for block in schedule(kv):
        result.add(call.rank, block, q, options)
    if sinks is not None:  # as a key with that score and a value of zeros
        merge_into(result.out, result.lse, result.out.new_zeros(1), sinks.to(result.lse.dtype).expand_as(result.lse))
    out = result.out.to(q.dtype)
    return out, result.lse, (q, k, v, out, result.lse)


def backward_by_blocks(
    schedule: KVSchedule, options: Options, call: Call, plan: AttentionPlan, saved: Saved, grad: Tensor,
    grad_lse: Tensor | None = None, sinks: Tensor | None = None,
) -> Grads:  # fmt: skip
    """dq, dk, dv and what this rank's tokens say about the sinks, at least in fp32."""
    q, k, v, out, lse = saved
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)  # of a row that saw nothing: exp(score - lse) is 0
    dq, dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
    kv = KVExchange(
        call, plan, k, v, q.shape[2], options.backward_strides, dk, dv, options.grad_dtype or lse.dtype,
        options.local_first,
    )  # fmt: skip
    for block in schedule(kv):
        assert block.grad_keys is not None and block.grad_values is not None
        heads = block.query_heads
        flash = takes_flash(q, v, options.scale, options.softcap, grad_lse is not None)
        for rows, cut, piece, _ in _work(plan, call.rank, block, flash, len(q) == 1):
            mine = [x[:, rows, heads].transpose(1, 2) for x in (grad, q, out, lse)]
            mine_lse = None if grad_lse is None else grad_lse[:, rows, heads].transpose(1, 2)
            keys, values = block.keys[:, :, cut], block.values[:, :, cut]
            dq_part, dk_part, dv_part = attend_block_backward(
                mine[0], mine_lse, mine[1], keys, values, mine[2], mine[3], piece, options.scale, options.softcap
            )
            dq[:, rows, heads].add_(dq_part.transpose(1, 2))
            block.grad_keys[:, :, cut].add_(dk_part)
            block.grad_values[:, :, cut].add_(dv_part)
    return dq, dk, dv, None if sinks is None else _sinks_backward(grad, grad_lse, out, lse, sinks)


def _sinks_backward(grad: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """``[H]``: a sink's probability takes from what the keys have, over the rank's tokens."""
    inner = torch.linalg.vecdot(grad.to(lse.dtype), out.to(lse.dtype))
    inner = inner if grad_lse is None else inner - grad_lse
    return -((sinks.to(lse.dtype) - lse).exp() * inner).sum((0, 1))
