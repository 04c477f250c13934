"""Whole tables: all rows on every rank, and between the rows a rank owns and the table as checkpoints hold it.

A checkpoint's rows lie one after the other (ceil(N/P) on each rank), which is what a DTensor with ``Shard(0)`` and
`torch.distributed.checkpoint` know. Strided rows are resharded to such ones here: saving is a call of all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.comm import Axis
from weft.ops.embedding.ids import Ownership
from weft.parallel.dtensor import as_dtensor, has_process_group, rows_here, whole_of


@dataclass(frozen=True)
class _Options:
    """What the ranks must have in common."""

    ownership: Ownership
    rest: tuple[int, ...]
    dtype: torch.dtype


def all_rows(axis: Axis, ownership: Ownership, mine: Tensor) -> Tensor:
    """The whole table, on every rank: ``[N, ...]``."""
    call = axis.begin("embedding.gather", _Options(ownership, tuple(mine.shape[1:]), mine.dtype))
    parts = call.all_gather(mine.contiguous(), [ownership.count(rank) for rank in range(axis.size)]).wait()
    whole = mine.new_empty(ownership.rows, *mine.shape[1:])
    for rank, part in enumerate(parts):
        whole[ownership.ids(rank)] = part
    return whole


def to_checkpoint(axis: Axis, ownership: Ownership, mine: Tensor) -> Tensor:
    """Own rows ``[n, ...]`` as a DTensor of all of them; where there are no process groups, the whole on every rank."""
    if axis.size == 1:
        return mine
    if not has_process_group(axis):
        return all_rows(axis, ownership, mine)
    return as_dtensor(axis, _reshard(axis, ownership, mine, to_blocks=True), ownership.rows)


def from_checkpoint(axis: Axis, ownership: Ownership, value: Tensor) -> Tensor:
    """Own rows out of what a checkpoint holds: a DTensor on any ranks, or all rows in a plain tensor."""
    here = rows_here(axis, value)
    if here is not None:
        return _reshard(axis, ownership, here, to_blocks=False)
    return whole_of(value)[ownership.ids(axis.rank)]


def _reshard(axis: Axis, strided: Ownership, rows: Tensor, to_blocks: bool) -> Tensor:
    """Own rows, strided, to a block of consecutive ones, or back. Contiguous rows are such a block already."""
    if strided.kind == "contiguous":
        return rows
    name, ranks = f"embedding.{'to' if to_blocks else 'from'}_blocks", range(axis.size)
    call = axis.begin(name, _Options(strided, tuple(rows.shape[1:]), rows.dtype))
    owned = [_owned_of_block(strided, axis.rank, block) for block in ranks]
    within = [_within_block(strided, owner, axis.rank) for owner in ranks]
    if not to_blocks:
        outgoing = [rows[part].contiguous() for part in within]
        return torch.cat(call.all_to_all(outgoing, [part.stop - part.start for part in owned]).wait())
    arriving = [_owned_of_block(strided, owner, axis.rank) for owner in ranks]
    parts = call.all_to_all([rows[part] for part in owned], [part.stop - part.start for part in arriving]).wait()
    block = rows.new_empty(_blocks(strided).count(axis.rank), *rows.shape[1:])
    for where, part in zip(within, parts, strict=True):
        block[where] = part
    return block


def _blocks(strided: Ownership) -> Ownership:
    return Ownership("contiguous", strided.rows, strided.size)


def _owned_of_block(strided: Ownership, owner: int, block: int) -> slice:
    """Of the rows of ``owner``, by place, those in ``block``: neighbours."""
    ids = _blocks(strided).ids(block)
    first, last = (-(-(bound - owner) // strided.size) for bound in (ids.start, ids.stop))
    return slice(max(0, first), max(0, last))


def _within_block(strided: Ownership, owner: int, block: int) -> slice:
    """The same rows within the block: every P-th."""
    return slice((owner - _blocks(strided).ids(block).start) % strided.size, None, strided.size)
