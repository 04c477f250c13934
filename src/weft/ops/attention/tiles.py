"""The kernel of one block by products, for what no fused operator takes: capped scores, and on a device fp32 and fp64.

Scores are made tile by tile, some queries of some heads at a time against the keys that they see, and never take more
than `SCORES` numbers (a single query of a single key/value head excepted). Shapes as in `kernels`; results are at least
in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from weft.comm.function import keep_tensors
from weft.ops.attention.plan import UNLIMITED, Block

Triple = tuple[Tensor, Tensor, Tensor]

SCORES = 1 << 25  # numbers of one tile's scores on a device: a few such matrices in fp32 are half a GB
SCORES_ON_CPU = 1 << 20  # what its caches hold
ROWS = 128  # queries for which heads are computed apart rather than fewer queries at a time


def attend(q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float, softcap: float) -> tuple[Tensor, Tensor]:
    """See `kernels.attend_block`."""
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros(*q.shape[:3], v.shape[3], dtype=wide)
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=wide)
    for heads, kv_heads, rows, keys, tile in _tiles(q, k, block):
        mine = [x[:, kv_heads, keys] for x in (k, v)]
        scores, _ = _scores(q[:, heads, rows], mine[0], tile, scale, softcap)
        total = scores.logsumexp(-1)
        shares = (scores - total.clamp_min(torch.finfo(wide).min)[..., None]).exp_()
        out[:, heads, rows] = _by_heads(_by_kv_heads(shares) @ mine[1].to(wide), scores)
        lse[:, heads, rows] = total.flatten(1, 2)
    return out, lse


def attend_backward(
    grad: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block,
    scale: float, softcap: float,
) -> Triple:  # fmt: skip
    """See `kernels.attend_block_backward`."""
    wide = lse.dtype
    dq, dk, dv = (torch.zeros_like(x, dtype=wide) for x in (q, k, v))
    inner = torch.linalg.vecdot(grad.to(wide), out.to(wide))
    inner = inner if grad_lse is None else inner - grad_lse
    for heads, kv_heads, rows, keys, tile in _tiles(q, k, block):
        mine_k, mine_v = (x[:, kv_heads, keys].to(wide) for x in (k, v))
        scores, slope = _scores(q[:, heads, rows], mine_k, tile, scale, softcap)
        size = (mine_k.shape[1], -1)
        mine_q, mine_grad = (x[:, heads, rows].to(wide).unflatten(1, size).flatten(2, 3) for x in (q, grad))
        shares = (scores - lse[:, heads, rows].unflatten(1, size)[..., None]).exp_()
        dv[:, kv_heads, keys] += _by_kv_heads(shares).mT @ mine_grad
        dscores = (mine_grad @ mine_v.mT).view(scores.shape)
        dscores.sub_(inner[:, heads, rows].unflatten(1, size)[..., None]).mul_(shares).mul_(scale)
        together = _by_kv_heads(dscores if slope is None else dscores.mul_(slope))
        dq[:, heads, rows] = _by_heads(together @ mine_k, scores)
        dk[:, kv_heads, keys] += together.mT @ mine_q
    return dq, dk, dv


def _tiles(q: Tensor, k: Tensor, block: Block) -> Iterator[tuple[slice, slice, slice, slice, Block]]:
    """Query heads, their key/value heads, queries, the keys that they may see, and the block that those two make."""
    (batch, heads, queries, _), (_, kv_heads, many, _) = q.shape, k.shape
    if block.kind == "causal":
        block = replace(block, kind="band", shift=0, left=UNLIMITED, right=0)
    most = SCORES_ON_CPU if q.device.type == "cpu" else SCORES
    row = batch * heads // kv_heads * many  # scores of a query of one key/value head
    width = min(kv_heads, max(1, most // (row * min(queries, ROWS))))
    step = max(1, most // (row * width))
    for first in range(0, kv_heads, width):
        these = slice(first, min(first + width, kv_heads))
        theirs = slice(these.start * heads // kv_heads, these.stop * heads // kv_heads)
        for start in range(0, queries, step):
            stop, low, high = min(start + step, queries), 0, many
            if block.kind == "band":
                low = max(low, start - block.left - block.shift)
                high = min(high, stop + block.right - block.shift)
            if low < high:
                yield (
                    theirs,
                    these,
                    slice(start, stop),
                    slice(low, high),
                    replace(block, shift=block.shift + low - start),
                )


def _scores(q: Tensor, k: Tensor, block: Block, scale: float, softcap: float) -> tuple[Tensor, Tensor | None]:
    """``[B, w, h / w, n, m]``, and where they are capped the slope of the cap."""
    wide, slope = torch.promote_types(q.dtype, torch.float32), None
    folded = q.to(wide).unflatten(1, (k.shape[1], -1))
    scores = (folded.flatten(2, 3) @ k.to(wide).mT).mul_(scale).view(*folded.shape[:4], -1)
    if softcap:
        capped = scores.div_(softcap).tanh_()
        slope = 1 - capped.square()
        scores = capped * softcap
    return scores if block.kind == "full" else scores + band_mask(q, k, block, wide)[0], slope


def _by_kv_heads(scores: Tensor) -> Tensor:
    """``[B, w, h / w, n, m]`` as ``[B, w, rows of all query heads of one, m]``."""
    return scores.flatten(2, 3)


def _by_heads(x: Tensor, scores: Tensor) -> Tensor:
    """The way back: ``[B, w, rows of all query heads of one, D]`` as ``[B, h, n, D]``."""
    return x.view(*scores.shape[:4], -1).flatten(1, 2)


def band_mask(q: Tensor, k: Tensor, block: Block, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """The additive mask of a band, and the rows that it masks fully (None: there are none)."""
    return _band(q.shape[2], k.shape[2], block.shift, block.left, block.right, dtype, q.device)


@keep_tensors(maxsize=16)
def _band(
    queries: int, keys: int, shift: int, left: int, right: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    ahead = shift + torch.arange(keys, device=device) - torch.arange(queries, device=device)[:, None]
    visible = (ahead >= -left) & (ahead <= right)
    mask = torch.zeros(queries, keys, dtype=dtype, device=device).masked_fill_(~visible, -torch.inf)
    # Query i sees keys i - left - shift .. i + right - shift, if there are such.
    masks_rows = right - shift < 0 or queries - 1 - left - shift >= keys
    return mask, ~visible.any(dim=1) if masks_rows else None
