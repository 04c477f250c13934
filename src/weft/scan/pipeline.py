"""pipeline (ZeCO's all-scan): a chain that passes the state in blocks, each as soon as it is ready."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.comm import Axis
from weft.scan.affine import Affine

BLOCK_BYTES = 256 * 1024  # below this a message costs more in overhead than its block saves in waiting
MOST_BLOCKS = 16


def pipeline(axis: Axis, local: Affine, blocks: int | None) -> Tensor | None:
    """P+K-2 steps of 1/K of a state. A rank applies its own map, so no decay travels.

    Receive block, apply, send on, for each block; the link to the next rank works while the next block
    arrives.
    """
    blocks = default_blocks(local.state) if blocks is None else blocks
    pieces = local.cut(min(blocks, local.state.shape[-1 if local.kind == "dense" else -2]))
    whole = torch.empty_like(local.state) if axis.rank > 0 else None
    entering: list[Tensor | None] = [None] * len(pieces)
    if whole is not None:
        sizes = [piece.state.numel() for piece in pieces]
        parts = whole.view(-1).split(sizes)
        entering = [part.view(piece.state.shape) for part, piece in zip(parts, pieces, strict=True)]
    arriving = [axis.receive(part, axis.rank - 1) for part in entering if part is not None]
    leaving = []
    for number, piece in enumerate(pieces):
        if arriving:
            arriving[number].wait()
        if axis.rank + 1 < axis.size:
            state = piece.apply(entering[number])
            leaving.append((state, axis.send(state, axis.rank + 1)))
    for _, sent in leaving:
        sent.wait()
    if whole is None or local.kind != "dense":
        return whole
    return torch.cat([part for part in entering if part is not None], dim=-1)


def default_blocks(state: Tensor) -> int:
    """How many blocks to cut a state into when nobody says."""
    return min(MOST_BLOCKS, max(1, state.numel() * state.element_size() // BLOCK_BYTES))
