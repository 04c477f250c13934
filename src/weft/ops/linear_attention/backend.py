"""Which local kernels run: plain torch operations anywhere, Triton's on CUDA."""

from __future__ import annotations

import importlib.util
import os
from typing import Protocol

import torch
from torch import Tensor

from weft.ops.linear_attention.chunk import ChunkBackward, ChunkForward
from weft.ops.linear_attention.fused.phases import FusedBackward, FusedForward
from weft.ops.linear_attention.fused.tiling import MAX_CELLS, MAX_CHUNK, MAX_DIM

CHOICES = ("auto", "torch", "triton")
FORWARD: dict[str, type[ChunkForward] | type[FusedForward]] = {"torch": ChunkForward, "triton": FusedForward}
BACKWARD: dict[str, type[ChunkBackward] | type[FusedBackward]] = {"torch": ChunkBackward, "triton": FusedBackward}
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Kernel(Protocol):
    """What the scan needs of a forward or backward: the map of each segment, and work to do while it travels."""

    maps: tuple[Tensor | None, Tensor]

    def intra(self) -> None:
        """All that needs nothing from other ranks."""
        ...


def choose_backend(backend: str, q: Tensor, v: Tensor, g: Tensor | None, chunk_size: int) -> str:
    """ "torch" or "triton": auto takes Triton for CUDA tensors where it can."""
    if backend != "auto":
        return backend
    return "triton" if q.is_cuda and find_triton_fault(q, v, g, chunk_size) is None else "torch"


def find_triton_fault(q: Tensor, v: Tensor, g: Tensor | None, chunk_size: int) -> str | None:
    """Why Triton's kernels cannot take these inputs; None if they can."""
    if q.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "needs CUDA tensors (or TRITON_INTERPRET=1, set before the start), got cpu"
    if q.device.type not in ("cpu", "cuda", "meta"):
        return f"needs CUDA tensors, got {q.device.type}"
    if q.device.type != "meta" and importlib.util.find_spec("triton") is None:
        return "needs triton, which is not installed"
    for label, x in (("q, k, v", q), ("g", g)):
        if x is not None and x.dtype not in _DTYPES:
            return f"takes bfloat16, float16 or float32, got {label} in {str(x.dtype).removeprefix('torch.')}"
    if max(q.shape[-1], v.shape[-1]) > MAX_DIM:
        return f"takes K and V up to {MAX_DIM}, got {q.shape[-1]} and {v.shape[-1]}"
    if q.shape[0] * v.shape[2] > MAX_CELLS:
        return f"takes batches times value heads up to {MAX_CELLS:,}, got {q.shape[0]} x {v.shape[2]}"
    if chunk_size > MAX_CHUNK:
        return f"takes chunk_size up to {MAX_CHUNK}, got {chunk_size}"
    return None
