"""What both attentions demand of q, k and v: checks of one rank's arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.comm.arguments import find_tensor_fault
from weft.ops.sequence.sequence import Bounds

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def find_token_fault(
    operation: str, rank: int, bounds: Bounds | None, letter: str, kinds: str, **tensors: Any
) -> Exception | None:
    """What is wrong with ``q``, ``k`` and ``v`` ``[B, tokens, heads, dim]``, as far as every attention would say so.

    One kind, dtype and device, one batch and length, and for packed documents a batch of 1. ``letter`` and ``kinds``:
    how the operation names its tokens and the tensors it takes.
    """
    where = f"(rank {rank})"
    for name, tensor in tensors.items():
        if fault := find_tensor_fault(operation, name, tensor, rank, DTYPES, kinds):
            return fault
        if tensor.ndim != 4:
            shown = list(tensor.shape)
            return ValueError(f"{operation}: {name} must be [B, {letter}, heads, dim], got {shown} {where}")
    q, k, v = tensors["q"], tensors["k"], tensors["v"]
    for name, tensor in tensors.items():
        if tensor.device != q.device:
            return ValueError(f"{operation}: {name} is on {tensor.device}, q on {q.device} {where}")
    if k.dtype != q.dtype or v.dtype != q.dtype:
        return ValueError(f"{operation}: q, k and v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype} {where}")
    for name, tensor in tensors.items():
        if tensor.shape[:2] != q.shape[:2]:
            return ValueError(
                f"{operation}: {name} {list(tensor.shape)} must have the batch and length of q {list(q.shape)} {where}"
            )
    if bounds is not None and q.shape[0] != 1:
        return ValueError(f"{operation}: packed sequences (cu_seqlens) need a batch of 1, got {q.shape[0]} {where}")
    return None


def local_length(q: Any) -> int | None:
    """The tokens this rank holds, if ``q`` is what it should be."""
    return q.shape[1] if isinstance(q, Tensor) and q.ndim == 4 else None
