"""The two autograd Functions of a table: the rows of a batch, and the whole table for a tied head."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from weft.comm import Ledger
from weft.comm.ledger import record
from weft.embedding.exchange import RowExchange
from weft.embedding.gather import all_rows
from weft.embedding.table import RowTable


class Lookup(torch.autograd.Function):
    """``rows[inverse]``; the backward sends a gradient for each row to its owner, on the routes of the pull.

    | tensor  | shape           | crosses ranks                                                              |
    |---------|-----------------|----------------------------------------------------------------------------|
    | rows    | [U, d]          | pulled before: ids out, rows in                                            |
    | grad    | [*ids.shape, d] | its sums over equal ids, [U, d] in the table's dtype, to the owners        |

    The owner's sums are there when the whole backward has ended, as ``weight.grad``: messages travel under the rest.
    With ``table.collects_late`` they are taken when the optimizer asks: messages travel under other work, too.
    """

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, table: RowTable, exchange: RowExchange, rows: Tensor, shape: torch.Size,
        padding_slot: int | None,
    ) -> Tensor:  # fmt: skip
        ctx.how = table, exchange, padding_slot
        return rows.index_select(0, exchange.inverse(0)).view(*shape, rows.shape[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        table, exchange, padding_slot = ctx.how
        with torch.no_grad():
            grads = exchange.sum(0, grad.reshape(-1, grad.shape[-1]), table.weight.dtype)
            if padding_slot is not None:
                grads[exchange[0].needed.unique == padding_slot] = 0
            with record() if table.collects_late else nullcontext(Ledger()) as ledger:
                coming = exchange.push([grads])
            table.pushes.events += ledger.events

            @torch.no_grad()
            def collect() -> None:
                ((places, sums),) = exchange.merge(coming.wait(), table.memory)
                table.add_gradient(places, sums.mul_(table.scale))

        _take_later(table, collect)
        return None, None, None, None, None, None


class WholeTable(torch.autograd.Function):
    """All rows on every rank, ``[N, d]``; the backward sums the ranks' gradients at the owners."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, table: RowTable) -> Tensor:
        ctx.table = table
        return all_rows(table.axis, table.ownership, table.current())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        table: RowTable = ctx.table
        axis, ownership = table.axis, table.ownership
        call = axis.begin("embedding.gather.backward", ownership)
        parts = [grad[ownership.ids(rank)].to(table.weight.dtype) for rank in range(axis.size)]
        with record() if table.collects_late else nullcontext(Ledger()) as ledger:
            coming = call.sum_to_owners([part.contiguous() for part in parts])
        table.pushes.events += ledger.events

        @torch.no_grad()
        def collect() -> None:
            sums = coming.wait().mul_(table.scale)
            places = torch.arange(len(sums), device=sums.device)
            table.add_gradient(places, sums)

        _take_later(table, collect)
        return None, None


def _take_later(table: RowTable, collect: Callable[[], None]) -> None:
    """When the backward under way has ended, in the thread that called it; or when the table's optimizer asks."""
    if table.collects_late:
        table.expect_gradient(collect)
    else:
        Variable._execution_engine.queue_callback(collect)
