"""The rows of a batch: fetched before it is needed, looked up, and their gradients sent to the owners.

`Prefetch` fetches the rows of the next batch while this one computes, and they are still right after its step. When
`ShardedEmbedding.prefetch` is called the owners know which rows this batch will change: those that were pulled for it,
and those that the optimizer moves by momentum or weight decay alone. The other rows travel now. The rest travels when
the next forward asks for it, after the step; and with it any row that changed against expectation, so the result never
depends on what was expected.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import Variable

from weft.comm import Axis, Call, Ledger, Pending
from weft.comm.call import exchange_coalesced
from weft.comm.device import copy_to_device, note_work, start_copy_to_host
from weft.comm.function import RankFunction
from weft.comm.ledger import record
from weft.ops.embedding.exchange import RowExchange
from weft.ops.embedding.table import RowTable
from weft.ops.embedding.whole import all_rows

T = TypeVar("T")


class Lookup(RankFunction):
    """``rows[inverse]``; the backward sends a gradient for each row to its owner, on the routes of the pull.

    | tensor  | shape           | crosses ranks                                                              |
    |---------|-----------------|----------------------------------------------------------------------------|
    | rows    | [U, d]          | pulled before: ids out, rows in                                            |
    | grad    | [*ids.shape, d] | its sums over equal ids, [U, d] in the table's dtype, to the owners        |

    The owner's sums are there when the whole backward has ended, as ``weight.grad``: messages travel under the rest.
    With ``table.collects_late`` they are taken when the optimizer asks: messages travel under other work, too.
    """

    operation = "embedding"
    any_order = True  # nothing is returned that could be differentiated: see `_refuse_graph`

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, table: RowTable, exchange: RowExchange, rows: Tensor, shape: torch.Size,
        padding_slot: int | None,
    ) -> Tensor:  # fmt: skip
        ctx.how = table, exchange, padding_slot
        inverse = copy_to_device(exchange.inverse(0), rows.device)
        return rows.index_select(0, inverse).view(*shape, rows.shape[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        table, exchange, padding_slot = ctx.how
        _refuse_graph("embedding", table.axis)
        with torch.no_grad():
            grads = exchange.sum(0, grad.reshape(-1, grad.shape[-1]), table.weight.dtype)
            if padding_slot is not None:
                for place in (exchange[0].needed.unique == padding_slot).nonzero().view(-1).tolist():
                    grads[place] = 0

            def merge(received: list[Any]) -> tuple[Tensor, Tensor]:
                return exchange[0].merged.unique, exchange.merge(received, table.memory)[0][1]

            _send_gradient(table, lambda: exchange.push([grads]), merge)
        return None, None, None, None, None, None


class WholeTable(RankFunction):
    """All rows on every rank, ``[N, d]``; the backward sums the ranks' gradients at the owners."""

    operation = "embedding.gather"
    any_order = True

    @staticmethod
    def forward(ctx: Any, weight: Tensor, table: RowTable) -> Tensor:
        whole = all_rows(table.axis, table.ownership, table.current())
        ctx.how = table, table.axis.counter.calls  # the number of the call just made
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        table, number = ctx.how
        axis, ownership = table.axis, table.ownership
        _refuse_graph("embedding.gather", axis)
        call = axis.begin("embedding.gather.backward", ownership, of=number)
        parts = [grad[ownership.ids(rank)].to(table.weight.dtype) for rank in range(axis.size)]
        _send_gradient(
            table,
            lambda: call.sum_to_owners([part.contiguous() for part in parts]),
            lambda sums: (torch.arange(len(sums), device="cpu"), sums),
        )
        return None, None


def _refuse_graph(operation: str, axis: Axis) -> None:
    """``weight.grad`` is filled when the backward is over, without a graph, so nobody may count on one."""
    if torch.is_grad_enabled():
        words = (
            f"{operation}: second derivatives of a table's gradient are not supported; leave out create_graph=True, or "
            f"ask torch.autograd.grad for the gradients of other tensors only"
        )
        axis.begin(f"{operation}.backward.backward", fault=NotImplementedError(words))


def _send_gradient(
    table: RowTable, start: Callable[[], Pending[T]], merge: Callable[[T], tuple[Tensor, Tensor]]
) -> None:
    """Start a gradient to the owners; ``merge`` makes (places, sums) of own rows of what has been received.

    Places are on the host.

    It is added to ``weight.grad`` when the backward under way has ended, in the thread that called it; or when the
    table's optimizer asks.
    """
    with record() if table.collects_late else nullcontext(Ledger()) as ledger:
        coming = start()
    table.pushes.events += ledger.events

    @torch.no_grad()
    def collect() -> None:
        places, sums = merge(coming.wait())
        table.add_gradient(places, sums.mul_(table.scale))

    if table.collects_late:
        table.expect_gradient(collect)
    else:
        Variable._execution_engine.queue_callback(collect)


@dataclass(frozen=True)
class _Options:
    width: int
    dtype: torch.dtype


class Prefetch:
    """One batch's rows under way. Making it starts them; `resolve` ends them.

    Which rows travel when is known to the host alone, so that it waits for messages of other hosts and for no device.
    """

    def __init__(self, table: RowTable, ids: Tensor, exchange: RowExchange) -> None:
        self._ids = ids.clone()  # a loader may fill the same memory with the next batch
        self.exchange, self._table = exchange, table
        self._rows = table.values.new_empty(len(exchange[0].needed.unique), table.weight.shape[1])
        self._came = torch.zeros(len(self._rows), dtype=torch.bool, device="cpu")  # of the needed rows
        self._sent = self._came[:0]  # of the rows others asked for
        self._version = self._foreign = 0
        self._lane = exchange.call.start(self._fetch_ahead, self._rows.device, [self._rows, table.values])

    def _fetch_ahead(self, call: Call) -> None:
        """Ids to the owners, a bit back for each whether its row comes now, and those rows."""
        self.exchange.wait_ids()
        one, table = self.exchange[0], self._table
        if self.exchange.dense_pull:
            return
        with table.lock:
            self._version, self._foreign = table.version, table.foreign_writes
            self._sent = ~table.will_change(one.asked)
            self._sent[one.asked_by(call.rank)] = False
            outgoing = [
                (to, _pick(table.shard, one.asked[part][self._sent[part]]))
                for to in call.others
                for part in [one.asked_by(to)]
            ]
            table.read_beside(note_work(self._rows.device))
        host = call.wire.host
        bits = [(at, torch.empty(-(-one.counts[at] // 8), dtype=torch.uint8, device=host)) for at in call.others]
        marks = [(to, copy_to_device(_pack(self._sent[one.asked_by(to)]), host)) for to in call.others]
        call.exchange_on_host(call.record.tag, marks, bits).wait()
        for at, packed in bits:
            self._came[one.owned_by(at)] = _unpack(start_copy_to_host(packed).wait(), one.counts[at])
        places = {at: _positions(self._came, one.owned_by(at)) for at in call.others}
        received = [(at, self._rows.new_empty(len(some), self._rows.shape[1])) for at, some in places.items()]
        call.exchange(outgoing, received).wait()
        for at, rows in received:
            _put(self._rows, places[at], rows)

    def _is_for(self, ids: Tensor) -> bool:
        """Whether these are the ids whose rows were fetched."""
        return (ids.shape, ids.dtype) == (self._ids.shape, self._ids.dtype) and torch.equal(ids, self._ids)

    def resolve(self, ids: Tensor | Exception | None) -> tuple[Tensor | None, bool]:
        """(the rows ``[U, d]``, True) if every rank's ``ids`` are these. (None, False) if nobody's are: they are kept.

        If only some do, (None, True): they are dropped everywhere. A fault of one rank is raised on all of them.
        """
        fault, wanted = (ids, False) if isinstance(ids, Exception) else (None, ids is not None and self._is_for(ids))
        self._lane.wait()
        one, table, axis = self.exchange[0], self._table, self._table.axis
        again = self._sent
        if not self.exchange.dense_pull and table.foreign_writes == self._foreign:
            again = again & table.changed_since(one.asked, self._version)
        counts = [[0 if self.exchange.dense_pull else int(again[one.asked_by(to)].sum())] for to in range(axis.size)]
        options = _Options(self._rows.shape[1], self._rows.dtype)
        call = axis.begin("embedding.resolve", options, metadata=(int(wanted),), metadata_each=counts, fault=fault)
        gathered = call.metadata.wait()
        if not all(row[0] for row in gathered):
            return None, any(row[0] for row in gathered)
        if self.exchange.dense_pull:
            return self.exchange.pull([table.current(one.merged.unique)]).wait()[0], True
        shard = table.current(one.asked[~self._sent | again])
        self._fetch_rest(call, shard, again, [row[1] for row in gathered])
        return self._rows, True

    def _fetch_rest(self, call: Call, shard: Tensor, again: Tensor, counts: list[int]) -> None:
        """What did not come ahead, in its order; and ``again`` rows that did, with their positions."""
        one, rows = self.exchange[0], self._rows
        own = copy_to_device(one.asked[one.asked_by(call.rank)], shard.device)
        torch.index_select(shard, 0, own, out=rows[one.owned_by(call.rank)])
        sends, receives = [], []
        missing = {at: _positions(~self._came, one.owned_by(at)) for at in call.others}
        for to in call.others:
            part = one.asked_by(to)
            asked, late, twice = one.asked[part], ~self._sent[part], again[part]
            outgoing = [_pick(shard, asked[late])]
            if int(twice.sum()):
                where = copy_to_device(twice.nonzero().view(-1).int(), rows.device)
                outgoing += [_pick(shard, asked[twice]), where]
            sends.append((to, outgoing))
        for at in call.others:
            incoming = [rows.new_empty(len(missing[at]), rows.shape[1])]
            if counts[at]:
                incoming.append(rows.new_empty(counts[at], rows.shape[1]))
                incoming.append(rows.new_empty(counts[at], dtype=torch.int32))
            receives.append((at, incoming))
        exchange_coalesced(call, sends, receives).wait()
        for at, incoming in receives:
            _put(rows, missing[at], incoming[0])
            if len(incoming) > 1:
                _put(rows[one.owned_by(at)], incoming[2].long(), incoming[1])


def _pick(rows: Tensor, places: Tensor) -> Tensor:
    return rows.index_select(0, copy_to_device(places, rows.device))


def _put(target: Tensor, places: Tensor, rows: Tensor) -> None:
    target.index_copy_(0, copy_to_device(places, target.device), rows)


def _positions(marks: Tensor, part: slice) -> Tensor:
    """Where the marks of a part are true, among all."""
    return part.start + marks[part].nonzero().view(-1)


def _pack(marks: Tensor) -> Tensor:
    """Eight marks in a byte."""
    padded = marks.new_zeros(-(-len(marks) // 8) * 8, dtype=torch.uint8)
    padded[: len(marks)] = marks
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=marks.device)
    return (padded.view(-1, 8) * weights).sum(1, dtype=torch.uint8)


def _unpack(packed: Tensor, count: int) -> Tensor:
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed[:, None] & weights).view(-1)[:count] != 0
