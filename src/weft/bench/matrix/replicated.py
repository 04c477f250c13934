"""REKLS under tensor parallelism as it is simply done: gather everything, let every rank do all of the work.

The slow, obvious reference of `REKLS`: the same bits, with the published equations in their own order. It uses
weft's messages, so that the ledger counts what it sends. 2-D parameters and decoupled weight decay only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.comm import Axis


class ReplicatedREKLS:
    """One rank's part of the replicated optimizer.

    ``parameters``: (this rank's shard, the dimension it is cut along over ``axis``, or None where it is whole).

    | state                   | on each rank               | what crosses ranks in a step                           |
    |-------------------------|----------------------------|--------------------------------------------------------|
    | exp_avg, exp_avg_sq     | whole ``[m, n]``           | the gradient, gathered                                 |
    | L ``[m, m]``, R         | its rows of both           | L and R, gathered one after the other                  |
    | of a parameter with None| all of it                  | nothing                                                |

    >>> weight = torch.zeros(2, 3)
    >>> weight.grad = torch.ones(2, 3)
    >>> ReplicatedREKLS([(weight, 0)], 0.1, Axis.of(None)).step()
    """

    def __init__(
        self,
        parameters: Sequence[tuple[Tensor, int | None]],
        lr: float,
        axis: Axis,
        betas: tuple[float, float] = (0.9, 0.95),
        shampoo_beta: float = 0.95,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        self.parameters, self.lr, self.axis, self.betas, self.shampoo_beta = parameters, lr, axis, betas, shampoo_beta
        self.eps, self.weight_decay, self.number = eps, weight_decay, 0
        lengths = [0 if dim is None else weight.shape[dim] for weight, dim in parameters]
        told = axis.begin("replicated.shapes", metadata=lengths).metadata.wait()
        self.shards = [[row[index] for row in told] for index in range(len(parameters))]
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        for (weight, dim), shards in zip(parameters, self.shards, strict=True):
            shape = [sum(shards) if at == dim else size for at, size in enumerate(weight.shape)]
            factors = {side: weight.new_zeros(size, size) for side, size in zip("LR", shape, strict=True)}
            self.state[weight] = {
                "exp_avg": weight.new_zeros(shape),
                "exp_avg_sq": weight.new_zeros(shape),
                **{side: self._rows(factor, dim) for side, factor in factors.items()},
            }

    @torch.no_grad()
    def step(self) -> None:
        """One step of every parameter, one after the other. Every rank must call it."""
        self.number += 1
        for (weight, dim), shards in zip(self.parameters, self.shards, strict=True):
            assert weight.grad is not None
            state = self.state[weight]
            if dim is None:
                grad, left, right = weight.grad, state["L"], state["R"]
            else:
                grad = self._gather(weight.grad, shards, dim)
                left = self._gather(state["L"], split_rows(grad.shape[0], self.axis.size), 0)
                right = self._gather(state["R"], split_rows(grad.shape[1], self.axis.size), 0)
            update, left, right = self._advance(state, grad, left, right)
            state["L"], state["R"] = self._rows(left, dim), self._rows(right, dim)
            weight.mul_(1 - self.lr * self.weight_decay)
            weight.sub_(update if dim is None else update.split(shards, dim)[self.axis.rank])

    def _advance(
        self, state: dict[str, Tensor], grad: Tensor, left: Tensor, right: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The update and both factors after a step; the moments are changed in place. Four decompositions."""
        (m, n), (b1, b2) = grad.shape, self.betas
        keep = 1 - (1 - self.shampoo_beta) / (1 - self.shampoo_beta**self.number)
        values_l, old_l = decompose(left)
        values_r, old_r = decompose(right)
        in_r, in_l = grad @ old_r, grad.mT @ old_l
        more_l = in_r * (1 / (n * values_r.clamp_min(self.eps))) @ in_r.mT
        more_r = in_l * (1 / (m * values_l.clamp_min(self.eps))) @ in_l.mT
        left = left * keep + more_l * (1 - keep)
        right = right * keep + more_r * (1 - keep)
        _, now_l = decompose(left)
        _, now_r = decompose(right)
        turned = now_l.mT @ grad @ now_r
        moment = now_l.mT @ (old_l @ state["exp_avg"] @ old_r.mT) @ now_r
        state["exp_avg"] = moment * b1 + turned * (1 - b1)
        state["exp_avg_sq"] = state["exp_avg_sq"] * b2 + turned * turned * (1 - b2)
        root = (state["exp_avg_sq"] / (1 - b2**self.number)).sqrt() + self.eps
        direction = state["exp_avg"] / (1 - b1**self.number) / root
        return now_l @ direction @ now_r.mT * self.lr, left, right

    def _gather(self, shard: Tensor, lengths: list[int], dim: int) -> Tensor:
        """The shards of all ranks as one tensor, waited for at once."""
        call = self.axis.begin("replicated.all_gather")
        parts = call.all_gather(shard.movedim(dim, 0).contiguous(), lengths).wait()
        return torch.cat(parts).movedim(0, dim).contiguous()

    def _rows(self, factor: Tensor, dim: int | None) -> Tensor:
        """What this rank keeps of a factor."""
        if dim is None:
            return factor
        return factor.split(split_rows(len(factor), self.axis.size))[self.axis.rank].clone()


def split_rows(rows: int, ranks: int) -> list[int]:
    """How many rows of a factor each rank keeps."""
    return [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]


def decompose(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, descending, and eigenvectors as columns."""
    values, vectors = torch.linalg.eigh(factor)
    return values.flip(0), vectors.flip(1)
