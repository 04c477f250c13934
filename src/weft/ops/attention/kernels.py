"""The kernel of one block of scores: which one, and how its one head size is met.

q ``[B, h, n, D]``, k ``[B, w, m, D]``, v ``[B, w, m, E]``, out and its gradient ``[B, h, n, E]``, lse ``[B, h, n]``;
h is a multiple of w, strides are any. A score is scale * q.k, capped: softcap * tanh(that / softcap).

| device | inputs                      | kernel                                                           |
|--------|-----------------------------|------------------------------------------------------------------|
| CPU    | scores without a cap        | ATen's flash operator for CPUs, in fp32 for half precision       |
| device | half precision, no cap, at  | ATen's flash operators: `on_device`, several blocks in a call    |
|        | most 256 numbers in a head  | (`flash_calls`)                                                  |
| any    | all else; a scale that is   | products by `tiles` of bounded memory                            |
|        | not positive                |                                                                  |

Fused operators have one head size for keys and values: zeros at the end of the smaller change no score and no sum, and
their columns are cut off again. They work out sum(grad * out), which is subtracted from the scores' gradient, and take
no other: a gradient of lse enters as one more column, -grad_lse in grad, 1 in out and 0 in v.

Traps of the CPU operator kept in here: it masks before it scales, so that a scale of zero makes -inf no number and a
negative one +inf; it dies of an empty q or k, reports lse 0 for a row that is fully masked, takes
only masks of floats, aligns its causal mask upper left, and reads astray where the elements of a vector are not
neighbours. In bf16 its backward takes eleven times as long as in fp32.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from weft.comm.device import runs_behind
from weft.ops.attention import on_device, tiles
from weft.ops.attention.flash_calls import FlashCall
from weft.ops.attention.plan import Block

logger = logging.getLogger(__name__)
Triple = tuple[Tensor, Tensor, Tensor]
HALVES = (torch.bfloat16, torch.float16)

_aten = torch.ops.aten


def attend_block(
    q: Tensor, k: Tensor, v: Tensor, block: Block | FlashCall, scale: float, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(out, lse) of the queries over the block's keys alone; lse is -inf where a query sees none of them."""
    assert q.shape[2] and k.shape[2], "an empty block kills the CPU operator"
    if isinstance(block, Block) and (not _is_fused(scale, softcap) or runs_behind(q.device)):
        return tiles.attend(q, k, v, block, scale, softcap)
    kept, size = v.shape[3], _one_size(q, v, False)
    if isinstance(block, FlashCall):
        q, k, v = (_widen(x, size) for x in (q, k, v))
        out, lse = on_device.attend(q, k, v, block, scale)
        return out[..., :kept], lse
    q, k, v = (_widen(x, size) for x in _prepare(q, k, v))
    mask, fully_masked = tiles.band_mask(q, k, block, q.dtype) if block.kind == "band" else (None, None)
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, block.kind == "causal", attn_mask=mask, scale=scale
    )
    return out[..., :kept], lse if fully_masked is None else lse.masked_fill(fully_masked, -torch.inf)


def attend_block_backward(
    grad: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    block: Block | FlashCall, scale: float, softcap: float = 0.0,
) -> Triple:  # fmt: skip
    """(dq, dk, dv) of the block's scores. ``out`` and ``lse`` are those over all keys, which makes it exact."""
    assert q.shape[2] and k.shape[2], "an empty block kills the CPU operator"
    if isinstance(block, Block) and (not _is_fused(scale, softcap) or runs_behind(q.device)):
        return tiles.attend_backward(grad, grad_lse, q, k, v, out, lse, block, scale, softcap)
    sizes, size = (q.shape[3], k.shape[3], v.shape[3]), _one_size(q, v, grad_lse is not None)
    if isinstance(block, Block):
        grad, q, k, v, out = _prepare(grad, q, k, v, out)
    if grad_lse is not None:
        column = -grad_lse[..., None].to(grad.dtype)
        grad, out = torch.cat([grad, column], 3), torch.cat([out, torch.ones_like(column)], 3)
    grad, q, k, v, out = (_widen(x, size) for x in (grad, q, k, v, out))
    if isinstance(block, FlashCall):
        found = on_device.attend_backward(grad, q, k, v, out, lse, block, scale)
    else:
        mask = tiles.band_mask(q, k, block, q.dtype)[0] if block.kind == "band" else None
        found = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, block.kind == "causal", attn_mask=mask, scale=scale
        )
    dq, dk, dv = (x[..., :kept] for x, kept in zip(found, sizes, strict=True))
    return dq, dk, dv


def takes_flash(q: Tensor, v: Tensor, scale: float, softcap: float, of_lse: bool) -> bool:
    """Whether a device's flash operators have such scores; ``of_lse``: in a backward with a gradient of lse.

    Meta tensors in half precision stand for those of a device.
    """
    if not (q.is_meta or runs_behind(q.device)) or q.dtype not in HALVES or not _is_fused(scale, softcap):
        return False
    size = _one_size(q, v, of_lse)
    if size > on_device.LARGEST_HEAD:
        _log_large_heads(size)
    return size <= on_device.LARGEST_HEAD


@cache
def _log_large_heads(size: int) -> None:
    """Once: a user would not guess why it is slow."""
    words = "attention: vectors of %d numbers are over the %d of flash operators; products by tiles are slower"
    logger.warning(words, size, on_device.LARGEST_HEAD)


def _is_fused(scale: float, softcap: float) -> bool:
    """Whether fused operators have such scores: without a cap, and with a scale that is positive in fp32, too."""
    return not softcap and scale >= torch.finfo(torch.float32).tiny


def _one_size(q: Tensor, v: Tensor, of_lse: bool) -> int:
    """What vectors of keys and values are widened to, with one more column for a gradient of lse."""
    return max(q.shape[3], -(-(v.shape[3] + 1) // 8) * 8 if of_lse else v.shape[3])


def _widen(x: Tensor, size: int) -> Tensor:
    """Zeros at the end of vectors, up to ``size``."""
    return x if x.shape[-1] == size else pad(x, (0, size - x.shape[-1]))


def _prepare(*tensors: Tensor) -> list[Tensor]:
    """For the CPU operator: fp32 for half precision, and vectors without gaps."""
    wide = [tensor.float() if tensor.dtype in HALVES else tensor for tensor in tensors]
    return [tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in wide]
