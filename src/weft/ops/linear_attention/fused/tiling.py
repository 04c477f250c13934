"""Which blocks a Triton kernel works in: a function of the shapes alone, so that the same inputs give the same bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_DIM = 256  # K and V
MAX_CHUNK = 128
MAX_CELLS = 65535  # batch times value heads: the third axis of a grid, and CUDA takes no more there
# Programs wanted of the kernel that walks through chunks one after the other: about four for each multiprocessor.
PROGRAMS = 512
# Chunks a piece has at least: the state at its border is an extra state to write and to read.
PIECE = 8


@dataclass(frozen=True)
class Tiling:
    """Tokens of a chunk, tokens, key and value dimensions of a block; warps of a program."""

    chunk: int
    rows: int
    keys: int
    values: int
    warps: int


KERNELS = (
    "chunk_states", "scan_pieces", "output_intra", "output_inter", "query_grads", "key_grads", "value_grads",
    "key_finish", "value_finish",
)  # fmt: skip


PAIRS = ("output_intra", "query_grads", "key_grads", "value_grads")


def tile(kernel: str, chunk: int, keys: int, values: int, gate: str, dtype: torch.dtype) -> Tiling:
    """The blocks of ``kernel``: the largest that spill no registers, as `weft kernels` shows.

    Tensor cores want at least 16 of everything. fp32 keeps heads and remainders of all operands, vector gates a log for
    each q and k: both take blocks of half the size.
    """
    chunk = max(16, chunk)
    exact, vector = dtype == torch.float32, gate == "vector"
    small = exact or vector or chunk > 64
    rows, wide_k, wide_v, warps = chunk, 64, 64, 4
    if kernel in PAIRS:
        if exact:
            rows, wide_k, warps = 32, 32, 8
        elif vector:
            rows, wide_k, warps = 32, 64 if keys > 64 else 32, 4
        else:
            rows, wide_k, warps = 32 if max(keys, values) > 128 else 64, 64, 8
        # With fp32 a loop over V next to fp64 logs is where registers end.
        wide_v = 16 if exact and gate == "scalar" and kernel in ("query_grads", "key_grads") else wide_k
    elif kernel == "chunk_states":
        rows, wide_k = 32, 32 if exact else 64
        wide_v = wide_k
    elif kernel == "key_finish":
        wide_k, wide_v, warps = 32 if exact or chunk > 64 else 64, 32, 8
        if exact and vector and chunk > 64:
            wide_k = 16
    elif kernel != "scan_pieces" and small:
        wide_k, wide_v, warps = 32, 32, 8
    return Tiling(chunk, min(rows, chunk), min(wide_k, _power(keys)), min(wide_v, _power(values)), warps)


def gate_kind(g: Tensor | None) -> str:
    """The class of a decay by its shape."""
    return "none" if g is None else {1: "constant", 3: "scalar", 4: "vector"}[g.dim()]


def _power(dim: int) -> int:
    """The power of two that holds ``dim``, at least 16."""
    return max(16, 1 << (dim - 1).bit_length())


def chunks_per_piece(chunks: int, cells: int) -> int:
    """How many chunks one program walks through, where ``cells`` programs (heads, blocks) work on a piece."""
    pieces = -(-PROGRAMS // max(1, cells))
    return max(PIECE, -(-chunks // pieces))


def precision(*dtypes: torch.dtype) -> str:
    """How products are taken: tf32 holds half precision exactly; fp32 takes three products of heads and remainders."""
    return "tf32x3" if torch.float32 in dtypes else "tf32"
