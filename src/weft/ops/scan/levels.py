"""A chunk in halves, again and again: each pair of tokens lies across the middle of one block of 2, 4, ... C tokens."""

from __future__ import annotations

from torch import Tensor

# Blocks up to this many tokens are multiplied elementwise: products of matrices this small are all overhead.
SMALL = 2


def level_sizes(chunk: int) -> list[int]:
    """1, 2, 4, ... below the chunk: the halves of the blocks a chunk is made of, level by level."""
    return [1 << level for level in range(chunk.bit_length() - 1)]


def level_blocks(matrix: Tensor, size: int) -> Tensor:
    """The pairs (second half, first half) of the blocks of a level in [n, C, C]: a view [n, blocks, size, size]."""
    count = matrix.shape[1] // (2 * size)
    blocks = matrix.view(-1, count, 2, size, count, 2, size)[:, :, 1, :, :, 0]
    return blocks.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)


def halves(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """First and second halves of the blocks of a level in [n, C, D]: two views [n, blocks, size, D]."""
    blocks = x.unflatten(1, (-1, 2, size))
    return blocks[:, :, 0], blocks[:, :, 1]


def times_transposed(x: Tensor, y: Tensor) -> Tensor:
    """x y^T over the last two dimensions, [n, blocks, size, size]."""
    if x.shape[2] <= SMALL:
        return (x.unsqueeze(3) * y.unsqueeze(2)).sum(-1)
    return x @ y.mT


def times(block: Tensor, x: Tensor) -> Tensor:
    """block [n, blocks, size, size] times x [n, blocks, size, D]."""
    if x.shape[2] > SMALL:
        return block @ x
    product = block[..., :1] * x[:, :, :1]
    for j in range(1, x.shape[2]):
        product.addcmul_(block[..., j : j + 1], x[:, :, j : j + 1])
    return product
