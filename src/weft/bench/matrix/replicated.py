"""REKLS under tensor parallelism as it is simply done: gather everything, let every rank do all of the work.

The bits of `REKLS`, with every decomposition made anew in each step, as the equations stand. It uses weft's messages,
so that the ledger counts what it sends. 2-D parameters and decoupled weight decay only.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.comm import Axis
from weft.optim.matrix.exact import EXACT
from weft.optim.matrix.rule import FactorSettings


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
        self.parameters, self.axis, self.number = parameters, axis, 0
        self.settings = FactorSettings(
            lr, betas, eps, weight_decay, "decoupled", False, shampoo_beta, sys.maxsize, root_every=1, dense_steps=0
        )
        lengths = [0 if dim is None else weight.shape[dim] for weight, dim in parameters]
        gathered = axis.begin("replicated.shapes", metadata=lengths).metadata.wait()
        self.shards = [[row[index] for row in gathered] for index in range(len(parameters))]
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
        for (weight, dim), shards in zip(self.parameters, self.shards, strict=True):
            assert weight.grad is not None
            state: dict[str, Any] = {**self.state[weight], "step": self.number}
            grad = weight.grad if dim is None else self._gather(weight.grad, shards, dim)
            for side, size in zip("LR", grad.shape, strict=True) if dim is not None else ():
                state[side] = self._gather(state[side], split_rows(size, self.axis.size), 0)
            EXACT.derive(state, "LR")
            new, update = EXACT.advance_here(state, grad, None, self.settings, "LR")
            for name in self.state[weight]:
                self.state[weight][name] = self._rows(new[name], dim) if name in "LR" else new[name]
            weight.mul_(self.settings.shrink)
            weight.sub_(update if dim is None else update.split(shards, dim)[self.axis.rank])
        self.number += 1

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
