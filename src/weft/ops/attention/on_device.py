"""The kernel of one block on a device: ATen's flash operator where it has one, else products by tiles of queries.

| inputs                             | kernel                                                                       |
|------------------------------------|------------------------------------------------------------------------------|
| bf16, fp16; full and causal blocks | flash; heads that are no multiple of 8 are padded with zeros                 |
| the same, heads over 256           | tiles: flash has none                                                        |
| fp32, fp64; bands of a window      | tiles, whose scores take at most `SCORES` numbers                            |

Shapes as in `blockwise`. Flash gives a block's result in half precision, the tiles at least in fp32. No GPU has run
the operators yet: on the simulated device they are emulated, with their checks.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from weft.ops.attention.masks import HALVES
from weft.ops.attention.plan import Block

Triple = tuple[Tensor, Tensor, Tensor]

LARGEST_HEAD = 256  # that flash takes
_aten = torch.ops.aten


def attend(q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float) -> tuple[Tensor, Tensor]:
    """See `kernels.attend_block`."""
    return _flash(q, k, v, block.kind == "causal", scale)


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block, scale: float
) -> Triple:
    """See `kernels.attend_block_backward`."""
    return _flash_backward(grad, q, k, v, out, lse, block.kind == "causal", scale)


def has_flash(q: Tensor, block: Block, size: int) -> bool:
    """Whether the operators take such tensors with vectors of ``size``, and have the block."""
    return q.dtype in HALVES and block.kind != "band" and size <= LARGEST_HEAD


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    size, (q, k, v) = q.shape[-1], (_for_flash(x) for x in (q, k, v))
    out, lse, *_ = _aten._flash_attention_forward(
        q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, scale=scale
    )
    return out[..., :size].transpose(1, 2), lse


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> Triple:
    size, (grad, q, k, v, out) = q.shape[-1], (_for_flash(x) for x in (grad, q, k, v, out))
    unused = torch.empty(0, dtype=torch.int64, device=q.device)  # of dropout, which there is not
    dq, dk, dv = (
        x[..., :size].transpose(1, 2)
        for x in _aten._flash_attention_backward(
            grad, q, k, v, out, lse.contiguous(), None, None, q.shape[1], k.shape[1], 0.0, causal, unused, unused,
            scale=scale,
        )
    )  # fmt: skip
    return dq, dk, dv


def _for_flash(x: Tensor) -> Tensor:
    """``[B, h, n, D]`` as ``[B, n, h, D]`` for the operator, which reads vectors of a multiple of 8 in pieces of 16
    bytes. Zeros at their end change no score, and their own columns are cut off again."""
    x = x.transpose(1, 2)
    if x.shape[-1] % 8:
        return pad(x, (0, -x.shape[-1] % 8))
    whole = x.stride(-1) == 1 and not any(step % 8 for step in (x.storage_offset(), *x.stride()[:-1]))
    return x if whole else x.clone(memory_format=torch.contiguous_format)
