"""The two autograd Functions of a table: the rows of a batch, and the whole table for a tied head."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from weft.comm import Axis, Ledger
from weft.comm.function import RankFunction
from weft.comm.ledger import record
from weft.ops.embedding.exchange import RowExchange
from weft.ops.embedding.gather import all_rows
from weft.ops.embedding.table import RowTable


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
        return rows.index_select(0, exchange.inverse(0)).view(*shape, rows.shape[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        table, exchange, padding_slot = ctx.how
        _refuse_graph("embedding", table.axis)
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


def _refuse_graph(operation: str, axis: Axis) -> None:
    """``weight.grad`` is filled when the backward is over, without a graph, so nobody may count on one."""
    if torch.is_grad_enabled():
        words = (
            f"{operation}: second derivatives of a table's gradient are not supported; leave out create_graph=True, or "
            f"ask torch.autograd.grad for the gradients of other tensors only"
        )
        axis.begin(f"{operation}.backward.backward", fault=NotImplementedError(words))


def _take_later(table: RowTable, collect: Callable[[], None]) -> None:
    """When the backward under way has ended, in the thread that called it; or when the table's optimizer asks."""
    if table.collects_late:
        table.expect_gradient(collect)
    else:
        Variable._execution_engine.queue_callback(collect)
