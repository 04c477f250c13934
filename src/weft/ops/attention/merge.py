"""Joining what blocks of keys say about the same queries."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_into(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Add a block to ``out`` ``[B, n, h, D]`` and ``lse`` ``[B, n, h]`` in place: out = sum exp(lse_i - lse) out_i.

    A row that sees nothing enters with lse -inf, on either side or on both.
    """
    total = torch.logaddexp(lse, block_lse)
    finite = total.clamp_min(torch.finfo(total.dtype).min)  # -inf - -inf is no number
    out.mul_((lse - finite).exp_()[..., None])
    out.addcmul_(block_out.to(out.dtype), (block_lse - finite).exp_()[..., None])
    lse.copy_(total)
