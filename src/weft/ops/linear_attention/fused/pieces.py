"""Where chunks and pieces lie, as tables the kernels read.

The recurrence over chunks is sequential. So that it fills a GPU a segment is cut into pieces of some chunks: states are
computed from zero where a piece begins, and a scan over the pieces gives what arrives there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.comm.modes import keep_tensors
from weft.ops.linear_attention.fused.tiling import chunks_per_piece, tile
from weft.ops.linear_attention.grid import Grid


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
    per_piece = chunks_per_piece(grid.chunks, grid.batch * grid.value_heads * parts)
    return _tables(tuple(grid.lengths), grid.chunk, per_piece, grid.device)


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
    flat = torch.tensor([number for column in columns for number in column], dtype=torch.int32).to(device)
    return Pieces(*flat.split([len(column) for column in columns]))
