"""Forward and backward over blocks of keys, whoever brings them, and the kernel of one block.

The kernel is the only place that knows ATen's operator for a CPU, as `on_device` is for those of devices. Its shapes
are q, out ``[B, h, n, D]``, k, v ``[B, w, m, D]``, lse ``[B, h, n]``, with h a multiple of w and any strides. Traps
kept in here: the CPU operator dies of an empty q or k, reports lse 0 for a row that is fully masked, takes only masks
of floats, aligns its causal mask upper left, and reads astray where the elements of a vector are not neighbours.
Half precision is computed in fp32 on a CPU, where the backward in bf16 takes eleven times as long; so results of
blocks are not rounded there before they are merged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.comm import Call
from weft.comm.device import runs_behind
from weft.ops.attention import on_device
from weft.ops.attention.kv_exchange import KVBlock, KVExchange
from weft.ops.attention.masks import HALVES, band_mask
from weft.ops.attention.plan import AttentionPlan, Block, Options

KVSchedule = Callable[[KVExchange], Iterator[KVBlock]]
Triple = tuple[Tensor, Tensor, Tensor]
Saved = tuple[Tensor, ...]  # q, k, v, out, lse, of tokens or of heads

_aten = torch.ops.aten


@dataclass
class PartialResult:
    """out and lse ``[B, S, H, D]``, ``[B, S, H]``, at least in fp32, so far.

    ``touched`` says for each query head whether anything was added. ``plan`` is the one it is computed by, at first
    perhaps a prediction.
    """

    plan: AttentionPlan
    out: Tensor
    lse: Tensor
    touched: list[bool]

    @staticmethod
    def empty(plan: AttentionPlan, q: Tensor) -> PartialResult:
        out = torch.zeros_like(q, dtype=torch.promote_types(q.dtype, torch.float32))
        return PartialResult(plan, out, out.new_full(q.shape[:3], -torch.inf), [False] * q.shape[2])

    def add(self, rank: int, block: KVBlock, q: Tensor, scale: float) -> None:
        """Compute and merge one block of keys."""
        heads, out, lse = block.query_heads, self.out, self.lse
        fresh = not any(self.touched[heads])
        self.touched[heads] = [True] * (heads.stop - heads.start)
        for tile, pieces in self.plan.blocks(rank, block.spans):
            rows = slice(tile.start, tile.start + tile.length)
            queries = q[:, rows, heads].transpose(1, 2)
            for number, piece in enumerate(pieces):
                cut = slice(piece.at, piece.at + piece.length)
                part, part_lse = attend_block(queries, block.keys[:, :, cut], block.values[:, :, cut], piece, scale)
                part, part_lse = part.transpose(1, 2), part_lse.transpose(1, 2)
                if fresh and tile.first and number == 0:
                    out[:, rows, heads], lse[:, rows, heads] = part, part_lse
                else:
                    merge_into(out[:, rows, heads], lse[:, rows, heads], part, part_lse)


def merge_into(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Add a block to ``out`` ``[B, n, h, D]`` and ``lse`` ``[B, n, h]`` in place: out = sum exp(lse_i - lse) out_i.

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
    begun = PartialResult.empty(plan, q)
    kv = KVExchange(call, plan, k, v, q.shape[2], None, local_first=options.local_first)
    for block in kv.own(kv.head_start):
        begun.add(call.rank, block, q, options.scale)
    return begun


def forward_by_blocks(
    schedule: KVSchedule, options: Options, call: Call, plan: AttentionPlan, q: Tensor, k: Tensor, v: Tensor,
    begun: PartialResult | None,
) -> tuple[Tensor, Tensor, Saved]:  # fmt: skip
    """out in the input's dtype, lse, and what the backward wants."""
    if begun is not None and begun.plan.lengths != plan.lengths:
        begun = None
    result = begun or PartialResult.empty(plan, q)
    kv = KVExchange(
        call, plan, k, v, q.shape[2], options.strides, local_first=options.local_first, started=begun is not None
    )
    for block in schedule(kv):
        result.add(call.rank, block, q, options.scale)
    out = result.out.to(q.dtype)
    return out, result.lse, (q, k, v, out, result.lse)


def backward_by_blocks(
    schedule: KVSchedule, options: Options, call: Call, plan: AttentionPlan, saved: Saved, grad: Tensor
) -> Triple:
    """dq, dk and dv, at least in fp32."""
    q, k, v, out, lse = saved
    dq, dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
    kv = KVExchange(
        call, plan, k, v, q.shape[2], options.backward_strides, dk, dv, options.grad_dtype or lse.dtype,
        options.local_first,
    )  # fmt: skip
    for block in schedule(kv):
        assert block.grad_keys is not None and block.grad_values is not None
        heads = block.query_heads
        for tile, pieces in plan.blocks(call.rank, block.spans):
            rows = slice(tile.start, tile.start + tile.length)
            mine = [x[:, rows, heads].transpose(1, 2) for x in (grad, q, out, lse)]
            for piece in pieces:
                cut = slice(piece.at, piece.at + piece.length)
                keys, values = block.keys[:, :, cut], block.values[:, :, cut]
                dq_part, dk_part, dv_part = attend_block_backward(
                    mine[0], mine[1], keys, values, mine[2], mine[3], piece, options.scale
                )
                dq[:, rows, heads].add_(dq_part.transpose(1, 2))
                block.grad_keys[:, :, cut].add_(dk_part)
                block.grad_values[:, :, cut].add_(dv_part)
    return dq, dk, dv


# The kernel of one block.


def attend_block(q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float) -> tuple[Tensor, Tensor]:
    """(out, lse) of the queries over the block's keys alone; lse is -inf where a query sees none of them."""
    assert q.shape[2] and k.shape[2], "an empty block kills the CPU operator"
    if not runs_behind(q.device):
        q, k, v = _prepare(q, k, v)
        mask, fully_masked = band_mask(q, k, block, q.dtype) if block.kind == "band" else (None, None)
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, block.kind == "causal", attn_mask=mask, scale=scale
        )
        return out, lse if fully_masked is None else lse.masked_fill(fully_masked, -torch.inf)
    return on_device.attend(q, k, v, block, scale)


def attend_block_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block, scale: float
) -> Triple:
    """(dq, dk, dv) of the block's scores. ``out`` and ``lse`` are those over all keys, which makes it exact."""
    assert q.shape[2] and k.shape[2], "an empty block kills the CPU operator"
    if not runs_behind(q.device):
        grad, q, k, v, out = _prepare(grad, q, k, v, out)
        mask = band_mask(q, k, block, q.dtype)[0] if block.kind == "band" else None
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, block.kind == "causal", attn_mask=mask, scale=scale
        )
    return on_device.attend_backward(grad, q, k, v, out, lse, block, scale)


def _prepare(*tensors: Tensor) -> list[Tensor]:
    """For the CPU operator: fp32 for half precision, and vectors without gaps."""
    wide = [tensor.float() if tensor.dtype in HALVES else tensor for tensor in tensors]
    return [tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in wide]
