"""`RowState`: what `RowAdam` keeps of one table. `RowUpdate`: one step of it, in place, or in copies until accepted."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from weft.comm.call import is_recording
from weft.comm.device import copy_to_device, start_copy_to_host
from weft.comm.function import outside_modes
from weft.comm.ledger import Event, note
from weft.ops.embedding import RowTable
from weft.ops.embedding.ids import ScratchMemory
from weft.ops.embedding.whole import from_checkpoint, to_checkpoint
from weft.optim.rows.skipped_steps import StepHistory
from weft.optim.rows.steps import AdamStep, RowCosts, Shard, catch_up_rows, step_dense, step_rows
from weft.optim.step.state import first_count

MOMENTS = ("exp_avg", "exp_avg_sq")
Costs = dict[tuple[int, torch.dtype], RowCosts]  # by width and dtype of tables, once they are measured
LONGEST = 256  # steps a row may lag where momentum never fades (b1 >= sqrt(b2))


class RowState:
    """The optimizer's part of one table: moments, and up to which step each own row is up to date.

    ``state`` is what the optimizer has of the weight, ``shard`` what it steps in place. It is `RowTable.deferred`.
    Which rows are behind, and how far, is known to the host: a step does not wait for a device.
    """

    def __init__(self, optimizer: Optimizer, table: RowTable, costs: Costs) -> None:
        self._optimizer, self.table, self._costs = optimizer, table, costs
        count, device = table.ownership.count(table.axis.rank), table.weight.device
        first, second = (torch.zeros(count, table.weight.shape[1], dtype=table.wide, device=device) for _ in range(2))
        self.moments = first, second
        self.state = {"step": first_count(), "exp_avg": first, "exp_avg_sq": second}
        optimizer.state[table.weight] = self.state
        self.last = torch.empty(count, dtype=torch.int32, device="cpu")
        self.shard = Shard(table.shard, first, second)
        self.copies_memory = [ScratchMemory() for _ in range(3)]  # of a step that may yet be dropped
        self.begin(0)
        table.current()  # another optimizer may have stepped it until now
        table.deferred = self

    @property
    def group(self) -> dict[str, Any]:
        """The options that the table has now."""
        groups, weight = self._optimizer.param_groups, self.table.weight
        return next(group for group in groups if any(weight is one for one in group["params"]))

    def begin(self, step: int) -> None:
        """All rows are up to date at ``step``: from here on everything follows from weights and moments alone."""
        with outside_modes(self.table.weight):
            self.last.fill_(step)
            still = (self.moments[0] == 0).all(1)  # such a row does not move by itself
            self.at_rest = start_copy_to_host(still).wait()
            group = self.group
            self.history = StepHistory(step, tuple(group["betas"]), group["eps"], self.table.wide)

    def flush(self) -> None:
        """Bring all rows up to date and forget how: what is saved now is all there is, for whoever loads it."""
        self.catch_up(None, for_step=True)
        self.begin(self.history.now)

    def save(self) -> dict[str, Tensor]:
        """Steps made, and moments of the whole table as a checkpoint holds them; all ranks must ask."""
        self.flush()
        axis, ownership = self.table.axis, self.table.ownership
        moments = {name: to_checkpoint(axis, ownership, self.state[name]) for name in MOMENTS}
        return {"step": self.state["step"].clone(), **moments}

    def load(self, saved: Mapping[str, Tensor] | None) -> None:
        """Go on from what `save` gave; None: from the beginning."""
        if saved is None:
            self.go_on_from(0.0, None, None)
        else:
            axis, ownership = self.table.axis, self.table.ownership
            self.go_on_from(saved["step"], *(from_checkpoint(axis, ownership, saved[name]) for name in MOMENTS))

    def go_on_from(self, step: Tensor | float, *moments: Tensor | None) -> None:
        """Moments of own rows (None: zeros), with all rows up to date at ``step``."""
        self.state["step"].fill_(float(step))
        for mine, value in zip(self.moments, moments, strict=True):
            mine.zero_() if value is None else mine.copy_(value)
        self.begin(int(self.state["step"]))

    def find_fault(self) -> Exception | None:
        """Whether another optimizer has taken the table, or it is of another kind than when its state was made."""
        table, moment = self.table, self.moments[0]
        if table.deferred is not self:
            return ValueError(
                f"RowAdam: a table of shape {list(table.weight.shape)} has been taken over by another RowAdam, which "
                f"keeps its rows since (rank {table.axis.rank}); step a table with one optimizer, the newest"
            )
        if (moment.dtype, moment.device) != (table.wide, table.weight.device):
            return TypeError(
                f"RowAdam: a table is {table.weight.dtype} on {table.weight.device} now, but its moments were made "
                f"{moment.dtype} on {moment.device} (rank {table.axis.rank}); make the optimizer after .to()"
            )
        return None

    def prepare(self, group: dict[str, Any]) -> None:
        """Before a step with the options of ``group``: if the last ones differ, bring all rows up to date."""
        history, lazy = self.history, group["mode"] == "lazy"
        settings, steps = (tuple(group["betas"]), group["eps"]), history.now - history.base
        other = settings != (history.betas, history.eps) or (history.horizon is None and steps >= LONGEST)
        if lazy and steps:  # it was another mode before
            self.catch_up(None, for_step=True)
        elif not lazy and other:
            self.catch_up(None, for_step=True)  # by what they were made with
            self.history = StepHistory(history.now, *settings, self.table.wide)

    def sort(self, places: Tensor) -> tuple[Tensor, list[int]]:
        """An order of own rows: up to date, at rest, moving; within each as they are. How many each has."""
        kind = (self.last[places] < self.history.now) * (2 - self.at_rest[places].int())
        return torch.argsort(kind, stable=True), torch.bincount(kind, minlength=3).tolist()

    def catch_up(self, places: Tensor | None, for_step: bool = False) -> None:
        """Bring rows (None: all) to the last step. ``for_step``: their moments too, if nothing else would change."""
        with outside_modes(self.table.weight):
            if places is None:
                places = torch.arange(len(self.last), device=self.last.device)
            stale, at_rest = self.last[places] < self.history.now, self.at_rest[places]
            if not for_step and not self.history.decays:
                stale &= ~at_rest
            places, at_rest = places[stale], at_rest[stale]
            if not len(places):
                return
            resting = places[at_rest]
            places = torch.cat([resting, places[~at_rest]]) if len(resting) else places
            self.shard.weight = self.table.shard
            with self.table.writing():
                faded = self.bring(self.shard, places, [0, len(resting), len(places) - len(resting)])
                self.last[places] = self.history.now
                self.at_rest[faded] = True

    def bring(self, shard: Shard, places: Tensor, counts: list[int], copies: bool = False) -> Tensor:
        """Bring rows in the order of `sort`, with its ``counts``, to now; those whose momentum has faded, and is zero.

        ``copies``: ``shard`` has copies of these rows, in this order, and they are changed there.
        """
        history, current, moving = self.history, counts[0], counts[0] + counts[1]
        last = self.last[places[current:]]
        if not len(last):
            return places[:0]
        known, which = torch.unique(last, return_inverse=True)
        skipped = history.skipped(known)
        for part, how in ((slice(current, moving), skipped.at_rest()), (slice(moving, len(places)), skipped)):
            if part.start < part.stop:  # rows at rest need no sum over steps
                rows = part if copies else places[part]
                catch_up_rows(shard, rows, which[part.start - current : part.stop - current], how, history.eps)
        if history.horizon is None:
            return places[:0]
        faded = moving + (history.now - last[moving - current :] > history.horizon).nonzero().view(-1)
        shard.exp_avg.index_fill_(0, copy_to_device(faded if copies else places[faded], shard.exp_avg.device), 0)
        return places[faded]

    def moves_without_gradient(self, places: Tensor) -> Tensor:
        """Of own rows: whether the next step changes them even if they get no gradient."""
        group = self.group
        if group["mode"] == "lazy":
            return torch.zeros_like(places, dtype=torch.bool)
        if self.history.decays or group["weight_decay"]:
            return torch.ones_like(places, dtype=torch.bool)
        return ~self.at_rest[places]

    def prefers_dense(self, mode: str, touched: int) -> bool:
        """Whether "auto" steps the whole shard where it lies: the same bits."""
        if mode != "auto" or 2 * touched <= len(self.last):
            return False
        key = (self.shard.width, self.table.weight.dtype)
        if key not in self._costs:
            self._costs[key] = RowCosts.measure(self.shard)
        return self._costs[key].prefer_dense(touched, len(self.last))

    def stepped(self, group: dict[str, Any], number: int, places: Tensor) -> None:
        """Note that step ``number`` has been made, with gradients for ``places``."""
        self.state["step"].fill_(number)
        if group["mode"] == "lazy":
            self.history.base = self.history.now = number
            self.last.fill_(number)
        else:
            self.history.append(float(group["lr"]), group["weight_decay"])
            self.last[places] = number
        self.at_rest[places] = False
        self.table.stepped(places)


class RowUpdate:
    """One table's step: at once, by `step_in_place`, or by `copy_rows`, `work` and `commit`, so that it may be dropped.

    Copies are of the rows that a batch has touched, from their gradient's arrival to the verdict over the step.
    """

    def __init__(self, rows: RowState) -> None:
        self._rows, self._group, self._number = rows, rows.group, int(rows.state["step"]) + 1
        self._gradient: tuple[Tensor, Tensor] | None = None
        self.is_checked = False  # whether its gradient is finite
        self._order: Tensor | None = None  # in which they are copied
        self._copies: Shard | None = None
        self._worked = False

    # Not cached_property: before Python 3.12 that locks all ranks of a process out while one of them waits.

    @property
    def gradient(self) -> tuple[Tensor, Tensor]:
        """(places ``[M]``, rows ``[M, d]``), waited for."""
        if self._gradient is None:
            table = self._rows.table
            found = table.gradient()
            if found is None:  # it was expected, and did not come
                found = torch.zeros(0, dtype=torch.int64, device="cpu"), table.values[:0]
            self._gradient = found[0], found[1].to(table.wide)
        return self._gradient

    @property
    def _numbers(self) -> AdamStep:
        group = self._group
        return AdamStep(self._number, float(group["lr"]), tuple(group["betas"]), group["eps"], group["weight_decay"])

    def step_in_place(self) -> None:
        """Adam on the touched rows, where they lie."""
        (places, grads), rows, group = self.gradient, self._rows, self._group
        rows.prepare(group)
        if group["mode"] != "lazy":
            rows.catch_up(places, for_step=True)
        step = self._numbers
        with rows.table.writing():
            rows.shard.weight = rows.table.shard
            dense = rows.prefers_dense(group["mode"], len(places))
            start = time.perf_counter()
            (step_dense if dense else step_rows)(rows.shard, places, grads, step)
            if is_recording():
                rank, now = rows.table.axis.wire.rank, time.perf_counter()
                name = f"RowAdam: {'dense' if dense else 'rows'}"
                note(Event(name, rank, start=start, end=now, lane="RowAdam"))
        rows.stepped(group, self._number, places)

    def copy_rows(self) -> None:
        """Copy the touched rows out and bring the copies up to date: needs their places, not their gradients."""
        if self._copies is not None:
            return
        places, rows = self.gradient[0], self._rows
        rows.prepare(self._group)
        self._order, counts = rows.sort(places)
        places = places[self._order]
        rows.shard.weight = rows.table.shard
        there = copy_to_device(places, rows.shard.weight.device)
        weight, exp_avg, exp_avg_sq = (
            torch.index_select(x, 0, there, out=memory.take(len(places), x.shape[1], x.dtype, x.device))
            for memory, x in zip(rows.copies_memory, rows.shard.tensors, strict=True)
        )
        self._copies = rows.shard.of_copies(weight, exp_avg, exp_avg_sq)
        if self._group["mode"] != "lazy":
            rows.bring(self._copies, places, counts, copies=True)

    def work(self, scale: float | Tensor) -> None:
        """Adam on the copies, with gradients times ``scale``."""
        self.copy_rows()
        assert self._copies is not None
        grads = self.gradient[1] if isinstance(scale, float) and scale == 1 else self.gradient[1] * scale
        step_rows(self._copies, slice(0, len(grads)), grads, self._numbers, self._order)
        self._worked = True

    def commit(self, accepted: bool) -> None:
        """Put the rows back, if accepted."""
        if not accepted:
            self._rows.table.collect()
            return
        assert self._worked and self._copies is not None and self._order is not None
        rows, places = self._rows, self.gradient[0][self._order]
        with rows.table.writing():
            rows.shard.weight = rows.table.shard
            there = copy_to_device(places, rows.shard.weight.device)
            for target, copy in zip(rows.shard.tensors, self._copies.tensors, strict=True):
                target.index_copy_(0, there, copy)
        rows.stepped(self._group, self._number, places)
        rows.table.pushes.events.clear()
