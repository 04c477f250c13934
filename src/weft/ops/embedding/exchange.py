"""`RowExchange`: the rows of a batch between the ranks that need them and their owners, in four phases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from weft.comm import Axis, Call, Pending
from weft.comm.arguments import find_choice_fault, find_tensor_fault, read, show, the_choice
from weft.comm.call import exchange_coalesced
from weft.comm.device import copy_to_device, start_copy_to_host
from weft.ops.embedding.ids import OWNERSHIPS, IdSet, Ownership, ScratchMemory, read_ids, segment_sum

# From this density on (needed rows of all rows, mean over ranks) whole shards are pulled: nothing is left to pick.
# Gradients always travel by rows: the owner knows their places already, so the rest would only be zeros.
DENSE_PULL = 0.95

Shards = Sequence[Tensor | Sequence[Tensor]]  # for each set of ids one table, or several that share it


@dataclass(frozen=True)
class _Options:
    """What the ranks must have in common."""

    num_embeddings: tuple[int, ...]
    ownership: str


@dataclass(frozen=True)
class _TableOptions:
    tables: tuple[tuple[tuple[int, torch.dtype], ...], ...]  # (width, dtype) of the tables of each set of ids


class RowExchange:
    """One batch's rows, for those who write their own loop. Each phase is started where the caller places it.

    | phase     | started by             | crosses ranks                                             | waited for in  |
    |-----------|------------------------|-----------------------------------------------------------|----------------|
    | counts    | ``RowExchange(ids, n)``| a few integers to each rank, on the CPU side              | `start_ids`    |
    | ids       | `start_ids`            | int32 places of the needed rows, to their owners, CPU side| `pull`, `push` |
    | rows      | `pull(shards)`         | the needed rows, from their owners                        | its ``wait()`` |
    | gradients | `push(grads)`          | a gradient for each needed row, to its owner              | its ``wait()`` |
    | merge     | `merge(received)`      | nothing                                                   |                |

    Own rows are not sent. ``ids`` are integers of any shape (ranks may differ, or have none); with a list of them, and
    of table sizes, all sets travel together. ``num_embeddings`` are the rows of the whole tables. Ids are sorted on the
    host: those of a device are read once, those of the host not at all.

    >>> exchange = RowExchange(torch.tensor([4, 1, 4]), 6)
    >>> shard = torch.arange(6.0).view(6, 1)                                   # a world of one owns all rows
    >>> exchange.start_ids()
    >>> rows, = exchange.pull([shard]).wait()                                  # of the ids 1 and 4
    >>> rows[exchange.inverse(0)].flatten().tolist()
    [4.0, 1.0, 4.0]
    >>> received = exchange.push([exchange.sum(0, torch.ones(3, 1))]).wait()
    >>> places, sums = exchange.merge(received)[0]
    >>> places.tolist(), sums.flatten().tolist()
    ([1, 4], [1.0, 2.0])
    """

    def __init__(
        self,
        ids: Tensor | Sequence[Tensor],
        num_embeddings: int | Sequence[int],
        *,
        ownership: str = "strided",
        group: Any = None,
    ) -> None:
        axis = Axis.of(group)
        made = read("rows", axis.rank, lambda: _read(ids, num_embeddings, ownership, axis.rank))
        if isinstance(made, Exception):
            sets = len(ids) if isinstance(ids, tuple | list) else 1
            axis.refuse("rows", made, metadata=sets, metadata_each=sets)
        given, options = made
        owners = (Ownership(options.ownership, rows, axis.size) for rows in options.num_embeddings)
        self._open("rows", [IdSet(one, owner) for one, owner in zip(given, owners, strict=True)], axis, options)
        self._devices = [one.device for one in ([ids] if isinstance(ids, Tensor) else ids)]

    @classmethod
    def of(cls, operation: str, sets: list[IdSet], axis: Axis, options: object) -> RowExchange:
        """For an operation with a name and options of its own, among them sizes and ownership; its ids are right."""
        exchange = cls.__new__(cls)
        exchange._open(operation, sets, axis, options)
        return exchange

    def _open(self, operation: str, sets: list[IdSet], axis: Axis, options: object) -> None:
        self.axis, self._operation, self._sets = axis, operation, sets
        counts = [list(of_rank) for of_rank in zip(*(one.counts for one in sets), strict=True)]
        totals = [len(one.needed.unique) for one in sets]
        self.call: Call = axis.begin(operation, options, metadata=totals, metadata_each=counts)
        self._devices = [torch.device("cpu")] * len(sets)
        self._coming: Pending[None] | None = None
        self.dense_pull = False

    def __len__(self) -> int:
        """Sets of ids."""
        return len(self._sets)

    def __getitem__(self, index: int) -> IdSet:
        return self._sets[index]

    def inverse(self, index: int) -> Tensor:
        """For each id of a set, in the order it was given, its row among the pulled ones: ``[T]``, where ids are."""
        return copy_to_device(self._sets[index].needed.inverse, self._devices[index])

    def sum(self, index: int, grads: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Gradients ``[T, d]`` of the ids of a set, as one for each needed row: summed in fp32, in the order of ids."""
        return segment_sum(grads, self._sets[index].needed, dtype or grads.dtype)

    def start_ids(self) -> None:
        """Wait for the counts; send the places of the needed rows to their owners."""
        if self._coming is not None:
            return
        counts, width = self.call.metadata.wait(), len(self._sets)
        rank, size = self.axis.rank, self.axis.size
        mean = [sum(row[index] for row in counts) / size for index in range(width)]
        load = sum(mean) / max(1, sum(one.ownership.rows for one in self._sets))
        self.dense_pull = load >= DENSE_PULL  # the same on every rank: all know all counts
        asked, places = [], []
        for index, one in enumerate(self._sets):
            one.asked_bounds = [0, *accumulate(row[width + index] for row in counts)]
            places.append(copy_to_device(one.places.int(), self.call.wire.host))
            asked.append(places[-1].new_empty(one.asked_bounds[-1]))
            asked[-1][one.asked_by(rank)] = places[-1][one.owned_by(rank)]
        pending = exchange_coalesced(
            self.call,
            [(to, [x[one.owned_by(to)] for x, one in zip(places, self._sets, strict=True)]) for to in self.call.others],
            [(at, [x[one.asked_by(at)] for x, one in zip(asked, self._sets, strict=True)]) for at in self.call.others],
        )

        def finish() -> None:
            pending.wait()
            for one, received in zip(self._sets, asked, strict=True):
                one.asked = start_copy_to_host(received).wait().long()

        self._coming = Pending(finish)

    def wait_ids(self) -> None:
        """Return when this rank knows what it is asked for; starts the ids if nobody did."""
        self.start_ids()
        assert self._coming is not None
        self._coming.wait()

    def pull(self, shards: Shards) -> Pending[list[Any]]:
        """Start the rows on their way. ``shards``: this rank's rows ``[n, d]`` of each set's table.

        ``wait()`` gives, for each set, the needed rows ``[U, d]``, in the order of `inverse`; where a set has a list of
        tables, a list.
        """
        call, tables = self._begin("pull", shards, [one.ownership.count(self.axis.rank) for one in self._sets])
        self.wait_ids()
        rank, pairs = self.axis.rank, self._pair(tables)
        rows = [x.new_empty(len(one.needed.unique), x.shape[1]) for one, x in pairs]
        asked = [copy_to_device(one.asked, x.device) for one, x in pairs]
        for (one, x), places, out in zip(pairs, asked, rows, strict=True):
            torch.index_select(x, 0, places[one.asked_by(rank)], out=out[one.owned_by(rank)])
        if self.dense_pull:
            pending = self._pull_whole(call, pairs, rows)
        else:
            pending = exchange_coalesced(
                call,
                [(to, [x.index_select(0, places[one.asked_by(to)])
                       for (one, x), places in zip(pairs, asked, strict=True)]) for to in call.others],
                [(at, [out[one.owned_by(at)] for (one, _), out in zip(pairs, rows, strict=True)])
                 for at in call.others],
            )  # fmt: skip
        return _finish_as_given(pending, shards, tables, rows)

    def push(self, grads: Shards) -> Pending[list[Any]]:
        """Start gradients on their way home. ``grads``: one row for each needed row, ``[U, d]``, as `pull` gives them.

        They travel in their dtype. ``wait()`` gives what the ranks say about this rank's rows, for `merge`.
        """
        call, tables = self._begin("push", grads, [len(one.needed.unique) for one in self._sets])
        self.wait_ids()
        rank, pairs = self.axis.rank, self._pair(tables)
        received = [x.new_empty(len(one.asked), x.shape[1]) for one, x in pairs]
        for (one, x), mine in zip(pairs, received, strict=True):
            mine[one.asked_by(rank)] = x[one.owned_by(rank)]
        pending = exchange_coalesced(
            call,
            [(to, [x[one.owned_by(to)].contiguous() for one, x in pairs]) for to in call.others],
            [(at, [mine[one.asked_by(at)] for (one, _), mine in zip(pairs, received, strict=True)])
             for at in call.others],
        )  # fmt: skip
        return _finish_as_given(pending, grads, tables, received)

    def merge(self, received: Sequence[Any], memory: ScratchMemory | None = None) -> list[Any]:
        """What `push` received, for each own row once: (places ``[M]``, sums ``[M, d]``) for each set.

        Sums are in rank order and at least in fp32; where a set has a list of tables, a list of such pairs.
        ``memory``: where to put them.
        """
        merged: list[Any] = []
        for one, given in zip(self._sets, received, strict=True):
            pairs, rows = [], len(one.merged.unique)
            for grads in _as_list(given):
                wide = torch.promote_types(grads.dtype, torch.float32)
                out = None if memory is None else memory.take(rows, grads.shape[1], wide, grads.device)
                places = copy_to_device(one.merged.unique, grads.device)
                pairs.append((places, segment_sum(grads, one.merged, wide, out)))
            merged.append(pairs[0] if isinstance(given, Tensor) else pairs)
        return merged

    def _pair(self, tables: Sequence[list[Tensor]]) -> list[tuple[IdSet, Tensor]]:
        """Each table with its set of ids."""
        return [(one, x) for one, xs in zip(self._sets, tables, strict=True) for x in xs]

    def _begin(self, direction: str, given: Shards, rows: list[int]) -> tuple[Call, list[list[Tensor]]]:
        """The call of one direction, and for each set of ids its tables, which must have so many ``rows``."""
        operation, rank = f"{self._operation}.{direction}", self.axis.rank
        tables = read(operation, rank, lambda: _read_tables(operation, given, rows, rank))
        if isinstance(tables, Exception):
            self.axis.refuse(operation, tables)
        kinds = tuple(tuple((x.shape[1], x.dtype) for x in xs) for xs in tables)
        return self.axis.begin(operation, _TableOptions(kinds), of=self.call.number), tables

    def _pull_whole(self, call: Call, pairs: list[tuple[IdSet, Tensor]], rows: list[Tensor]) -> Pending[None]:
        """Every owner sends its whole shard; the needed rows are picked here."""
        whole = {
            at: [x.new_empty(one.ownership.count(at), x.shape[1]) for one, x in pairs] for at in call.others
        }  # fmt: skip
        mine = [x.contiguous() for _, x in pairs]
        pending = exchange_coalesced(call, [(to, mine) for to in call.others], list(whole.items()))

        def finish() -> None:
            pending.wait()
            for at, shards in whole.items():
                for (one, _), out, shard in zip(pairs, rows, shards, strict=True):
                    part = one.owned_by(at)
                    torch.index_select(shard, 0, copy_to_device(one.places[part], shard.device), out=out[part])

        return Pending(finish)


def _read(ids: Any, num_embeddings: Any, ownership: Any, rank: int) -> tuple[list[Tensor], _Options] | Exception:
    """(sets of ids, what ranks must have in common), or what is wrong."""
    if isinstance(ids, Tensor):
        sets = [ids]
    elif isinstance(ids, tuple | list) and ids and all(isinstance(one, Tensor) for one in ids):
        sets = list(ids)
    else:
        words = f"ids must be a tensor of int32 or int64, or a list of such, got {show(ids)}"
        return TypeError(f"rows: {words} (rank {rank})")
    sizes = list(num_embeddings) if isinstance(num_embeddings, tuple | list) else [num_embeddings] * len(sets)
    on_host = read_ids("rows", sets, sizes, rank)
    if isinstance(on_host, Exception):
        return on_host
    if fault := find_choice_fault("rows", "ownership", ownership, rank, OWNERSHIPS):
        return fault
    options = _Options(tuple(int(size) for size in sizes), the_choice(ownership, OWNERSHIPS))
    return on_host, options


def _read_tables(operation: str, given: Shards, rows: Sequence[int], rank: int) -> list[list[Tensor]] | Exception:
    """The tables of each set of ids, which must have so many rows; or what is wrong with them."""
    tables = [_as_list(one) for one in given]
    for table in (table for of_set in tables for table in of_set):
        if fault := find_tensor_fault(operation, "a table", table, rank, None, "a dense tensor"):
            return fault
    shapes = [[list(table.shape) for table in of_set] for of_set in tables]
    if len(tables) == len(rows) and all(
        len(shape) == 2 and shape[0] == count for count, of_set in zip(rows, shapes, strict=True) for shape in of_set
    ):
        return tables
    return ValueError(
        f"{operation}: tables of shapes {shapes} for sets of ids with {list(rows)} rows here (rank {rank}); pass "
        f"[rows, width] for each set, or a list of such"
    )


def _as_list(given: Any) -> list[Tensor]:
    """The tables of a set of ids: one, or a list of them."""
    return [given] if isinstance(given, Tensor) else list(given)


def _finish_as_given(
    pending: Pending[None], given: Shards, tables: Sequence[list[Tensor]], values: list[Tensor]
) -> Pending[list[Any]]:
    """``values``, one for each table, when they are there: for each set one, or a list where one was given."""

    def finish() -> list[Any]:
        pending.wait()
        left = iter(values)
        return [next(left) if isinstance(one, Tensor) else [next(left) for _ in xs]
                for one, xs in zip(given, tables, strict=True)]  # fmt: skip

    return Pending(finish)
