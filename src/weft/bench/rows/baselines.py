"""What people do today with large embedding tables, for `weft bench rows`: whole tables on every rank.

All of them use weft's messages, so that the ledger counts what they send, and weft's fused step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import embedding

from weft.comm import Axis
from weft.ops.embedding import RowExchange
from weft.ops.embedding.ids import Ownership, compact, segment_sum
from weft.optim.rows.steps import AdamStep, Shard, step_dense, step_rows

_STEP = AdamStep(1, 1e-3, (0.9, 0.999), 1e-8, 0.0)


class WholeTable:
    """A table ``[N, d]`` on every rank, and Adam for some of its rows: an owner's, or all of them."""

    def __init__(self, axis: Axis, rows: int, width: int, dtype: torch.dtype, sharded: bool) -> None:
        self.axis, self.ownership = axis, Ownership("contiguous", rows, axis.size)
        self.weight = torch.zeros(rows, width, dtype=dtype)
        mine = self.weight[self.ownership.ids(axis.rank)] if sharded else self.weight
        self.shard = Shard(mine, torch.zeros(mine.shape), torch.zeros(mine.shape))
        self._every_row = torch.arange(len(mine))

    def train(self, step: Baseline, ids: Tensor, grads: Tensor) -> None:
        """A forward, and the step of a baseline."""
        embedding(ids, self.weight)
        step(self, ids, grads)

    def step_all(self, grads: Tensor) -> None:
        """Adam on all rows of the shard."""
        step_dense(self.shard, self._every_row, grads, _STEP)

    def dense_gradient(self, ids: Tensor, grads: Tensor) -> Tensor:
        """As the backward of ``nn.Embedding`` makes it: as large as the table."""
        leaf = self.weight.detach().requires_grad_()
        return torch.autograd.grad(embedding(ids, leaf), leaf, grads)[0]

    def owner_sums(self, grad: Tensor) -> Tensor:
        """A reduce-scatter in fp32, in rank order."""
        call = self.axis.begin("dense.reduce_scatter")
        parts = [grad[self.ownership.ids(rank)] for rank in range(self.axis.size)]
        return call.sum_to_owners(parts).wait().mul_(1 / self.axis.size)

    def gather(self, mine: Tensor, whole: Tensor) -> None:
        """An all-gather of the owners' rows, into ``whole``."""
        counts = [self.ownership.count(rank) for rank in range(self.axis.size)]
        self.axis.begin("dense.all_gather").all_to_all([mine] * self.axis.size, counts, into=whole).wait()


def dense_all_reduce(table: WholeTable, ids: Tensor, grads: Tensor) -> None:
    """DistributedDataParallel with a dense gradient; every rank steps the whole table."""
    sums = table.owner_sums(table.dense_gradient(ids, grads))
    whole = torch.empty(table.weight.shape, dtype=table.weight.dtype)
    table.gather(sums.to(whole.dtype), whole)
    table.step_all(whole)


def dense_reduce_scatter(table: WholeTable, ids: Tensor, grads: Tensor) -> None:
    """ZeRO: dense gradients to owners, their Adam, all rows back."""
    table.step_all(table.owner_sums(table.dense_gradient(ids, grads)))
    table.gather(table.shard.weight.clone(), table.weight)


def push_and_dense_gather(table: WholeTable, ids: Tensor, grads: Tensor) -> None:
    """Touched rows to owners, their dense Adam, all rows back: the best a user has now."""
    exchange = RowExchange(ids, len(table.weight), ownership="contiguous", group=table.axis)
    received = exchange.push([exchange.sum(0, grads)]).wait()
    ((places, sums),) = exchange.merge(received)
    dense = torch.zeros(table.shard.exp_avg.shape).index_copy_(0, places, sums.mul_(1 / table.axis.size))
    table.step_all(dense)
    table.gather(table.shard.weight.clone(), table.weight)


def gather_sparse(table: WholeTable, ids: Tensor, grads: Tensor) -> None:
    """What DistributedDataParallel does with ``sparse=True``: everybody's rows to everybody, a lazy step on each."""
    found = compact(ids.reshape(-1))
    sums = segment_sum(grads.reshape(-1, grads.shape[-1]), found, grads.dtype)
    call = table.axis.begin("sparse.all_gather", metadata=(len(sums),))
    counts = [count for (count,) in call.metadata.wait()]
    merged = compact(torch.cat(call.all_gather(found.unique, counts).wait()))
    every_row = torch.cat(call.all_gather(sums, counts).wait())
    total = segment_sum(every_row, merged, torch.float32).mul_(1 / table.axis.size)
    step_rows(table.shard, merged.unique, total, _STEP)


Baseline = Callable[[WholeTable, Tensor, Tensor], None]
# (step, whether the moments are an owner's rows only)
BASELINES: dict[str, tuple[Baseline, bool]] = {
    "dense all-reduce": (dense_all_reduce, False),
    "dense reduce-scatter + gather": (dense_reduce_scatter, True),
    "push + dense Adam + dense gather": (push_and_dense_gather, True),
    "all-gather of sparse gradients": (gather_sparse, False),
}
