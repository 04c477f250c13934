"""Which rows a batch needs, who owns them, which own rows a rank is asked for; and sums over equal ids.

All this is worked out on the host, wherever the rows lie: sizes of messages and buffers follow from it. Ids of a device
are read once for that, and places go up to it without the host waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from weft.comm.arguments import find_integer_fault, find_tensor_fault
from weft.comm.device import copy_to_device, runs_behind, start_copy_to_host

OWNERSHIPS = ("strided", "contiguous")
_DTYPES = (torch.int32, torch.int64)
_BLOCK = 1 << 19  # elements that `segment_sum` converts at once


@dataclass(frozen=True)
class Ownership:
    """The owners of ``rows`` rows among ``size`` ranks.

    ``strided``: row i belongs to rank i mod P, which spreads frequent ids (hashes, tokens sorted by frequency) evenly.
    ``contiguous``: rank r owns the r-th ceil(N/P) rows, as a DTensor with ``Shard(0)`` has them.

    A row's *place* is its number among its owner's rows; its *slot* is ``owner * stride + place``, so that
    sorting slots sorts by owner, then by place.

    >>> Ownership("strided", 5, 2).count(0), Ownership("contiguous", 5, 4).count(3)
    (3, 0)
    """

    kind: str
    rows: int
    size: int

    @property
    def stride(self) -> int:
        """Slots of an owner: the most rows any rank has."""
        return max(1, -(-self.rows // self.size))

    def count(self, rank: int) -> int:
        """Rows of a rank."""
        if self.kind == "strided":
            return max(0, -(-(self.rows - rank) // self.size))
        return min(self.stride, max(0, self.rows - rank * self.stride))

    def ids(self, rank: int) -> slice:
        """The rows of a rank, by place, as a slice of all rows."""
        if self.kind == "strided":
            return slice(min(rank, self.rows), None, self.size)
        return slice(min(rank * self.stride, self.rows), min((rank + 1) * self.stride, self.rows))

    def slots(self, ids: Tensor) -> Tensor:
        """The slot of each id, int64."""
        ids = ids.long()
        return ids % self.size * self.stride + ids // self.size if self.kind == "strided" else ids

    def ids_at(self, slots: Tensor) -> Tensor:
        """The id of each slot."""
        return slots % self.stride * self.size + slots // self.stride if self.kind == "strided" else slots


@dataclass(frozen=True)
class Compact:
    """The different ones of some numbers ``[T]``, and where each of them stood.

    unique: ``[U]``, rising. inverse: ``[T]``, places in ``unique``. order: ``[T]``, positions by number, then by
    position. starts: ``[U]``, where the positions of each number begin in ``order``.
    """

    unique: Tensor
    inverse: Tensor
    order: Tensor
    starts: Tensor


def compact(numbers: Tensor) -> Compact:
    """By a stable sort and a comparison of neighbours.

    >>> found = compact(torch.tensor([7, 3, 7]))
    >>> found.unique.tolist(), found.inverse.tolist(), found.order.tolist(), found.starts.tolist()
    ([3, 7], [1, 0, 1], [1, 0, 2], [0, 1])
    """
    ordered, order = torch.sort(numbers, stable=True)
    is_first = torch.ones_like(ordered, dtype=torch.bool)
    torch.ne(ordered[1:], ordered[:-1], out=is_first[1:])
    starts = is_first.nonzero().view(-1)
    inverse = torch.empty_like(order)
    inverse[order] = is_first.cumsum(0) - 1
    return Compact(ordered[starts], inverse, order, starts)


def segment_sum(rows: Tensor, found: Compact, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Rows ``[T, d]`` of equal numbers summed, in the order of position: ``[U, d]`` in ``dtype``, in ``out`` if given.

    Sums are made at least in fp32 and rounded once, to ``dtype``; always in the same order, so always the same bits.
    """
    order, starts = (copy_to_device(x, rows.device) for x in (found.order, found.starts))
    if rows.dtype == dtype and out is None:  # a bag's sum over bf16 or fp16 rows is made in fp32 and rounded at its end
        if len(order) == len(starts):  # no duplicates
            return rows.index_select(0, order)
        return embedding_bag(order, rows, starts, mode="sum")
    sums = rows.new_empty(len(starts), rows.shape[1], dtype=dtype) if out is None else out
    step = max(1, _BLOCK // max(1, rows.shape[1]))
    cuts = [*found.starts[::step].tolist(), len(found.order)]
    for block, (start, end) in enumerate(pairwise(cuts)):  # block by block: wide copies of all rows would be large
        part = slice(block * step, (block + 1) * step)
        some = rows.index_select(0, order[start:end])
        if len(some) == len(sums[part]):
            sums[part] = some
        else:
            every = torch.arange(end - start, device=rows.device)
            sums[part] = embedding_bag(every, some.to(dtype), starts[part] - start, mode="sum")
    return sums


class ScratchMemory:
    """Memory for gradients that `take` gives out again once nobody holds it, else a new piece.

    Fresh pages cost as much as the sums put into them.
    """

    def __init__(self) -> None:
        self._flat: Tensor | None = None
        self._holders = 0

    def take(self, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """``[rows, width]``, with anything in it.

        >>> scratch = ScratchMemory()
        >>> first = scratch.take(2, 3, torch.float32, torch.device("cpu"))
        >>> second = scratch.take(2, 3, torch.float32, torch.device("cpu"))      # the first is still held
        >>> first.data_ptr() == second.data_ptr()
        False
        >>> where = second.data_ptr()
        >>> del second
        >>> scratch.take(2, 2, torch.float32, torch.device("cpu")).data_ptr() == where
        True
        """
        size, flat = rows * width, self._flat
        fits = flat is not None and flat.numel() >= size and (flat.dtype, flat.device) == (dtype, device)
        if flat is None or not fits or _holders(flat) != self._holders:
            # A little more than asked for: the next batch may touch a few more rows.
            flat = self._flat = torch.empty(size + size // 8, dtype=dtype, device=device)
            self._holders = _holders(flat)
        return flat[:size].view(rows, width)


def _holders(tensor: Tensor) -> int:
    """How many tensors share this one's memory; torch has no public name for it."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


class IdSet:
    """One set of ids on the host: what this rank needs, and once ids have travelled, what it is asked for.

    needed: rows needed, by slot. bounds: ``needed.unique[bounds[r]:bounds[r+1]]`` are owned by rank r,
    ``counts[r]`` rows. asked: places ``[A]`` of own rows that the ranks need, rank by rank; ``asked_bounds`` likewise.
    """

    def __init__(self, ids: Tensor, ownership: Ownership) -> None:
        self.ownership = ownership
        self.needed: Compact = compact(ownership.slots(ids.reshape(-1)))
        cuts = torch.arange(1, ownership.size, device=ids.device) * ownership.stride
        inner = torch.searchsorted(self.needed.unique, cuts).tolist()
        self.bounds: list[int] = [0, *inner, len(self.needed.unique)]
        self.counts = [end - start for start, end in pairwise(self.bounds)]
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
        """The different rows this rank is asked for, and by whom: in rank order. Once ids have travelled."""
        if self._merged is None:
            self._merged = compact(self.asked)
        return self._merged


def read_ids(operation: str, ids: Sequence[Any], sizes: Sequence[Any], rank: int) -> list[Tensor] | Exception:
    """One rank's sets of ids on the host, all of a device in one read; or what is wrong with them."""
    if len(ids) != len(sizes):
        return ValueError(f"{operation}: {len(ids)} sets of ids, but {len(sizes)} table sizes (rank {rank})")
    for one, rows in zip(ids, sizes, strict=True):
        if fault := find_integer_fault(operation, "num_embeddings", rows, rank, least=1):
            return fault
        if fault := find_tensor_fault(operation, "ids", one, rank, _DTYPES, "a tensor of int32 or int64"):
            return fault
        if one.is_meta:
            return ValueError(f"{operation}: ids are on the meta device and have no values (rank {rank})")
    on_host = _to_host(ids)
    for one, rows in zip(on_host, sizes, strict=True):
        if not one.numel():
            continue
        low, high = (int(bound) for bound in one.aminmax())
        if low < 0 or high >= rows:
            return IndexError(f"{operation}: id {low if low < 0 else high} is not a row of 0..{rows - 1} (rank {rank})")
    return on_host


def _to_host(sets: Sequence[Tensor]) -> list[Tensor]:
    away = [one for one in sets if runs_behind(one.device)]
    if not away:
        return list(sets)
    flat = start_copy_to_host(torch.cat([one.reshape(-1) for one in away])).wait()
    copies = iter(flat.split([one.numel() for one in away]))
    return [next(copies).view(one.shape).to(one.dtype) if runs_behind(one.device) else one for one in sets]
