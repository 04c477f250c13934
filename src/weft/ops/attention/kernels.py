"""The kernel of one block of scores: which one, and how its one head size is met.

q ``[B, h, n, D]``, k ``[B, w, m, D]``, v ``[B, w, m, E]``, out and its gradient ``[B, h, n, E]``, lse ``[B, h, n]``;
h is a multiple of w, strides are any. A score is scale * q.k, capped: softcap * tanh(that / softcap).

| device | inputs                      | kernel                                                           |
|--------|-----------------------------|------------------------------------------------------------------|
| CPU    | scores without a cap        | ATen's flash operator for CPUs, in fp32 for half precision       |
| device | half precision, no cap      | ATen's flash operators, where they have the block: `on_device`   |
| any    | all else                    | products by `tiles` of bounded memory                            |

Fused operators have one head size for keys and values: zeros at the end of the smaller change no score and no sum, and
their columns are cut off again. They work out sum(grad * out), which is subtracted from the scores' gradient, and take
no other: a gradient of lse enters as one more column, -grad_lse in grad, 1 in out and 0 in v.

Traps of the CPU operator kept in here: it dies of an empty q or k, reports lse 0 for a row that is fully masked, takes
only masks of floats, aligns its causal mask upper left, and reads astray where the elements of a vector are not
neighbours. In bf16 its backward takes eleven times as long as in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from weft.comm.device import runs_behind
from weft.ops.attention import on_device, tiles
from weft.ops.attention.masks import HALVES, band_mask
from weft.ops.attention.plan import Block

Triple = tuple[Tensor, Tensor, Tensor]

_aten = torch.ops.aten


def attend_block(
    q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(out, lse) of the queries over the block's keys alone; lse is -inf where a query sees none of them."""
    assert q.shape[2] and k.shape[2], "an empty block kills the CPU operator"
    size, behind = max(q.shape[3], v.shape[3]), runs_behind(q.device)
    if softcap or (behind and not on_device.has_flash(q, block, size)):
        return tiles.attend(q, k, v, block, scale, softcap)
    kept = v.shape[3]
    if not behind:
        q, k, v = _prepare(q, k, v)
    q, k, v = (_widen(x, size) for x in (q, k, v))
    if behind:
        out, lse = on_device.attend(q, k, v, block, scale)
        return out[..., :kept], lse
    mask, fully_masked = band_mask(q, k, block, q.dtype) if block.kind == "band" else (None, None)
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, block.kind == "causal", attn_mask=mask, scale=scale
    )
    return out[..., :kept], lse if fully_masked is None else lse.masked_fill(fully_masked, -torch.inf)


def attend_block_backward(
    grad: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block,
    scale: float, softcap: float = 0.0,
) -> Triple:  # fmt: skip
    """(dq, dk, dv) of the block's scores. ``out`` and ``lse`` are those over all keys, which makes it exact."""
    assert q.shape[2] and k.shape[2], "an empty block kills the CPU operator"
    size, behind = max(q.shape[3], v.shape[3]), runs_behind(q.device)
    if grad_lse is not None:
        size = max(size, -(-(v.shape[3] + 1) // 8) * 8)
    if softcap or (behind and not on_device.has_flash(q, block, size)):
        return tiles.attend_backward(grad, grad_lse, q, k, v, out, lse, block, scale, softcap)
    sizes = q.shape[3], k.shape[3], v.shape[3]
    if not behind:
        grad, q, k, v, out = _prepare(grad, q, k, v, out)
    if grad_lse is not None:
        column = -grad_lse[..., None].to(grad.dtype)
        grad, out = torch.cat([grad, column], 3), torch.cat([out, torch.ones_like(column)], 3)
    grad, q, k, v, out = (_widen(x, size) for x in (grad, q, k, v, out))
    if behind:
        found = on_device.attend_backward(grad, q, k, v, out, lse, block, scale)
    else:
        mask = band_mask(q, k, block, q.dtype)[0] if block.kind == "band" else None
        found = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, block.kind == "causal", attn_mask=mask, scale=scale
        )
    dq, dk, dv = (x[..., :kept] for x, kept in zip(found, sizes, strict=True))
    return dq, dk, dv


def _widen(x: Tensor, size: int) -> Tensor:
    """Zeros at the end of vectors, up to ``size``."""
    return x if x.shape[-1] == size else pad(x, (0, size - x.shape[-1]))


def _prepare(*tensors: Tensor) -> list[Tensor]:
    """For the CPU operator: fp32 for half precision, and vectors without gaps."""
    wide = [tensor.float() if tensor.dtype in HALVES else tensor for tensor in tensors]
    return [tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in wide]
