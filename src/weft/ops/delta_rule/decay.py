"""Decays between the tokens of the chunks of a tile, and their gradients: none, and one number per token.

Decays enter only as powers of two of logs that are never positive, and as products of such: nothing overflows, nothing
divides by a decay, and a strong gate costs its neighbours no accuracy. What is returned lies in buffers of the grid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from weft.ops.scan.grid import LOG_FLOOR, Grid

LOG2E = math.log2(math.e)


class Decay:
    """No decay; and what the others share.

    ``met`` is what meets the keys k [n, C, K] of a tile: they themselves, queries, both, or nothing. After `meet` its
    pairs x_r k_s, decayed from s to r >= s, are written [n, C, C], and the rest can be asked for. Of the backwards one
    comes, last of all; then `log_grad` is what all gave to the logs.
    """

    whole: Tensor | None = None  # the decay over a whole chunk, [n, 1 or K, 1]

    def __init__(self, grid: Grid, k: Tensor, met: Sequence[Tensor]) -> None:
        self._grid, self._k, self._met = grid, k, met
        self._matrix = grid.zeros(grid.chunk, grid.chunk).fill_(1.0).tril_()

    def meet(self, *pairs: Tensor, keep: bool = False) -> None:
        """Write the pairs of all that is met, or of nothing. ``keep`` what a backward will need."""
        for x, out in zip(self._met, pairs, strict=False):
            torch.bmm(x, self._k.mT, out=out).mul_(self._matrix)

    def from_start(self, place: int) -> Tensor:
        """What is met, by its place, decayed from the start of its chunk: itself, or a buffer."""
        return self._met[place]

    def to_end(self) -> Tensor:
        """The keys decayed to the end of their chunk."""
        return self._k

    def queries_backward(self, pairs: Tensor, grad: Tensor, dq: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the queries, the last that were met, and of the keys, from that of ``from_start(-1)``, ``dq``,
        and that of their ``pairs``. All are overwritten, and decayed tensors with them.
        """
        self._pairs_backward(pairs, grad)
        dq = self._from_start_backward(-1, dq).baddbmm_(grad, self._k)
        dk = self._grid.buffer("dk", *self._k.shape)
        return dq, torch.bmm(grad.mT, self._met[-1], out=dk)

    def keys_backward(self, pairs: Tensor, grad: Tensor, from_start: Tensor, to_end: Tensor) -> Tensor:
        """The gradient of the keys, from those of ``from_start(0)``, of ``to_end()`` and of their ``pairs``."""
        dk = self._to_end_backward(to_end)
        dk += self._from_start_backward(0, from_start)
        self._pairs_backward(pairs, grad)
        return dk.baddbmm_(torch.add(grad, grad.mT, out=pairs), self._k)

    def _from_start_backward(self, place: int, grad: Tensor) -> Tensor:
        return grad

    def _to_end_backward(self, grad: Tensor) -> Tensor:
        return grad

    def _pairs_backward(self, pairs: Tensor, grad: Tensor) -> None:
        """``grad`` becomes that of the products, without their decay."""
        grad.mul_(self._matrix)

    def whole_backward(self, state: Tensor, grad: Tensor) -> None:
        """Of the logs alone, from the gradient of ``whole * state``."""

    def log_grad(self) -> Tensor | None:
        """[n, C, 1 or K]."""
        return None


class ScalarDecay(Decay):
    """One number for each token, logs g [n, C, 1]: the pairs are one product, times a matrix of decays."""

    def __init__(self, grid: Grid, k: Tensor, met: Sequence[Tensor], g: Tensor) -> None:
        self._grid, self._k, self._met = grid, k, met
        # Of the sums only differences count: after a strong gate these are small, the sums are not, hence fp64.
        log = g.to(torch.float64).clamp_(min=LOG_FLOOR).mul_(LOG2E).cumsum(1)
        self._since = log.exp2().to(g.dtype)
        self._until = (log[:, -1:] - log).exp2_().to(g.dtype)
        self.whole = self._since[:, -1:]
        later = torch.full((grid.chunk, grid.chunk), -math.inf, dtype=g.dtype, device=g.device).triu_(1)
        apart = torch.sub(log, log.mT, out=grid.buffer("decay", *g.shape[:2], grid.chunk))
        self._matrix = apart.add_(later).exp2_()
        # What token r receives for all logs up to its own, what s gives to all after its own, what passes through all.
        self._row, self._col, self._all = (g.new_zeros(g.shape[:2]) for _ in range(3))

    def from_start(self, place: int) -> Tensor:
        x = self._met[place]
        name = f"from start {place % len(self._met)}"
        return torch.mul(x, self._since, out=self._grid.buffer(name, *x.shape))

    def to_end(self) -> Tensor:
        return torch.mul(self._k, self._until, out=self._grid.buffer("to end", *self._k.shape))

    def _from_start_backward(self, place: int, grad: Tensor) -> Tensor:
        grad.mul_(self._since)
        self._row.add_(sum_of_products(self._grid, grad, self._met[place]).squeeze(-1))
        return grad

    def _to_end_backward(self, grad: Tensor) -> Tensor:
        grad.mul_(self._until)
        self._col.add_(sum_of_products(self._grid, grad, self._k).squeeze(-1))
        return grad

    def whole_backward(self, state: Tensor, grad: Tensor) -> None:
        assert self.whole is not None
        both = torch.mul(state, grad, out=self._grid.buffer("state", *state.shape)).flatten(1).sum(-1, keepdim=True)
        self._all.addcmul_(both, self.whole.squeeze(-1))

    def _pairs_backward(self, pairs: Tensor, grad: Tensor) -> None:
        weight = pairs.mul_(grad)
        # No decay from a token to itself: left in, it would only cancel, at a loss of accuracy with strong gates.
        weight.diagonal(dim1=1, dim2=2).zero_()
        self._row.add_(weight.sum(2)).sub_(weight.sum(1))
        super()._pairs_backward(pairs, grad)

    def log_grad(self) -> Tensor:
        grad = self._row.flip(1).cumsum(1).flip(1) + self._all
        grad[:, 1:] += self._col[:, :-1].cumsum(1)
        return grad.unsqueeze(-1)


def sum_of_products(grid: Grid, x: Tensor, y: Tensor) -> Tensor:
    """Of the last dimension, which stays as 1."""
    return torch.mul(x, y, out=grid.buffer("product", *x.shape)).sum(-1, keepdim=True)
