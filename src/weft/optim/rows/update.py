"""One table's step that may yet be dropped: touched rows are copied out and stepped there, and put back if accepted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.ops.embedding.spare import SpareMemory
from weft.optim.owners import is_finite
from weft.optim.rows.state import RowState
from weft.optim.rows.steps import AdamStep, Shard, step_whole


class RowUpdate:
    """The rows that a batch has touched, between their gradient's arrival and the verdict over the step.

    ``memory``: where the copies lie; it is used again by the next step.
    """

    def __init__(self, rows: RowState, group: dict[str, Any], number: int, memory: list[SpareMemory]) -> None:
        self._rows, self._group, self._number, self._memory = rows, group, number, memory
        self._found: tuple[Tensor, Tensor] | None = None
        self._order: Tensor | None = None  # in which they are copied
        self._copies: Shard | None = None
        self._worked = False
        self.finite = True

    def receive(self) -> Tensor:
        """Wait for the gradient: its rows ``[M, d]``."""
        if self._found is None:
            table = self._rows.table
            found = table.gradient()
            if found is None:  # it was expected, and did not come
                none = torch.zeros(0, dtype=torch.int64, device=table.weight.device)
                found = none, table.values[none]
            self._found = found[0], found[1].to(table.wide)
            self.finite = is_finite(self._found[1])
        return self._found[1]

    def copy_rows(self) -> None:
        """Copy the touched rows out and bring the copies up to date: needs their places, not their gradients."""
        self.receive()
        if self._copies is not None or not self.finite:
            return
        assert self._found is not None
        places, rows = self._found[0], self._rows
        rows.prepare(self._group)
        self._order, counts = rows.sort_copies(places)
        places = places[self._order]
        rows.shard.weight = rows.table.shard
        copies: list[Tensor] = []
        for spare, source in zip(self._memory, (rows.shard.weight, *rows.moments), strict=True):
            room = spare.take(len(places), source.shape[1], source.dtype, source.device)
            copies.append(torch.index_select(source, 0, places, out=room))
        self._copies = rows.shard.of_copies(copies[0], copies[1], copies[2])
        if self._group["mode"] != "lazy":
            rows.catch_up_copies(self._copies, places, counts)

    def work(self, scale: float) -> None:
        """Adam on the copies, with gradients times ``scale``."""
        self.copy_rows()
        if self._copies is None:
            return
        assert self._found is not None and self._order is not None
        group, grads = self._group, self._found[1]
        step = AdamStep(
            self._number, float(group["lr"]), tuple(group["betas"]), group["eps"], group["weight_decay"]
        )  # fmt: skip
        step_whole(self._copies, grads if scale == 1 else grads * scale, self._order, step)
        self._worked = True

    def commit(self, accepted: bool) -> bool:
        """Put the rows back, if accepted; whether that was done."""
        if not accepted:
            self._rows.table.collect()
            return False
        assert self._worked and self._copies is not None and self._found is not None and self._order is not None
        rows, places = self._rows, self._found[0][self._order]
        with rows.table.writing():
            rows.shard.weight = rows.table.shard
            for target, copy in (
                (rows.shard.weight, self._copies.weight),
                (rows.moments[0], self._copies.exp_avg),
                (rows.moments[1], self._copies.exp_avg_sq),
            ):
                target.index_copy_(0, places, copy)
        rows.stepped(self._group, self._number, places)
        return True
