"""Which blocks the Triton kernels work in, and where chunks and pieces lie.

Blocks are a function of the shapes alone, so that the same inputs give the same bits. The recurrence over chunks is
sequential. So that it fills a GPU a segment is cut into pieces of some chunks: states are computed from zero where a
piece begins, and a scan over the pieces gives what arrives there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.comm.device import copy_to_device
from weft.comm.function import keep_tensors
from weft.ops.scan.grid import Grid

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


KERNELS = ("chunk_states", "scan_pieces", "output_intra", "output_inter", "query_grads", "key_grads", "key_finish")
PAIRS = ("output_intra", "query_grads", "key_grads")


def operands(given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Of the arguments by name: the tensor that has the dtype and K, and the one that has value heads and V."""
    x = given["x"] if "x" in given else given["q"] if "q" in given else given["k"]
    return x, next(given[name] for name in ("y", "v", "out") if name in given)


def tile(
    kernel: str,
    chunk: int,
    keys: int,
    values: int,
    gate: str,
    dtype: torch.dtype,
    value_dtype: torch.dtype | None = None,
) -> Tiling:
    """The blocks of ``kernel``: the largest that spill no registers, as `weft kernels` shows.

    Tensor cores want at least 16 of everything. fp32 keeps heads and remainders of all operands, vector gates a log for
    each q and k: both take blocks of half the size. ``value_dtype`` is that of v or do, if it is not that of q and k.
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
            rows, wide_k, warps = min(32, max(16, chunk // 2)) if max(keys, values) > 128 else 64, 64, 8
        # With fp32 a loop over V next to fp64 logs is where registers end.
        narrow = {"scalar": ("query_grads", "key_grads"), "vector": ("key_grads",)}.get(gate, ())
        wide_v = 16 if exact and kernel in narrow else wide_k
        if value_dtype == torch.float32 and kernel == "query_grads" and not exact:
            rows, wide_v = 32 if vector else 64, 32
    elif kernel == "chunk_states":
        rows, wide_k = 32, 32 if exact else 64
        wide_v = wide_k
    elif kernel == "key_finish":
        wide_k, wide_v, warps = 32 if exact or chunk > 64 else 64, 32, 8
        if exact and vector and chunk > 64:
            wide_k = 16
    elif kernel != "scan_pieces" and small:
        wide_k, wide_v, warps = 32, 32, 8
    return Tiling(chunk, min(rows, chunk), min(wide_k, round_up(keys)), min(wide_v, round_up(values)), warps)


def gate_kind(g: Tensor | None) -> str:
    """The class of a decay by its shape."""
    return "none" if g is None else {1: "constant", 3: "scalar", 4: "vector"}[g.dim()]


def round_up(dim: int) -> int:
    """The power of two that holds ``dim``, at least 16."""
    return max(16, 1 << (dim - 1).bit_length())


def precision(exact: bool) -> str:
    """How products are taken: tf32 holds half precision exactly; fp32 takes three products of heads and remainders."""
    return "tf32x3" if exact else "tf32"


@dataclass(frozen=True)
class Pieces:
    """Tables in int32 on the device of the inputs.

    ``start`` and ``length`` [M]: first token of a chunk, and how many it has. ``piece`` [M]: the piece of a chunk.
    ``first``, ``last`` [P]: chunks of a piece. ``segment_first``, ``segment_last`` [N]: pieces of a segment.
    """

    start: Tensor
    length: Tensor
    piece: Tensor
    first: Tensor
    last: Tensor
    segment_first: Tensor
    segment_last: Tensor

    @property
    def chunks(self) -> int:
        return self.start.shape[0]

    @property
    def count(self) -> int:
        return self.first.shape[0]


def cut(grid: Grid, gate: str, dtype: torch.dtype) -> Pieces:
    """The tables of a grid; those of the last few geometries are kept, since layers share them."""
    blocks = tile("chunk_states", grid.chunk, grid.key_dim, grid.value_dim, gate, dtype)
    parts = -(-grid.key_dim // blocks.keys) * -(-grid.value_dim // blocks.values)
    pieces = -(-PROGRAMS // max(1, grid.batch * grid.value_heads * parts))  # so many programs work on each of them
    return _tables(tuple(grid.lengths), grid.chunk, max(PIECE, -(-grid.chunks // pieces)), grid.device)


def cut_chunks(grid: Grid) -> Pieces:
    """The tables of a grid with a piece for each chunk."""
    return _tables(tuple(grid.lengths), grid.chunk, 1, grid.device)


@keep_tensors(maxsize=64)
def _tables(lengths: tuple[int, ...], chunk: int, per_piece: int, device: torch.device) -> Pieces:
    columns: list[list[int]] = [[] for _ in range(7)]
    start, length, piece, first, last, segment_first, segment_last = columns
    token = 0
    for tokens in lengths:
        segment_first.append(len(first))
        for index, begin in enumerate(range(0, tokens, chunk)):
            if index % per_piece == 0:
                first.append(len(start))
                last.append(len(start))
            start.append(token + begin)
            length.append(min(chunk, tokens - begin))
            piece.append(len(first) - 1)
            last[-1] = len(start)
        segment_last.append(len(first))
        token += tokens
    flat = torch.tensor([number for column in columns for number in column], dtype=torch.int32)
    return Pieces(*copy_to_device(flat, device).split([len(column) for column in columns]))
