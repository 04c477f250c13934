"""What `RowAdam` keeps of one table: moments, and up to which step each own row is up to date."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from weft.comm.modes import outside_modes
from weft.ops.embedding import RowTable
from weft.ops.embedding.checkpoint import from_checkpoint, to_checkpoint
from weft.optim.rows.skipped_steps import StepHistory
from weft.optim.rows.steps import Shard, catch_up_rows, catch_up_whole

_MOMENTS = ("exp_avg", "exp_avg_sq")
LONGEST = 256  # steps a row may lag where momentum never fades (b1 >= sqrt(b2))


class RowState:
    """The optimizer's part of one table. ``shard`` is what it steps in place."""

    def __init__(self, table: RowTable, moments: tuple[Tensor, Tensor], step: int, group: dict[str, Any]) -> None:
        self.table, self.moments = table, moments
        count, device = table.ownership.count(table.axis.rank), table.weight.device
        self.last = torch.empty(count, dtype=torch.int32, device=device)
        self.shard = Shard(table.shard, *moments)
        self.begin(step, group)

    def begin(self, step: int, group: dict[str, Any]) -> None:
        """All rows are up to date at ``step``: from here on everything follows from weights and moments alone."""
        with outside_modes(self.table.weight):
            self.last.fill_(step)
            self.at_rest = (self.moments[0] == 0).all(1)  # such a row does not move by itself
            self.history = StepHistory(step, tuple(group["betas"]), group["eps"], self.table.wide)

    def flush(self, group: dict[str, Any]) -> None:
        """Bring all rows up to date and forget how: what is saved now is all there is, for whoever loads it."""
        self.catch_up(None, for_step=True)
        self.begin(self.history.now, group)

    def take(self, moments: Iterable[Tensor | None], step: int, group: dict[str, Any]) -> None:
        """Go on from these moments of own rows (None: zeros), with all rows up to date at ``step``."""
        for mine, value in zip(self.moments, moments, strict=True):
            mine.zero_() if value is None else mine.copy_(value)
        self.begin(step, group)

    def save(self, group: dict[str, Any]) -> dict[str, Tensor]:
        """Moments of the whole table, as a checkpoint holds them; all ranks must ask."""
        self.flush(group)
        table = self.table
        return {
            name: to_checkpoint(table.axis, table.ownership, moment)
            for name, moment in zip(_MOMENTS, self.moments, strict=True)
        }

    def load(self, values: Mapping[str, Tensor] | None, step: int, group: dict[str, Any]) -> None:
        """Go on from what `save` gave."""
        table = self.table
        self.take(
            [None if values is None else from_checkpoint(table.axis, table.ownership, values[name])
             for name in _MOMENTS], step, group,
        )  # fmt: skip

    def prepare(self, group: dict[str, Any]) -> None:
        """Before a step with the options of ``group``: if the last ones differ, bring all rows up to date."""
        history, lazy = self.history, group["mode"] == "lazy"
        settings = (tuple(group["betas"]), group["eps"])
        other = settings != (history.betas, history.eps) or (
            history.horizon is None and history.now - history.base >= LONGEST
        )
        if lazy and history.now > history.base:  # it was another mode before
            self.catch_up(None, for_step=True)
        elif not lazy and other:
            self.catch_up(None, for_step=True)  # by what they were made with
            self.history = StepHistory(history.now, *settings, self.table.wide)

    def catch_up(self, places: Tensor | None, for_step: bool) -> None:
        """Bring rows (None: all) to the last step. ``for_step``: their moments too, if nothing else would change."""
        with outside_modes(self.table.weight):
            history = self.history
            if places is None:
                places = torch.arange(len(self.last), device=self.last.device)
            last, at_rest = self.last[places], self.at_rest[places]
            stale = last < history.now
            if not for_step and not history.decays:
                stale &= ~at_rest
            places, last, at_rest = places[stale], last[stale], at_rest[stale]
            if not len(places):
                return
            self.shard.weight = self.table.shard
            with self.table.writing():
                faded = places[self._bring(self.shard, places, last, at_rest)]
                self.last[places] = history.now
                self.at_rest[faded] = True

    def sort_copies(self, places: Tensor) -> tuple[Tensor, list[int]]:
        """An order for copies of rows: up to date, at rest, moving; within each as they are. How many each has."""
        kind = (self.last[places] < self.history.now) * (2 - self.at_rest[places].int())
        return torch.argsort(kind, stable=True), torch.bincount(kind, minlength=3).tolist()

    def catch_up_copies(self, copies: Shard, places: Tensor, counts: list[int]) -> None:
        """The same for copies of the rows at ``places``, in the order of `sort_copies`: they need no further copy."""
        history, stale, moving = self.history, counts[0], counts[0] + counts[1]
        last = self.last[places[stale:]]
        if not len(last):
            return
        known, which = torch.unique(last, return_inverse=True)
        skipped = history.skipped(known)
        for rows, how in ((slice(stale, moving), skipped.at_rest()), (slice(moving, len(places)), skipped)):
            if rows.start < rows.stop:
                catch_up_whole(copies, rows, which[rows.start - stale : rows.stop - stale], how, history.eps)
        if history.horizon is not None:
            copies.exp_avg[moving:][history.now - last[moving - stale :] > history.horizon] = 0

    def _bring(self, shard: Shard, places: Tensor, last: Tensor, at_rest: Tensor) -> Tensor:
        """Rows of a shard from their last steps to now; of which of them the momentum has faded, and is zero."""
        history = self.history
        known, which = torch.unique(last, return_inverse=True)
        skipped = history.skipped(known)
        for moving in (False, True):  # rows at rest need no sum over steps
            chosen = at_rest != moving
            if chosen.any():
                how = skipped if moving else skipped.at_rest()
                catch_up_rows(shard, places[chosen], which[chosen], how, history.eps)
        if history.horizon is None:
            return torch.zeros_like(at_rest)
        faded = ~at_rest & (history.now - last > history.horizon)
        shard.exp_avg[places[faded]] = 0
        return faded

    def stepped(self, group: dict[str, Any], number: int, places: Tensor) -> None:
        """Note that step ``number`` has been made, with gradients for ``places``."""
        if group["mode"] == "lazy":
            self.history.base = self.history.now = number
            self.last.fill_(number)
        else:
            self.history.append(float(group["lr"]), group["weight_decay"])
            self.last[places] = number
        self.at_rest[places] = False
        self.table.stepped(places)
