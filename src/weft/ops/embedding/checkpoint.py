"""Between the rows a rank owns and the table as checkpoints hold it: all rows in order, under one name.

A checkpoint's rows lie one after the other (ceil(N/P) on each rank), which is what a DTensor with ``Shard(0)`` and
`torch.distributed.checkpoint` know. Strided rows are traded for such ones here: saving is a call of all ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.comm import Axis
from weft.ops.embedding.gather import GatherOptions, all_rows
from weft.ops.embedding.ownership import Ownership
from weft.parallel.dtensor import as_dtensor, has_process_group, rows_here, whole_of


def to_checkpoint(axis: Axis, ownership: Ownership, mine: Tensor) -> Tensor:
    """Own rows ``[n, ...]`` as a DTensor of all of them; where there are no process groups, the whole on every rank."""
    if axis.size == 1:
        return mine
    if not has_process_group(axis):
        return all_rows(axis, ownership, mine)
    return as_dtensor(axis, _Trade(axis, ownership).to_blocks(mine), ownership.rows)


def from_checkpoint(axis: Axis, ownership: Ownership, value: Tensor) -> Tensor:
    """Own rows out of what a checkpoint holds: a DTensor on any ranks, or all rows in a plain tensor."""
    here = rows_here(axis, value)
    if here is not None:
        return _Trade(axis, ownership).from_blocks(here)
    return whole_of(value)[ownership.ids(axis.rank)]


class _Trade:
    """Strided rows for blocks of consecutive ones, and back. Contiguous rows are such blocks already."""

    def __init__(self, axis: Axis, ownership: Ownership) -> None:
        self._axis, self._strided = axis, ownership
        self._blocks = Ownership("contiguous", ownership.rows, ownership.size)

    def _meeting(self, owner: int, block: int) -> slice:
        """Of the rows of ``owner``, by place, those in ``block``: neighbours."""
        size, ids = self._strided.size, self._blocks.ids(block)
        first, last = (-(-(bound - owner) // size) for bound in (ids.start, ids.stop))
        return slice(max(0, first), max(0, last))

    def _within(self, owner: int, block: int) -> slice:
        """The same rows within the block: every P-th."""
        return slice((owner - self._blocks.ids(block).start) % self._strided.size, None, self._strided.size)

    def to_blocks(self, mine: Tensor) -> Tensor:
        if self._strided.kind == "contiguous":
            return mine
        axis, rank = self._axis, self._axis.rank
        call = axis.begin("embedding.to_blocks", GatherOptions(self._strided, tuple(mine.shape[1:]), mine.dtype))
        outgoing = [mine[self._meeting(rank, block)] for block in range(axis.size)]
        counts = [_length(self._meeting(owner, rank)) for owner in range(axis.size)]
        block = mine.new_empty(self._blocks.count(rank), *mine.shape[1:])
        for owner, part in enumerate(call.all_to_all(outgoing, counts).wait()):
            block[self._within(owner, rank)] = part
        return block

    def from_blocks(self, block: Tensor) -> Tensor:
        if self._strided.kind == "contiguous":
            return block
        axis, rank = self._axis, self._axis.rank
        call = axis.begin("embedding.from_blocks", GatherOptions(self._strided, tuple(block.shape[1:]), block.dtype))
        outgoing = [block[self._within(owner, rank)].contiguous() for owner in range(axis.size)]
        counts = [_length(self._meeting(rank, other)) for other in range(axis.size)]
        return torch.cat(call.all_to_all(outgoing, counts).wait())


def _length(part: slice) -> int:
    return part.stop - part.start
