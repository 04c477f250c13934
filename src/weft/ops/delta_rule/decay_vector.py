"""Decays of one number for each token and key: `weft.ops.delta_rule.decay` for KDA.

Between two tokens the decay differs from key to key, so pairs are no product with a decay on top. A chunk is halved,
again and again: for tokens r in the second half of a block and s in the first, the decay is that from the middle to r
times that from s to the middle, neither above one. Going from halves of 1, 2, 4, ... tokens to halves of twice as many
multiplies what is met in second halves by the decay of the first, and keys in first halves by the decay of the second:
at last they are decayed from the chunk's start, and to its end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.ops.delta_rule.decay import LOG2E, Decay, sum_of_products
from weft.ops.scan.grid import Grid, level_blocks, level_sizes

# Rows of a product: of smaller blocks several go into one, of which only the blocks on the diagonal count. A CPU
# takes nearly as long for each product of fewer rows.
ROWS = 16


class VectorDecay(Decay):
    """Logs g [n, C, K]. They are overwritten."""

    def __init__(self, grid: Grid, k: Tensor, met: Sequence[Tensor], g: Tensor) -> None:
        self._grid, self._k, self._met = grid, k, met
        self._own = g.mul_(LOG2E).exp2_()
        self._levels: list[Level] = []
        self._ends: Tensor | None = None  # what passes through the whole chunk gives to all of its logs, [n, K]

    def meet(self, *pairs: Tensor, keep: bool = False) -> None:
        grid, (n, chunk, dim) = self._grid, self._k.shape
        self._since = grid.buffer("since", n, chunk, len(self._met), dim)
        for place, x in enumerate(self._met):
            torch.mul(x, self._own, out=self._since[:, :, place])
        self._until = grid.buffer("until", *self._k.shape).copy_(self._k)
        for x, out in zip(self._met, pairs, strict=False):
            own = out.zero_().diagonal(dim1=1, dim2=2)
            if x is not self._k:  # of keys that meet themselves only what is below the diagonal is asked for
                own.copy_(sum_of_products(grid, x, self._k).squeeze(-1))
        decays = self._own
        for size in level_sizes(chunk):
            level = Level(grid, size, self._since, self._until, decays, str(size) if keep else "")
            level.write_pairs(pairs)
            decays = level.advance()
            if keep:
                self._levels.append(level)
        self.whole = decays.mT

    def from_start(self, place: int) -> Tensor:
        return self._since[:, :, place]

    def to_end(self) -> Tensor:
        return self._until

    def whole_backward(self, state: Tensor, grad: Tensor) -> None:
        assert self.whole is not None
        both = torch.mul(state, grad, out=self._grid.buffer("state", *state.shape)).sum(-1)
        self._ends = both.mul_(self.whole.squeeze(-1))

    def queries_backward(self, pairs: Tensor, grad: Tensor, dq: Tensor) -> tuple[Tensor, Tensor]:
        q = self._met[-1]
        dk = self._grid.buffer("dk", *self._k.shape).zero_()
        self._levels_backward(-1, grad, dq, dk)
        # What a token gives itself does not decay: left in, it would only cancel in the gradient of the logs.
        diagonal = grad.diagonal(dim1=1, dim2=2).unsqueeze(-1)
        return dq.addcmul_(diagonal, self._k), dk.addcmul_(diagonal, q)

    def keys_backward(self, pairs: Tensor, grad: Tensor, from_start: Tensor, to_end: Tensor) -> Tensor:
        ends = torch.mul(to_end, self._until, out=self._grid.buffer("product", *to_end.shape)).sum(1)
        self._ends = ends if self._ends is None else ends.add_(self._ends)
        self._levels_backward(0, grad, from_start, to_end)
        return to_end.add_(from_start)

    def _levels_backward(self, place: int, grad: Tensor, since: Tensor, until: Tensor) -> None:
        """From the gradients of what is decayed to those of what is met, ``since``, and of k, ``until``; in place."""
        for level in reversed(self._levels):
            level.backward(place, grad, since, until)
        since.mul_(self._own)
        # With G the sums of the logs: x_r times its gradient is that of G_r, k_s times its own that of -G_s.
        self._sums = torch.mul(since, self._met[place], out=self._grid.buffer("sums", *since.shape))
        self._sums.addcmul_(until, self._k, value=-1)

    def log_grad(self) -> Tensor:
        if self._ends is not None:
            self._sums[:, -1] += self._ends
        later = self._grid.zeros(self._grid.chunk, self._grid.chunk).fill_(1.0).triu_()
        out = self._grid.buffer("product", *self._sums.shape)
        return torch.bmm(later.expand(len(self._sums), -1, -1), self._sums, out=out)


class Level:
    """Blocks of 2 ``size`` tokens of ``since`` [n, C, places, K] and ``until`` [n, C, K]: what meets across middles.

    ``decays`` [n, blocks * 2, K] are those of halves. Buffers have ``name`` in their names.
    """

    def __init__(self, grid: Grid, size: int, since: Tensor, until: Tensor, decays: Tensor, name: str) -> None:
        self._grid, self._size = grid, size
        self._second, self._first = _halves(since, size)[1], _halves(until, size)[0]
        self.later = grid.buffer(f"later {name}", *self._second.shape).copy_(self._second)
        self.earlier = grid.buffer(f"earlier {name}", *self._first.shape).copy_(self._first)
        parts = decays.unflatten(1, (-1, 2))
        self._over_first, self._over_second = parts[:, :, :1], parts[:, :, 1:]  # [n, blocks, 1, K]
        self._together = max(1, ROWS // size) if until.shape[1] > ROWS else until.shape[1] // (2 * size)

    def advance(self) -> Tensor:
        """Decay by the other half, in place; the decays of the blocks, [n, blocks, K]."""
        torch.mul(self.later, self._over_first.unsqueeze(3), out=self._second)
        torch.mul(self.earlier, self._over_second, out=self._first)
        return (self._over_first * self._over_second).squeeze(2)

    def write_pairs(self, pairs: Sequence[Tensor]) -> None:
        if not pairs:
            return
        size, places, dim = self._size, *self.later.shape[3:]
        rows = self._together * size
        later, earlier = self.later.view(-1, rows * places, dim), self.earlier.view(-1, rows, dim)
        out = self._grid.buffer("across", len(later), rows * places, rows)
        across = torch.bmm(later, earlier.mT, out=out).view(len(later), -1, size, places, self._together, size)
        blocks = across.diagonal(dim1=1, dim2=4).permute(0, 4, 1, 2, 3)  # [-1, together, size, places, size]
        for place, out in enumerate(pairs):
            self._grouped(out).copy_(blocks[:, :, :, place].view(self._grouped(out).shape))

    def _grouped(self, matrix: Tensor) -> Tensor:
        """The blocks of the level in [n, C, C]: a view [n, groups, together, size, size]."""
        return level_blocks(matrix, self._size).unflatten(1, (-1, self._together))

    def backward(self, place: int, grad: Tensor, since: Tensor, until: Tensor) -> None:
        """Gradients of what was advanced become those of what there was before, with that of the pairs; in place."""
        size, dim = self._size, self.earlier.shape[-1]
        rows = self._together * size
        blocks = self._grouped(grad)
        n, groups = blocks.shape[:2]
        across = self._grid.buffer("across", n, groups, self._together, size, self._together, size).zero_()
        across.diagonal(dim1=2, dim2=4).permute(0, 1, 4, 2, 3).copy_(blocks)
        across = across.view(-1, rows, rows)
        later, earlier = self.later[:, :, :, place].reshape(-1, rows, dim), self.earlier.view(-1, rows, dim)
        for half, over, left, right in (
            (_halves(since, size)[1], self._over_first, across, earlier),
            (_halves(until, size)[0], self._over_second, across.mT, later),
        ):
            product = torch.bmm(left, right, out=self._grid.buffer("half", len(right), rows, dim)).view(half.shape)
            torch.addcmul(product, half, over, out=half)


def _halves(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """First and second halves of the blocks of 2 ``size`` tokens in [n, C, ...]: views [n, blocks, size, ...]."""
    first, second = x.unflatten(1, (-1, 2, size)).unbind(2)
    return first, second
