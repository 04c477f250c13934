"""Forward and backward over blocks of keys, whoever brings them: what gather, ring and a single rank compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.comm import Call
from weft.ops.attention.block import attend_block, attend_block_backward
from weft.ops.attention.kv_exchange import KVBlock, KVExchange
from weft.ops.attention.merge import merge_into
from weft.ops.attention.options import Options
from weft.ops.attention.plan import AttentionPlan
from weft.ops.attention.strides import choose_strides

KVSchedule = Callable[[KVExchange], Iterator[KVBlock]]
Triple = tuple[Tensor, Tensor, Tensor]
Saved = tuple[Tensor, ...]  # q, k, v, out, lse, of tokens or of heads


@dataclass
class Started:
    """out and lse ``[B, S, H, D]``, ``[B, S, H]``, at least in fp32, so far.

    ``touched`` says for each query head whether anything was added. ``plan`` is the guess on which the own block of a
    few heads was computed before the ranks' lengths were known.
    """

    out: Tensor
    lse: Tensor
    touched: list[bool]
    plan: AttentionPlan | None = None

    @staticmethod
    def blank(q: Tensor) -> Started:
        out = torch.zeros_like(q, dtype=torch.promote_types(q.dtype, torch.float32))
        return Started(out, out.new_full(q.shape[:3], -torch.inf), [False] * q.shape[2])

    def add(self, plan: AttentionPlan, rank: int, block: KVBlock, q: Tensor, scale: float) -> None:
        """Compute and merge one block of keys."""
        heads, out, lse = block.query_heads, self.out, self.lse
        fresh = not any(self.touched[heads])
        self.touched[heads] = [True] * (heads.stop - heads.start)
        for tile, pieces in plan.blocks(rank, block.spans):
            rows = slice(tile.start, tile.start + tile.length)
            queries = q[:, rows, heads].transpose(1, 2)
            for number, piece in enumerate(pieces):
                cut = slice(piece.at, piece.at + piece.length)
                part, part_lse = attend_block(queries, block.keys[:, :, cut], block.values[:, :, cut], piece, scale)
                part, part_lse = part.transpose(1, 2), part_lse.transpose(1, 2)
                if fresh and number == 0:
                    out[:, rows, heads], lse[:, rows, heads] = part, part_lse
                else:
                    merge_into(out[:, rows, heads], lse[:, rows, heads], part, part_lse)


def begin_by_blocks(options: Options, call: Call, plan: AttentionPlan, q: Tensor, k: Tensor, v: Tensor) -> Started:
    """The own block of a few heads, on a guessed plan, while the ranks' lengths are on their way."""
    so_far = Started.blank(q)
    so_far.plan = plan
    kv = KVExchange(call, plan, k, v, q.shape[2], (k.shape[2],), q.dtype, local_first=options.local_first)
    for block in kv.own(kv.head_start):
        so_far.add(plan, call.rank, block, q, options.scale)
    return so_far


def attend_backward(
    kv: KVExchange, schedule: KVSchedule, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, scale: float
) -> Tensor:
    """dq, at least in fp32; dk and dv of the own keys are summed in ``kv``."""
    dq = torch.zeros_like(q, dtype=lse.dtype)
    for block in schedule(kv):
        assert block.grad_keys is not None and block.grad_values is not None
        heads = block.query_heads
        for tile, pieces in kv.plan.blocks(kv.rank, block.spans):
            rows = slice(tile.start, tile.start + tile.length)
            mine = [x[:, rows, heads].transpose(1, 2) for x in (grad, q, out, lse)]
            for piece in pieces:
                cut = slice(piece.at, piece.at + piece.length)
                keys, values = block.keys[:, :, cut], block.values[:, :, cut]
                dq_part, dk, dv = attend_block_backward(mine[0], mine[1], keys, values, mine[2], mine[3], piece, scale)
                dq[:, rows, heads].add_(dq_part.transpose(1, 2))
                block.grad_keys[:, :, cut].add_(dk)
                block.grad_values[:, :, cut].add_(dv)
    return dq


def forward_by_blocks(
    schedule: KVSchedule,
    options: Options,
    call: Call,
    plan: AttentionPlan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    started: Started | None,
) -> tuple[Tensor, Tensor, Saved]:
    """out in the input's dtype, lse, and what the backward wants."""
    right = started is not None and started.plan is not None and started.plan.lengths == plan.lengths
    so_far = started if started is not None and right else Started.blank(q)
    strides = options.strides or choose_strides(k.shape[2], call.size)
    kv = KVExchange(
        call, plan, k, v, q.shape[2], strides, grad_dtype=q.dtype, local_first=options.local_first, started=right
    )  # fmt: skip
    for block in schedule(kv):
        so_far.add(plan, call.rank, block, q, options.scale)
    out = so_far.out.to(q.dtype)
    return out, so_far.lse, (q, k, v, out, so_far.lse)


def backward_by_blocks(
    schedule: KVSchedule, options: Options, call: Call, plan: AttentionPlan, saved: Saved, grad: Tensor
) -> Triple:
    """dq, dk and dv, at least in fp32."""
    q, k, v, out, lse = saved
    dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (k, v))
    strides = options.backward_strides or choose_strides(k.shape[2], call.size)
    grad_dtype = options.grad_dtype or lse.dtype
    kv = KVExchange(call, plan, k, v, q.shape[2], strides, grad_dtype, dk, dv, options.local_first)
    dq = attend_backward(kv, schedule, grad, q, out, lse, options.scale)
    return dq, dk, dv
