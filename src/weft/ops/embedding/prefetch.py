"""The rows of the next batch, fetched while this one computes, and still right after its step.

When `ShardedEmbedding.prefetch` is called the owners know which rows this batch will change: those that were pulled for
it, and those that the optimizer moves by momentum or weight decay alone. The other rows travel now. The rest travels
when the next forward asks for it, after the step; and with it any row that changed against expectation, so the result
never depends on what was expected.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.comm import Call
from weft.comm.call import exchange_coalesced
from weft.ops.embedding.exchange import RowExchange
from weft.ops.embedding.table import RowTable


@dataclass(frozen=True)
class _Options:
    width: int
    dtype: torch.dtype


class Prefetch:
    """One batch's rows under way. Making it starts them; `resolve` ends them."""

    def __init__(self, table: RowTable, ids: Tensor, exchange: RowExchange) -> None:
        self._ids = ids.clone()  # a loader may fill the same memory with the next batch
        self.exchange, self._table = exchange, table
        self._rows = table.values.new_empty(len(exchange[0].needed.unique), table.weight.shape[1])
        self._came = torch.zeros(len(self._rows), dtype=torch.bool, device=self._rows.device)  # of the needed rows
        self._sent = self._came[:0]  # of the rows others asked for
        self._version = self._foreign = 0
        self._lane = exchange.call.start(self._fetch_early, self._rows.device)

    def _fetch_early(self, call: Call) -> None:
        """Ids to the owners, word back which rows come now, and those rows."""
        self.exchange.wait_ids()
        one, table = self.exchange[0], self._table
        if self.exchange.dense_pull:
            return
        with table.lock:
            self._version, self._foreign = table.version, table.foreign_writes
            self._sent = ~table.will_change(one.asked)
            self._sent[one.asked_by(call.rank)] = False
            outgoing = [
                (to, table.shard.index_select(0, one.asked[part][self._sent[part]]))
                for to in call.others
                for part in [one.asked_by(to)]
            ]
        host = call.wire.host
        words = [(at, torch.empty(_bytes_for(one.owned_by(at)), dtype=torch.uint8, device=host)) for at in call.others]
        call.exchange_on_host(
            call.record.tag, [(to, _pack(self._sent[one.asked_by(to)].to(host))) for to in call.others], words
        ).wait()
        came = {at: _unpack(packed, one.owned_by(at)) for at, packed in words}
        boxes = [(at, self._rows.new_empty(int(marks.sum()), self._rows.shape[1])) for at, marks in came.items()]
        call.exchange(outgoing, boxes).wait()
        for at, rows in boxes:
            marks = came[at].to(self._came.device)
            self._came[one.owned_by(at)] = marks
            self._rows[one.owned_by(at)][marks] = rows

    def is_for(self, ids: Tensor) -> bool:
        """Whether these are the ids whose rows were fetched."""
        return (ids.shape, ids.dtype) == (self._ids.shape, self._ids.dtype) and torch.equal(
            ids.to(self._ids.device), self._ids
        )

    def resolve(self, wanted: bool, fault: Exception | None = None) -> tuple[Tensor | None, bool]:
        """(the rows ``[U, d]``, True) if every rank wants them now. (None, False) if nobody does: they are kept.

        If only some do, (None, True): they are dropped everywhere. A ``fault`` of one rank is raised on all of them.
        """
        self._lane.wait()
        one, table, axis = self.exchange[0], self._table, self._table.axis
        again = self._sent
        if not self.exchange.dense_pull and table.foreign_writes == self._foreign:
            again = again & table.changed_since(one.asked, self._version)
        counts = [[0 if self.exchange.dense_pull else int(again[one.asked_by(to)].sum())] for to in range(axis.size)]
        options = _Options(self._rows.shape[1], self._rows.dtype)
        call = axis.begin("embedding.resolve", options, metadata=(int(wanted),), metadata_each=counts, fault=fault)
        told = call.metadata.wait()
        if not all(row[0] for row in told):
            return None, any(row[0] for row in told)
        if self.exchange.dense_pull:
            return self.exchange.pull([table.current(one.merged.unique)]).wait()[0], True
        shard = table.current(one.asked[~self._sent | again])
        self._fetch_late(call, shard, again, [row[1] for row in told])
        return self._rows, True

    def _fetch_late(self, call: Call, shard: Tensor, again: Tensor, counts: list[int]) -> None:
        """What did not come early, in its order; and rows once more, with their positions."""
        one, rows = self.exchange[0], self._rows
        own = one.owned_by(call.rank)
        torch.index_select(shard, 0, one.asked[one.asked_by(call.rank)], out=rows[own])
        sends, receives = [], []
        for to in call.others:
            part = one.asked_by(to)
            asked, late, twice = one.asked[part], ~self._sent[part], again[part]
            parcel = [shard.index_select(0, asked[late])]
            if int(twice.sum()):
                parcel += [shard.index_select(0, asked[twice]), twice.nonzero().view(-1).int()]
            sends.append((to, parcel))
        for at in call.others:
            missing = int((~self._came[one.owned_by(at)]).sum())
            box = [rows.new_empty(missing, rows.shape[1])]
            if counts[at]:
                box += [rows.new_empty(counts[at], rows.shape[1]), one.asked.new_empty(counts[at], dtype=torch.int32)]
            receives.append((at, box))
        exchange_coalesced(call, sends, receives).wait()
        for at, box in receives:
            target = rows[one.owned_by(at)]
            target[~self._came[one.owned_by(at)]] = box[0]
            if len(box) > 1:
                target[box[2].long()] = box[1]


def _bytes_for(part: slice) -> int:
    return -(-(part.stop - part.start) // 8)


def _pack(marks: Tensor) -> Tensor:
    """Eight marks in a byte."""
    padded = marks.new_zeros(-(-len(marks) // 8) * 8, dtype=torch.uint8)
    padded[: len(marks)] = marks
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=marks.device)
    return (padded.view(-1, 8) * weights).sum(1, dtype=torch.uint8)


def _unpack(packed: Tensor, part: slice) -> Tensor:
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed[:, None] & weights).view(-1)[: part.stop - part.start] != 0
