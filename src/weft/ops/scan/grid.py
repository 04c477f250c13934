"""The chunk grid of linear attention and the delta rule: geometry, tiles, and the recurrence over chunks.

Tokens [B, T, heads, D] are cut into segments (packed documents), and every segment into chunks of C tokens; the last
chunk of a segment is padded with zeros. A batch row then has M chunks, and the unit of work is a *tile*: some chunks of
some batch rows, all heads, copied into a dense [n, C, D] buffer of about a megabyte that stays in cache. Tiles, states
and gate tables all index the grid as [M, B, HV], chunk first, so that a tile of states is a plain slice and one step of
the recurrence over chunks touches one contiguous block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.comm.device import copy_to_device
from weft.comm.function import reused_memory

# Elements of one tile buffer. Around 1 MB in fp32: small enough for the cache, large enough to hide Python.
TILE_ELEMENTS = 1 << 18
# exp of this is exactly zero in every dtype, and unlike -inf it can be summed and subtracted: the least log.
LOG_FLOOR = -1000.0
# Blocks up to this many tokens are multiplied elementwise: products of matrices this small are all overhead.
SMALL = 2


@dataclass(frozen=True)
class Tile:
    """A rectangle of the grid: chunks ``m`` of batch rows ``b``, all heads."""

    m: slice
    b: slice

    @property
    def shape(self) -> tuple[int, int]:
        """Number of chunks and of batch rows."""
        return self.m.stop - self.m.start, self.b.stop - self.b.start


class Grid:
    """Where every token sits: segments, chunks, tiles. Holds no token data."""

    def __init__(self, q: Tensor, v: Tensor, lengths: list[int], chunk_size: int) -> None:
        self.batch, self.tokens, self.heads, self.key_dim = q.shape
        self.value_heads, self.value_dim = v.shape[2:]
        if self.value_heads % self.heads:
            raise ValueError(f"{self.value_heads} value heads are not a multiple of {self.heads} heads")
        if sum(lengths) != self.tokens or min(lengths, default=0) < 0:
            raise ValueError(f"segment lengths {lengths} do not cut {self.tokens} tokens")
        if len(lengths) != 1 and self.batch != 1:
            raise ValueError(f"{len(lengths)} packed segments need a batch of 1, got {self.batch}")
        self.group = self.value_heads // self.heads
        self.lengths = lengths
        self.dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.device = q.device
        self._memory = reused_memory(q.device)
        # Short documents would be mostly padding in a full chunk.
        # Gates halve the chunk down to single tokens, so it is a power of two.
        self.chunk = 1 << min(chunk_size.bit_length() - 1, max(max(lengths, default=0) - 1, 0).bit_length())
        counts = [-(-length // self.chunk) for length in lengths]
        self.spans: list[tuple[int, int]] = []
        for count in counts:
            start = self.spans[-1][1] if self.spans else 0
            self.spans.append((start, start + count))
        self.owner = [s for s, count in enumerate(counts) for _ in range(count)]  # the segment of a chunk
        self.chunks = len(self.owner)
        self.aligned = self.chunks * self.chunk == self.tokens

    @property
    def tiles(self) -> list[Tile]:
        """The tiles in the order of the tokens; whole batch rows per chunk where that is not too much."""
        widest = self.chunk * max(self.chunk, self.key_dim, self.value_dim)
        cells = max(1, TILE_ELEMENTS // (widest * self.value_heads))
        rows = min(cells, self.batch)
        step = max(1, cells // self.batch)
        return [
            Tile(slice(m, min(m + step, self.chunks)), slice(b, min(b + rows, self.batch)))
            for m in range(0, self.chunks, step)
            for b in range(0, self.batch, rows)
        ]

    def buffer(self, name: str, *shape: int) -> Tensor:
        """A reused dense buffer; what it held under the same name is lost."""
        return self._memory.buffer(name, shape, self.dtype, self.device)

    def zeros(self, *shape: int) -> Tensor:
        """Zeros in the dtype of the arithmetic."""
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def identity(self, size: int) -> Tensor:
        """[size, size] in the dtype of the arithmetic."""
        return torch.eye(size, dtype=self.dtype, device=self.device)

    def empty_tokens(self, heads: int, dim: int) -> Tensor:
        """A buffer on the grid, [M, B, heads, C, dim] in the arithmetic's dtype, laid out for `restore`."""
        shape = (self.batch, self.chunks, self.chunk, heads, dim)
        return torch.empty(shape, dtype=self.dtype, device=self.device).permute(1, 0, 3, 2, 4)

    def empty_states(self) -> Tensor:
        """A buffer for the M + 1 states between the chunks of a batch row, [M+1, B, HV, K, V]."""
        return self.borrow(self.chunks + 1, self.batch, self.value_heads, self.key_dim, self.value_dim)

    def empty_table(self, *shape: int) -> Tensor:
        """A buffer for what every chunk and head has one of, [M, B, HV, *shape]."""
        return self.borrow(self.chunks, self.batch, self.value_heads, *shape)

    def borrow(self, *shape: int) -> Tensor:
        """Memory that lasts until it is given back."""
        return self._memory.borrow(shape, self.dtype, self.device)

    def give_back(self, *borrowed: Tensor) -> None:
        """Let a later call of this thread have the memory."""
        self._memory.give_back(borrowed)

    # Tokens to grid and back.

    def _positions(self) -> Tensor:
        """Grid position of every token, [T]."""
        runs = [
            torch.arange(length, device=self.device) + first * self.chunk
            for (first, _), length in zip(self.spans, self.lengths, strict=True)
        ]
        return torch.cat(runs)

    def lay(self, x: Tensor) -> Tensor:
        """[B, T, heads, D] -> [M, B, heads, C, D], zeros as padding; a view of x where nothing needs padding."""
        x = x.detach()
        if not self.aligned:
            padded = x.new_zeros(self.batch, self.chunks * self.chunk, *x.shape[2:])
            if len(self.lengths) == 1:
                padded[:, : self.tokens] = x
            else:
                padded.index_copy_(1, self._positions(), x)
            x = padded
        return x.unflatten(1, (self.chunks, self.chunk)).permute(1, 0, 3, 2, 4)

    def restore(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """[M, B, heads, C, D] -> [B, T, heads, D] in ``dtype``: the inverse of `lay`."""
        x = x.permute(1, 0, 3, 2, 4).flatten(1, 2)
        if not self.aligned:
            x = x[:, : self.tokens] if len(self.lengths) == 1 else x.index_select(1, self._positions())
        return x.to(dtype).contiguous()

    # One tile of tokens.

    def _shared(self, view: Tensor) -> Tensor:
        """A tile [m, b, heads, C, D], heads repeated for their group: itself or a view [m, b, heads, group, C, D]."""
        group = self.value_heads // view.shape[2]
        return view if group == 1 else view.unsqueeze(3).expand(-1, -1, -1, group, -1, -1)

    def copy(self, x: Tensor, tile: Tile) -> Tensor:
        """What `take` gives, in memory that stays; where x is as it should be, a view of it."""
        view = self._shared(x[tile.m, tile.b])
        return view.to(self.dtype).reshape(-1, *view.shape[-2:])

    def take(self, name: str, x: Tensor, tile: Tile) -> Tensor:
        """The tile of x [M, B, heads, C, D] as dense [n, C, D] over the value heads, in the arithmetic's dtype."""
        view = self._shared(x[tile.m, tile.b])
        return self.buffer(name, *view.shape).copy_(view).flatten(0, -3)

    def take_times(self, name: str, x: Tensor, factor: Tensor, tile: Tile) -> Tensor:
        """`take` of x times a factor [n, C, 1]: one pass for both."""
        view = self._shared(x[tile.m, tile.b])
        dense = self.buffer(name, *view.shape)
        return torch.mul(view, factor.view(*view.shape[:-1], 1), out=dense).flatten(0, -3)

    def put(self, x: Tensor, dense: Tensor, tile: Tile, add: bool) -> None:
        """Write, or add, a dense tile [n, C, D] into x [M, B, heads, C, D], summed over the group of a shared head."""
        view = x[tile.m, tile.b]
        value = dense.view(self._shared(view).shape)
        if value.dim() > view.dim():
            value = value.sum(3)
        if add:
            view.add_(value)
        else:
            view.copy_(value)

    # Tables [M, B, HV, ...] and states [M or M+1, B, HV, K, V].

    @staticmethod
    def at(table: Tensor, tile: Tile, shift: int = 0) -> Tensor:
        """The tile of a grid table as [n, ...]; ``shift=1`` takes the state leaving a chunk instead of entering it."""
        return table[tile.m.start + shift : tile.m.stop + shift, tile.b].flatten(0, 2)

    @staticmethod
    def steps(table: Tensor, tile: Tile, more: int = 0) -> tuple[Tensor, ...]:
        """What each chunk of a tile (and ``more`` behind it) has in a grid table, [B * HV, ...] in the table."""
        return table[tile.m.start : tile.m.stop + more, tile.b].flatten(1, 2).unbind(0)

    @staticmethod
    def split(dense: Tensor, tile: Tile) -> tuple[Tensor, ...]:
        """A dense tile [n, ...] chunk by chunk, [B * HV, ...]."""
        return dense.unflatten(0, (tile.shape[0], -1)).unbind(0)

    def zero_states(self) -> Tensor:
        """One zero state per segment, [N, B, HV, K, V]."""
        return self.zeros(len(self.lengths), self.batch, self.value_heads, self.key_dim, self.value_dim)

    def split_states(self, states: Tensor | None) -> Tensor | None:
        """States of the API [B*N, HV, K, V] -> [N, B, HV, K, V] in the arithmetic's dtype."""
        if states is None:
            return None
        return states.detach().to(self.dtype).unflatten(0, (self.batch, len(self.lengths))).transpose(0, 1)

    @staticmethod
    def join_states(states: Tensor) -> Tensor:
        """[N, B, ...] -> [B*N, ...], the layout of the API."""
        return states.transpose(0, 1).flatten(0, 1)

    def add_late(self, states: Tensor, decay: Tensor | None, late: Tensor | None, tile: Tile, shift: int = 0) -> None:
        """Add the decayed late state of its segment, [N, B, HV, K, V], to each state of a tile, in place."""
        if late is None:
            return
        late = late[:, tile.b]
        if len(self.spans) == 1:
            late = late.expand(tile.shape[0], -1, -1, -1, -1)
        else:
            late = late[copy_to_device(torch.tensor(self.owner[tile.m]), self.device)]
        mine = states[tile.m.start + shift : tile.m.stop + shift, tile.b]
        _accumulate(mine, late, None if decay is None else decay[tile.m, tile.b])

    # The recurrence over chunks. One in-place operation per chunk, over all batch rows and heads of a tile at once, and
    # tile by tile, while the chunk sums are still in cache.

    def scan(
        self, states: Tensor, decay: Tensor | None, start: Tensor | None, end: Tensor | None, tile: Tile,
        reverse: bool = False,
    ) -> None:  # fmt: skip
        """Turn the chunk sums of a tile into states, in place. Tiles must come in order.

        On entry slot m+1 of states [M+1, B, HV, K, V] holds the sum of chunk m; afterwards slot m holds the state
        entering chunk m. ``decay`` [M, B, HV, K or 1, 1] is that of whole chunks; ``start`` are the states entering the
        segments (None: zero) and ``end``, if wanted, receives those leaving them, both [N, B, HV, K, V].

        ``reverse`` is for gradients, last chunk first, and tiles in reverse order. On entry slot m holds the sum of
        chunk m; afterwards slot m+1 holds the gradient of the state leaving it. Segments start at their last chunk.
        """
        chunks = range(tile.m.start, tile.m.stop)
        for m in reversed(chunks) if reverse else chunks:
            s = self.owner[m]
            first, last = self.spans[s][0], self.spans[s][1] - 1
            before, sums = states[m + reverse, tile.b], states[m + (not reverse), tile.b]
            if m == (last if reverse else first):
                # The slot held what came out of the segment before, which nobody needs here any more.
                before.zero_() if start is None else before.copy_(start[s, tile.b])
            _accumulate(sums, before, None if decay is None else decay[m, tile.b])
            if end is not None and m == (first if reverse else last):
                end[s, tile.b] = sums


def _accumulate(total: Tensor, state: Tensor, decay: Tensor | None) -> None:
    """total += decay * state, in place."""
    if decay is None:
        total.add_(state)
    else:
        total.addcmul_(state, decay)


# A chunk in halves, again and again: each pair of tokens lies across the middle of one block of 2, 4, ... C tokens.


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
