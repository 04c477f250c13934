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

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from weft.ops.attention.masks import HALVES, band_mask
from weft.ops.attention.plan import Block

Triple = tuple[Tensor, Tensor, Tensor]

SCORES = 1 << 25  # numbers of one tile's scores: a few such matrices in fp32 are half a GB
LARGEST_HEAD = 256  # that flash takes
_aten = torch.ops.aten


def attend(q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float) -> tuple[Tensor, Tensor]:
    """See `blockwise.attend_block`."""
    if _has_flash(q, block):
        return _flash(q, k, v, block.kind == "causal", scale)
    parts = [
        _attend_tile(q[:, :, rows], k[:, :, keys], v[:, :, keys], tile, scale)
        for rows, keys, tile in _tiles(q, k, block)
    ]
    return torch.cat([out for out, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block, scale: float
) -> Triple:
    """See `blockwise.attend_block_backward`."""
    if _has_flash(q, block):
        return _flash_backward(grad, q, k, v, out, lse, block.kind == "causal", scale)
    dq = torch.empty_like(q, dtype=lse.dtype)
    dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (k, v))
    for rows, keys, tile in _tiles(q, k, block):
        mine = [x[:, :, rows] for x in (grad, q, out, lse)]
        dq[:, :, rows], dk_part, dv_part = _attend_tile_backward(
            mine[0], mine[1], mine[2], mine[3], k[:, :, keys], v[:, :, keys], tile, scale
        )
        dk[:, :, keys] += dk_part
        dv[:, :, keys] += dv_part
    return dq, dk, dv


# Tiles of queries.


def _tiles(q: Tensor, k: Tensor, block: Block) -> Iterator[tuple[slice, slice, Block]]:
    """Queries, the keys that they may see, and the block that those two make."""
    batch, heads, queries, _ = q.shape
    step = max(1, SCORES // (batch * heads * k.shape[2]))
    for start in range(0, queries, step):
        stop = min(start + step, queries)
        if block.kind == "causal":
            yield slice(start, stop), slice(0, stop), replace(block, kind="band", shift=-start, left=queries, right=0)
        else:
            yield slice(start, stop), slice(0, k.shape[2]), replace(block, shift=block.shift - start)


def _attend_tile(q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, block, scale)
    lse = scores.logsumexp(-1)
    probabilities = (scores - lse.clamp_min(torch.finfo(lse.dtype).min)[..., None]).exp()
    values = v.to(scores.dtype).repeat_interleave(q.shape[1] // v.shape[1], 1)
    return probabilities @ values, lse


def _attend_tile_backward(
    grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, block: Block, scale: float
) -> Triple:
    shared = q.shape[1] // k.shape[1]
    scores = _scores(q, k, block, scale)
    grad, q, out = (tensor.to(scores.dtype) for tensor in (grad, q, out))
    keys, values = (tensor.to(scores.dtype).repeat_interleave(shared, 1) for tensor in (k, v))
    probabilities = (scores - lse[..., None]).exp()
    grad_scores = probabilities * (grad @ values.transpose(2, 3) - (grad * out).sum(-1, keepdim=True)) * scale
    dk, dv = grad_scores.transpose(2, 3) @ q, probabilities.transpose(2, 3) @ grad
    return grad_scores @ keys, dk.unflatten(1, (-1, shared)).sum(2), dv.unflatten(1, (-1, shared)).sum(2)


def _scores(q: Tensor, k: Tensor, block: Block, scale: float) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = scale * (q.to(wide) @ k.to(wide).repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(2, 3))
    return scores if block.kind == "full" else scores + band_mask(q, k, block, wide)[0]


# ATen's flash operators.


def _has_flash(q: Tensor, block: Block) -> bool:
    return q.dtype in HALVES and block.kind != "band" and q.shape[-1] <= LARGEST_HEAD


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
