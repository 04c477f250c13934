"""Which samples a rank reads, and how their batches are cut: for DataLoader and transformers' Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from weft.integrations.transformers.batch import shard_batch


@dataclass(frozen=True)
class ShardingCollator:
    """``inner`` makes a whole batch of samples, and this rank's part of it is passed on. Works in loader processes."""

    inner: Callable[[Any], Any]
    layout: str
    rank: int
    size: int

    def __call__(self, samples: Any) -> dict[str, Any]:
        return shard_batch(self.inner(samples), self.layout, self.rank, self.size)


class DataRankSampler(Sampler[int]):
    """Every ``data_size``-th sample, so that the ranks of one context group read the same and groups read others.

    Every data rank gets as many; what is left over is dropped, or with ``drop_last=False`` filled up with the first.
    """

    def __init__(
        self, count: int, data_rank: int, data_size: int, *, shuffle: bool, seed: int, drop_last: bool
    ) -> None:
        if count < (data_size if drop_last else 1):
            raise ValueError(
                f"ContextParallel.sampler: {count} samples are too few for {data_size} data ranks (data rank "
                f"{data_rank})"
            )
        self.count, self.data_rank, self.data_size = count, data_rank, data_size
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Another order for each epoch, the same on every rank."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.count // self.data_size if self.drop_last else -(-self.count // self.data_size)

    def __iter__(self) -> Iterator[int]:
        order = torch.arange(self.count)
        if self.shuffle:
            order = torch.randperm(self.count, generator=torch.Generator().manual_seed(self.seed + self.epoch))
        whole = len(self) * self.data_size
        order = order.repeat(-(-whole // self.count))[:whole]
        return iter(order[self.data_rank :: self.data_size].tolist())


class DataRankLoader(DataLoader[Any]):
    """A DataLoader that hands the epoch on to its sampler, as Trainer asks of a loader."""

    def set_epoch(self, epoch: int) -> None:
        if isinstance(self.sampler, DataRankSampler):
            self.sampler.set_epoch(epoch)
