"""Additive masks of blocks of scores, for operators that take one."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.comm.function import keep_tensors
from weft.ops.attention.plan import Block

HALVES = (torch.bfloat16, torch.float16)


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
