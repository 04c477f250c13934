"""The kernel of one block of scores, forward and backward: the only place that knows ATen's operators.

Shapes are q, out ``[B, h, n, D]``, k, v ``[B, w, m, D]``, lse ``[B, h, n]``, with h a multiple of w and any strides.
Traps kept in here: the CPU operator dies of an empty q or k, reports lse 0 for a row that sees nothing, takes only
masks of floats, aligns its causal mask upper left, and reads astray where the elements of a vector are not
neighbours. Half precision is computed in fp32 on a CPU, where the backward in bf16 takes eleven times as long; so
results of blocks are not rounded before they are merged.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.comm.modes import keep_tensors
from weft.ops.attention.plan import Block

_aten = torch.ops.aten
HALVES = (torch.bfloat16, torch.float16)


def attend_block(q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float) -> tuple[Tensor, Tensor]:
    """(out, lse) of the queries over the block's keys alone; lse is -inf where a query sees none of them."""
    assert q.shape[2] and k.shape[2], "an empty block kills the CPU operator"
    if q.device.type != "cuda":
        q, k, v = _prepare(q, k, v)
        if block.kind != "band":
            return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, block.kind == "causal", scale=scale)
        mask, blind = _band(q.shape[2], k.shape[2], block.shift, block.left, block.right, q.dtype, q.device)
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, False, attn_mask=mask, scale=scale
        )  # fmt: skip
        return out, lse if blind is None else lse.masked_fill(blind, -torch.inf)
    if q.dtype in HALVES and block.kind != "band":
        return _flash_cuda(q, k, v, block.kind == "causal", scale)
    return attend_plainly(q, k, v, block, scale)


def attend_block_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of the block's scores. ``out`` and ``lse`` are those over all keys, which makes it exact."""
    assert q.shape[2] and k.shape[2], "an empty block kills the CPU operator"
    if q.device.type != "cuda":
        grad, q, k, v, out = _prepare(grad, q, k, v, out)
        mask = None
        if block.kind == "band":
            mask, _ = _band(q.shape[2], k.shape[2], block.shift, block.left, block.right, q.dtype, q.device)
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, block.kind == "causal", attn_mask=mask, scale=scale
        )
    if q.dtype in HALVES and block.kind != "band":
        return _flash_cuda_backward(grad, q, k, v, out, lse, block.kind == "causal", scale)
    return attend_plainly_backward(grad, q, k, v, out, lse, block, scale)


def _prepare(*tensors: Tensor) -> list[Tensor]:
    """For the CPU operator: fp32 for half precision, and vectors without gaps."""
    wide = [tensor.float() if tensor.dtype in HALVES else tensor for tensor in tensors]
    return [tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in wide]


@keep_tensors(maxsize=16)
def _band(
    queries: int, keys: int, shift: int, left: int, right: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """The additive mask of a band and the rows that see nothing (None: every row sees something)."""
    ahead = shift + torch.arange(keys, device=device) - torch.arange(queries, device=device)[:, None]
    visible = (ahead >= -left) & (ahead <= right)
    mask = torch.zeros(queries, keys, dtype=dtype, device=device).masked_fill_(~visible, -torch.inf)
    # Query i sees keys i - left - shift .. i + right - shift, if there are such.
    is_blind = right - shift < 0 or queries - 1 - left - shift >= keys
    return mask, ~visible.any(dim=1) if is_blind else None


def _wide(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


# On CUDA, where flash has no kernel (fp32, fp64, bands). Tested on a CPU.


def attend_plainly(q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float) -> tuple[Tensor, Tensor]:
    """`attend_block` with matrix products that hold all scores."""
    scores = _scores(q, k, block, scale)
    lse = scores.logsumexp(-1)
    chances = (scores - lse.clamp_min(torch.finfo(lse.dtype).min)[..., None]).exp()
    values = v.to(scores.dtype).repeat_interleave(q.shape[1] // v.shape[1], 1)
    return (chances @ values).to(q.dtype), lse


def attend_plainly_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`attend_block_backward` with matrix products that hold all scores."""
    shared = q.shape[1] // k.shape[1]
    scores = _scores(q, k, block, scale)
    grad, q, out = (tensor.to(scores.dtype) for tensor in (grad, q, out))
    keys, values = (tensor.to(scores.dtype).repeat_interleave(shared, 1) for tensor in (k, v))
    chances = (scores - lse[..., None]).exp()
    grad_scores = chances * (grad @ values.transpose(2, 3) - (grad * out).sum(-1, keepdim=True)) * scale
    dk, dv = grad_scores.transpose(2, 3) @ q, chances.transpose(2, 3) @ grad
    return grad_scores @ keys, dk.unflatten(1, (-1, shared)).sum(2), dv.unflatten(1, (-1, shared)).sum(2)


def _scores(q: Tensor, k: Tensor, block: Block, scale: float) -> Tensor:
    wide = _wide(q)
    scores = scale * (q.to(wide) @ k.to(wide).repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(2, 3))
    if block.kind == "full":
        return scores
    left, right = (block.left, block.right) if block.kind == "band" else (q.shape[2], 0)
    shift = block.shift if block.kind == "band" else 0
    return scores + _band(q.shape[2], k.shape[2], shift, left, right, wide, q.device)[0]


# UNTESTED: ATen's flash operators for CUDA, which want [B, n, h, D]. There is no GPU where this was written.


def _flash_cuda(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    out, lse, *_ = _aten._flash_attention_forward(
        q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, scale=scale
    )
    return out.transpose(1, 2), lse


def _flash_cuda_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    grad, q, k, v, out = (tensor.transpose(1, 2) for tensor in (grad, q, k, v, out))
    unused = torch.empty(0, dtype=torch.int64, device=q.device)  # of dropout, which there is not
    dq, dk, dv = _aten._flash_attention_backward(
        grad.contiguous(), q, k, v, out.contiguous(), lse.contiguous(), None, None, q.shape[1], k.shape[1], 0.0,
        causal, unused, unused, scale=scale,
    )  # fmt: skip
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)
