"""Decays between the tokens of the chunks of a tile, and their gradients: none, one number per token, one per key too.

Decays enter only as powers of two of logs that are never positive, and as products of such: nothing overflows, nothing
divides by a decay, and a strong gate costs its neighbours no accuracy. What is returned lies in buffers of the grid.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from weft.ops.scan.grid import LOG_FLOOR, Grid, halves, level_blocks, level_sizes, times, times_transposed

LOG2E = math.log2(math.e)


def decay_of(grid: Grid, g: Tensor | None) -> Decay:
    """The decay of a tile with logs ``g`` [n, C, 1 or K], or None. It may overwrite them."""
    if g is None:
        return Decay(grid)
    return VectorDecay(grid, g) if g.shape[-1] > 1 else ScalarDecay(grid, g)


class Decay:
    """No decay; and what the others share.

    ``pairs(x, k)`` [n, C, C] are the products of x_r and k_s decayed from s to r, for r >= s. The backward of the pairs
    comes last of all backwards; then `log_grad` is what all of them gave to the logs.
    """

    whole: Tensor | None = None  # the decay over a whole chunk, [n, 1 or K, 1]

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._matrix = grid.zeros(grid.chunk, grid.chunk).fill_(1.0).tril_()

    def from_start(self, x: Tensor, name: str) -> Tensor:
        """x_r decayed from the start of its chunk, [n, C, K]: x itself, or the buffer ``name``."""
        return x

    def to_end(self, x: Tensor, name: str) -> Tensor:
        """x_s decayed to the end of its chunk."""
        return x

    def pairs(self, x: Tensor, k: Tensor, out: Tensor) -> Tensor:
        return torch.bmm(x, k.mT, out=out).mul_(self._matrix)

    def pairs_backward(self, x: Tensor, k: Tensor, pairs: Tensor, grad: Tensor, dx: Tensor, dk: Tensor) -> None:
        """Add to the gradients of x and k; ``grad`` is that of the ``pairs`` and is overwritten, as they are."""
        grad.mul_(self._matrix)
        if dx is dk:
            dk.baddbmm_(torch.add(grad, grad.mT, out=pairs), k)
        else:
            dx.baddbmm_(grad, k)
            dk.baddbmm_(grad.mT, x)

    def from_start_backward(self, decayed: Tensor, grad: Tensor) -> Tensor:
        """The gradient of x, in place, from that of ``from_start(x)``, which was ``decayed`` and is overwritten."""
        return grad

    def to_end_backward(self, decayed: Tensor, grad: Tensor) -> Tensor:
        return grad

    def whole_backward(self, state: Tensor, grad: Tensor) -> None:
        """Of the logs alone, from the gradient of ``whole * state``."""

    def log_grad(self) -> Tensor | None:
        """[n, C, 1 or K]."""
        return None


class ScalarDecay(Decay):
    """One number for each token: the pairs are one product, times a matrix of decays."""

    def __init__(self, grid: Grid, g: Tensor) -> None:
        self._grid = grid
        # Of the sums only differences count: after a strong gate these are small, the sums are not, hence fp64.
        log = g.to(torch.float64).clamp_(min=LOG_FLOOR).mul_(LOG2E).cumsum(1)
        self._from_start = log.exp2().to(g.dtype)
        self._to_end = (log[:, -1:] - log).exp2_().to(g.dtype)
        self.whole = self._from_start[:, -1:]
        later = torch.full((grid.chunk, grid.chunk), -math.inf, dtype=g.dtype, device=g.device).triu_(1)
        apart = torch.sub(log, log.mT, out=grid.buffer("decay", *g.shape[:2], grid.chunk))
        self._matrix = apart.add_(later).exp2_()
        # What token r receives for all logs up to its own, what s gives to all after its own, what passes through all.
        self._row, self._col, self._all = (g.new_zeros(g.shape[:2]) for _ in range(3))

    def from_start(self, x: Tensor, name: str) -> Tensor:
        return torch.mul(x, self._from_start, out=self._grid.buffer(name, *x.shape))

    def to_end(self, x: Tensor, name: str) -> Tensor:
        return torch.mul(x, self._to_end, out=self._grid.buffer(name, *x.shape))

    def from_start_backward(self, decayed: Tensor, grad: Tensor) -> Tensor:
        self._row.add_(decayed.mul_(grad).sum(-1))
        return grad.mul_(self._from_start)

    def to_end_backward(self, decayed: Tensor, grad: Tensor) -> Tensor:
        self._col.add_(decayed.mul_(grad).sum(-1))
        return grad.mul_(self._to_end)

    def whole_backward(self, state: Tensor, grad: Tensor) -> None:
        assert self.whole is not None
        both = torch.mul(state, grad, out=self._grid.buffer("state", *state.shape)).flatten(1).sum(-1, keepdim=True)
        self._all.addcmul_(both, self.whole.squeeze(-1))

    def pairs_backward(self, x: Tensor, k: Tensor, pairs: Tensor, grad: Tensor, dx: Tensor, dk: Tensor) -> None:
        weight = pairs.mul_(grad)
        # No decay from a token to itself: left in, it would only cancel, at a loss of accuracy with strong gates.
        weight.diagonal(dim1=1, dim2=2).zero_()
        self._row.add_(weight.sum(2)).sub_(weight.sum(1))
        super().pairs_backward(x, k, pairs, grad, dx, dk)

    def log_grad(self) -> Tensor:
        grad = self._row.flip(1).cumsum(1).flip(1) + self._all
        grad[:, 1:] += self._col[:, :-1].cumsum(1)
        return grad.unsqueeze(-1)


class VectorDecay(Decay):
    """One number for each token and key: the pairs over the middle of a block are a product of decayed x and k.

    ``since`` are the decays from the start of a half to its tokens, ``until`` from them to its end. Going from halves
    of s to halves of 2 s tokens multiplies one half of them by the decay of the other: at last they are those from the
    start of the chunk and to its end.
    """

    def __init__(self, grid: Grid, g: Tensor) -> None:
        self._grid = grid
        since = g.clamp_(min=LOG_FLOOR).mul_(LOG2E).exp2_()
        until = grid.buffer("until", *g.shape).fill_(1.0)
        self._levels: list[tuple[int, Tensor, Tensor]] = []
        for size in level_sizes(grid.chunk):
            (since_first, since_second), until_first = halves(since, size), halves(until, size)[0]
            shape = since_second.shape
            kept = (grid.buffer(f"since {size}", *shape), grid.buffer(f"until {size}", *shape))
            self._levels.append((size, kept[0].copy_(since_second), kept[1].copy_(until_first)))
            until_first.mul_(since_second[:, :, -1:])
            since_second.mul_(since_first[:, :, -1:])
        self._from_start, self._to_end = since, until
        self.whole = since[:, -1].unsqueeze(-1)
        self._grad_since, self._grad_until = (grid.buffer(name, *g.shape) for name in ("grad since", "grad until"))
        self._clear = True

    def _grads(self) -> tuple[Tensor, Tensor]:
        """Gradients of the logs of ``since`` and ``until``."""
        if self._clear:
            self._clear = False
            self._grad_since.zero_()
            self._grad_until.zero_()
        return self._grad_since, self._grad_until

    def from_start(self, x: Tensor, name: str) -> Tensor:
        return torch.mul(x, self._from_start, out=self._grid.buffer(name, *x.shape))

    def to_end(self, x: Tensor, name: str) -> Tensor:
        return torch.mul(x, self._to_end, out=self._grid.buffer(name, *x.shape))

    def from_start_backward(self, decayed: Tensor, grad: Tensor) -> Tensor:
        self._grads()[0].addcmul_(decayed, grad)
        return grad.mul_(self._from_start)

    def to_end_backward(self, decayed: Tensor, grad: Tensor) -> Tensor:
        self._grads()[1].addcmul_(decayed, grad)
        return grad.mul_(self._to_end)

    def whole_backward(self, state: Tensor, grad: Tensor) -> None:
        assert self.whole is not None
        both = torch.mul(state, grad, out=self._grid.buffer("state", *state.shape)).sum(-1)
        self._grads()[0][:, -1].addcmul_(both, self.whole.squeeze(-1))

    def pairs(self, x: Tensor, k: Tensor, out: Tensor) -> Tensor:
        out.zero_().diagonal(dim1=1, dim2=2).copy_(torch.mul(x, k, out=self._grid.buffer("product", *x.shape)).sum(-1))
        for size, since, until in self._levels:
            later, earlier = self._across(x, k, size, since, until)
            level_blocks(out, size).copy_(times_transposed(later, earlier))
        return out

    def _across(self, x: Tensor, k: Tensor, size: int, since: Tensor, until: Tensor) -> tuple[Tensor, Tensor]:
        """x after the middles of the blocks and k before them, decayed from there and to there."""
        later = torch.mul(halves(x, size)[1], since, out=self._grid.buffer("later", *since.shape))
        return later, torch.mul(halves(k, size)[0], until, out=self._grid.buffer("earlier", *until.shape))

    def pairs_backward(self, x: Tensor, k: Tensor, pairs: Tensor, grad: Tensor, dx: Tensor, dk: Tensor) -> None:
        diagonal = grad.diagonal(dim1=1, dim2=2).unsqueeze(-1)
        dx.addcmul_(diagonal, k)
        dk.addcmul_(diagonal, x)
        grad_since, grad_until = self._grads()
        for size, since, until in reversed(self._levels):
            (first, second), before = halves(grad_since, size), halves(grad_until, size)[0]
            first[:, :, -1].add_(second.sum(2))
            second[:, :, -1].add_(before.sum(2))
            later, earlier = self._across(x, k, size, since, until)
            block = level_blocks(grad, size)
            grad_later, grad_earlier = times(block, earlier), times(block.mT, later)
            second.addcmul_(later, grad_later)
            before.addcmul_(earlier, grad_earlier)
            halves(dx, size)[1].addcmul_(grad_later, since)
            halves(dk, size)[0].addcmul_(grad_earlier, until)

    def log_grad(self) -> Tensor:
        return self._grads()[0]
