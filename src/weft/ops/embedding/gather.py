"""All rows of a table on every rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.comm import Axis
from weft.ops.embedding.ownership import Ownership


@dataclass(frozen=True)
class GatherOptions:
    """What the ranks must have in common where whole shards travel."""

    ownership: Ownership
    rest: tuple[int, ...]
    dtype: torch.dtype


def all_rows(axis: Axis, ownership: Ownership, mine: Tensor) -> Tensor:
    """The whole table, on every rank: ``[N, ...]``."""
    call = axis.begin("embedding.gather", GatherOptions(ownership, tuple(mine.shape[1:]), mine.dtype))
    parts = call.all_gather(mine.contiguous(), [ownership.count(rank) for rank in range(axis.size)]).wait()
    whole = mine.new_empty(ownership.rows, *mine.shape[1:])
    for rank, part in enumerate(parts):
        whole[ownership.ids(rank)] = part
    return whole
