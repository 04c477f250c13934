"""One set of ids: which rows a rank needs, and which it is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.comm.arguments import find_integer_fault, find_tensor_fault
from weft.ops.embedding.compact import Compact, compact
from weft.ops.embedding.ownership import Ownership

_DTYPES = (torch.int32, torch.int64)


class IdSet:
    """One set of ids: what this rank needs, and once ids have travelled, what it is asked for.

    needed: rows needed, by slot. bounds: ``needed.unique[bounds[r]:bounds[r+1]]`` are owned by rank r.
    asked: places ``[A]`` of own rows that the ranks need, rank by rank; ``asked_bounds`` likewise.
    """

    def __init__(self, ids: Tensor, ownership: Ownership) -> None:
        self.ownership = ownership
        self.needed: Compact = compact(ownership.slots(ids.reshape(-1)))
        cuts = torch.arange(1, ownership.size, device=ids.device) * ownership.stride
        inner = torch.searchsorted(self.needed.unique, cuts).tolist()
        self.bounds: list[int] = [0, *inner, len(self.needed.unique)]
        self.asked = ids.new_empty(0)
        self.asked_bounds: list[int] = []
        self._merged: Compact | None = None

    def owned_by(self, rank: int) -> slice:
        return slice(self.bounds[rank], self.bounds[rank + 1])

    def asked_by(self, rank: int) -> slice:
        return slice(self.asked_bounds[rank], self.asked_bounds[rank + 1])

    @property
    def places(self) -> Tensor:
        """The places of the needed rows on their owners."""
        return self.needed.unique % self.ownership.stride

    @property
    def merged(self) -> Compact:
        """The different rows this rank is asked for, and by whom: in rank order."""
        if self._merged is None:
            self._merged = compact(self.asked)
        return self._merged


def find_ids_fault(operation: str, ids: Sequence[Any], sizes: Sequence[Any], rank: int) -> Exception | None:
    """What is wrong with one rank's ids."""
    if len(ids) != len(sizes):
        return ValueError(f"{operation}: {len(ids)} sets of ids, but {len(sizes)} table sizes (rank {rank})")
    for one, rows in zip(ids, sizes, strict=True):
        if fault := find_integer_fault(operation, "num_embeddings", rows, rank, least=1):
            return fault
        if fault := find_tensor_fault(operation, "ids", one, rank, _DTYPES, "a tensor of int32 or int64"):
            return fault
        if one.is_meta:
            return ValueError(f"{operation}: ids are on the meta device and have no values (rank {rank})")
        if not one.numel():
            continue
        low, high = (int(bound) for bound in one.aminmax())
        if low < 0 or high >= rows:
            return IndexError(f"{operation}: id {low if low < 0 else high} is not a row of 0..{rows - 1} (rank {rank})")
    return None


def find_tables_fault(
    operation: str, tables: Sequence[Sequence[Any]], rows: Sequence[int], rank: int
) -> Exception | None:
    """What is wrong with tables that must have so many rows."""
    for table in (table for of_set in tables for table in of_set):
        if fault := find_tensor_fault(operation, "a table", table, rank, None, "a dense tensor"):
            return fault
    shapes = [[list(table.shape) for table in of_set] for of_set in tables]
    if len(tables) == len(rows) and all(
        len(shape) == 2 and shape[0] == count for count, of_set in zip(rows, shapes, strict=True) for shape in of_set
    ):
        return None
    return ValueError(
        f"{operation}: tables of shapes {shapes} for sets of ids with {list(rows)} rows here (rank {rank}); pass "
        f"[rows, width] for each set, or a list of such"
    )
