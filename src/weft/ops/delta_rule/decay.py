"""Decays between the tokens of a chunk, and their gradients: none, one number per token, one per token and key.

All are exponentials of sums of logs that are never positive. Between two tokens the sum is cut at the middle of the
block that separates them (blocks of 2, 4, ... C tokens): one sum from the middle to the later token, one from the
earlier token to the middle. So nothing is subtracted, nothing overflows, and a strong gate costs its neighbours no
accuracy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.ops.scan.grid import LOG_FLOOR, level_blocks, level_sizes


def decay_of(g: Tensor | None, chunk: int, like: Tensor) -> Decay:
    """The decay of a tile with logs ``g`` [n, C, 1 or K], or None."""
    if g is None:
        return Decay(chunk, like)
    return VectorDecay(g) if g.shape[-1] > 1 else ScalarDecay(g)


class Decay:
    """No decay; and what the others share.

    ``pairs(x, k)`` [n, C, C] are the products of x_r and k_s decayed from s to r, for r >= s. What each backward gives
    to the logs adds up in ``grad`` [n, C, 1 or K].
    """

    whole: Tensor | None = None  # the decay over a whole chunk, [n, 1 or K, 1]

    def __init__(self, chunk: int, like: Tensor) -> None:
        self._matrix = torch.ones(chunk, chunk, dtype=like.dtype, device=like.device).tril()

    def from_start(self, x: Tensor) -> Tensor:
        """x_r decayed from the start of its chunk, [n, C, K]."""
        return x

    def to_end(self, x: Tensor) -> Tensor:
        """x_s decayed to the end of its chunk."""
        return x

    def pairs(self, x: Tensor, k: Tensor) -> Tensor:
        return (x @ k.mT).mul_(self._matrix)

    def pairs_backward(self, x: Tensor, k: Tensor, pairs: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of x and k; ``grad`` is that of the ``pairs``."""
        decayed = grad * self._matrix
        return decayed @ k, decayed.mT @ x

    def from_start_backward(self, decayed: Tensor, grad: Tensor) -> Tensor:
        """The gradient of x, from that of ``from_start(x)``, which was ``decayed``."""
        return grad

    def to_end_backward(self, decayed: Tensor, grad: Tensor) -> Tensor:
        return grad

    def whole_backward(self, state: Tensor, grad: Tensor) -> None:
        """Of the logs alone, from the gradient of ``whole * state``."""

    @property
    def grad(self) -> Tensor | None:
        return None


class LoggedDecay(Decay):
    """With logs g [n, C, 1 or K]."""

    def __init__(self, g: Tensor) -> None:
        self._log = g.clamp(min=LOG_FLOOR)
        self._from_start = self._log.cumsum(1).exp()
        self._to_end = _sums_after(self._log).exp()
        self.whole = self._from_start[:, -1].unsqueeze(-1)
        self._grad: Tensor | None = None

    @property
    def grad(self) -> Tensor:
        if self._grad is None:
            self._grad = torch.zeros_like(self._log)
        return self._grad

    def _per_log(self, x: Tensor) -> Tensor:
        """[..., K] summed to what shares a log."""
        return x if self._log.shape[-1] > 1 else x.sum(-1, keepdim=True)

    def from_start(self, x: Tensor) -> Tensor:
        return x * self._from_start

    def to_end(self, x: Tensor) -> Tensor:
        return x * self._to_end

    def from_start_backward(self, decayed: Tensor, grad: Tensor) -> Tensor:
        self.grad.add_(_sums_from(self._per_log(decayed * grad)))
        return grad * self._from_start

    def to_end_backward(self, decayed: Tensor, grad: Tensor) -> Tensor:
        self.grad.add_(_sums_before(self._per_log(decayed * grad)))
        return grad * self._to_end

    def whole_backward(self, state: Tensor, grad: Tensor) -> None:
        assert self.whole is not None
        both = (state * grad).sum(-1).mul_(self.whole.squeeze(-1))  # [n, K]
        self.grad.add_(self._per_log(both).unsqueeze(1))

    def _halves(self, size: int) -> tuple[Tensor, Tensor]:
        """In blocks of 2 * size tokens: decays from the middle to the later tokens, and from the earlier ones to it."""
        first, second = _halves(self._log, size)
        return second.cumsum(2).exp_(), _sums_after(first, 2).exp_()

    def _halves_backward(self, size: int, since: Tensor, until: Tensor) -> None:
        """Add the gradients of the sums of logs behind `_halves`."""
        first, second = _halves(self.grad, size)
        second.add_(_sums_from(since, 2))
        first.add_(_sums_before(until, 2))


class ScalarDecay(LoggedDecay):
    """One number for each token: the pairs are one product, times a matrix of decays."""

    def __init__(self, g: Tensor) -> None:
        super().__init__(g)
        chunk = g.shape[1]
        self._matrix = g.new_zeros(len(g), chunk, chunk)
        self._matrix.diagonal(dim1=1, dim2=2).fill_(1.0)
        for size in level_sizes(chunk):
            since, until = self._halves(size)
            level_blocks(self._matrix, size).copy_(since * until.mT)

    def pairs_backward(self, x: Tensor, k: Tensor, pairs: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        weight = pairs * grad
        for size in level_sizes(pairs.shape[1]):
            block = level_blocks(weight, size)
            self._halves_backward(size, block.sum(3, keepdim=True), block.sum(2).unsqueeze(3))
        return super().pairs_backward(x, k, pairs, grad)


class VectorDecay(LoggedDecay):
    """One number for each token and key: the pairs over the middle of a block are a product of decayed x and k."""

    def pairs(self, x: Tensor, k: Tensor) -> Tensor:
        pairs = x.new_zeros(*x.shape[:2], x.shape[1])
        pairs.diagonal(dim1=1, dim2=2).copy_((x * k).sum(-1))
        for size in level_sizes(x.shape[1]):
            since, until = self._halves(size)
            level_blocks(pairs, size).copy_(since.mul_(_halves(x, size)[1]) @ until.mul_(_halves(k, size)[0]).mT)
        return pairs

    def pairs_backward(self, x: Tensor, k: Tensor, pairs: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        diagonal = grad.diagonal(dim1=1, dim2=2).unsqueeze(-1)
        dx, dk = diagonal * k, diagonal * x
        for size in level_sizes(x.shape[1]):
            since, until = self._halves(size)
            later, earlier = since * _halves(x, size)[1], until * _halves(k, size)[0]
            block = level_blocks(grad, size)
            grad_later, grad_earlier = block @ earlier, block.mT @ later
            _halves(dx, size)[1].addcmul_(grad_later, since)
            _halves(dk, size)[0].addcmul_(grad_earlier, until)
            self._halves_backward(size, later.mul_(grad_later), earlier.mul_(grad_earlier))
        return dx, dk


def _halves(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """First and second halves of blocks of 2 * size tokens of [n, C, D]: two views [n, blocks, size, D]."""
    blocks = x.unflatten(1, (-1, 2, size))
    return blocks[:, :, 0], blocks[:, :, 1]


def _sums_from(x: Tensor, dim: int = 1) -> Tensor:
    """Sums over the entries from each on."""
    return x.flip(dim).cumsum(dim).flip(dim)


def _sums_after(x: Tensor, dim: int = 1) -> Tensor:
    """Sums over the entries after each; zero for the last."""
    sums = torch.zeros_like(x)
    count = x.shape[dim] - 1
    sums.narrow(dim, 0, count).copy_(_sums_from(x.narrow(dim, 1, count), dim))
    return sums


def _sums_before(x: Tensor, dim: int = 1) -> Tensor:
    """Sums over the entries before each; zero for the first."""
    sums = torch.zeros_like(x)
    count = x.shape[dim] - 1
    sums.narrow(dim, 1, count).copy_(x.narrow(dim, 0, count).cumsum(dim))
    return sums
