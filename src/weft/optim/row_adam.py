"""`RowAdam`: Adam and AdamW for `ShardedEmbedding` tables, at the cost of the rows touched."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from weft.comm import ledger
from weft.embedding import RowTable
from weft.embedding.checkpoint import from_checkpoint, to_checkpoint
from weft.optim.row_costs import RowCosts
from weft.optim.row_steps import AdamStep, Shard, catch_up_rows, step_dense, step_rows
from weft.optim.saved_state import OF_TORCH, keep_own_options, take_apart
from weft.optim.skipped_steps import StepHistory

MODES = ("exact", "lazy", "auto")
_LONGEST = 256  # steps a row may lag where momentum never fades (b1 >= sqrt(b2))
_MOMENTS = ("exp_avg", "exp_avg_sq")


class _Rows:
    """The optimizer's part of one table: moments, and up to which step each own row is up to date."""

    def __init__(self, table: RowTable, moments: tuple[Tensor, Tensor], step: int, group: dict[str, Any]) -> None:
        self.table, self.moments = table, moments
        count, device = table.ownership.count(table.axis.rank), table.weight.device
        self.last = torch.full((count,), step, dtype=torch.int32, device=device)
        # A row at rest does not move by itself: its momentum is zero.
        self.at_rest = (moments[0] == 0).all(1) if step else torch.ones(count, dtype=torch.bool, device=device)
        self.history = StepHistory(step, tuple(group["betas"]), group["eps"], table.wide)
        self.shard = Shard(table.shard, *moments)

    def renew(self, group: dict[str, Any]) -> None:
        """Begin a new history, when all rows are up to date."""
        self.history = StepHistory(self.history.now, tuple(group["betas"]), group["eps"], self.table.wide)

    def catch_up(self, places: Tensor | None, for_step: bool) -> None:
        """Bring rows (None: all) to the last step. ``for_step``: their moments too, if nothing else would change."""
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
            known, which = torch.unique(last, return_inverse=True)
            skipped = history.skipped(known)
            for moving in (False, True):  # rows at rest need no sum over steps
                chosen = at_rest != moving
                if chosen.any():
                    how = skipped if moving else skipped.at_rest()
                    catch_up_rows(self.shard, places[chosen], which[chosen], how, history.eps)
            self.last[places] = history.now
            if history.horizon is not None:
                faded = places[~at_rest & (history.now - last > history.horizon)]
                self.moments[0][faded] = 0
                self.at_rest[faded] = True


class RowAdam(torch.optim.Optimizer):
    """Adam (AdamW where ``weight_decay`` is not 0) for the tables of `weft.ShardedEmbedding`.

    ``params`` are weights of such tables, or param groups of them. Each rank steps the rows it owns; nothing crosses
    ranks. Moments are fp32 for bf16 tables (fp64 for fp64).

    - "exact" equals ``torch.optim.Adam`` or ``AdamW`` on the whole table. A row that gets no gradient is left alone and
      brought up to date, for all the steps it missed at once, when it is next pulled, stepped or saved.
    - "lazy" steps only the rows that have a gradient, as ``torch.optim.SparseAdam`` does: for the others neither
      moments nor weights change, and no weight decay is applied. The bias corrections count all steps.
    - "auto" is "exact", and picks for each step the cheaper of two ways that give the same bits, by costs measured at
      the first step: rows copied out and back, or the whole shard where it lies. The ledger says which.

    Between steps ``embedding.weight`` itself may hold rows that are not up to date; `ShardedEmbedding.full_weight`, its
    forward and ``state_dict`` bring them up to date first.

    >>> import weft
    >>> table = weft.ShardedEmbedding(10, 4)
    >>> optimizer = RowAdam(table.parameters(), lr=0.1)
    >>> table(torch.tensor([1, 2])).sum().backward()
    >>> optimizer.step()
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        mode: str = "exact",
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"RowAdam: mode {mode!r} is not one of {', '.join(MODES)}")
        self._rows: dict[Tensor, _Rows] = {}
        self._costs: dict[tuple[int, torch.dtype], RowCosts] = {}
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "mode": mode})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; every parameter must be the weight of a `ShardedEmbedding`."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check(group)
        except (ValueError, TypeError):
            self.param_groups.pop()
            raise
        for weight in group["params"]:
            table: RowTable = weight.row_table
            shape = (table.ownership.count(table.axis.rank), weight.shape[1])
            first, second = (torch.zeros(shape, dtype=table.wide, device=weight.device) for _ in range(2))
            self.state[weight] = {"step": torch.tensor(0.0), "exp_avg": first, "exp_avg_sq": second}
            self._rows[weight] = _Rows(table, (first, second), 0, group)
            table.current()  # another optimizer may have kept it until now
            table.keeper = self

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every table that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            _check(group)
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._step(group, weight)
        return loss

    def _step(self, group: dict[str, Any], weight: Tensor) -> None:
        rows = self._rows[weight]
        table, history = rows.table, rows.history
        found = table.gradient()
        assert found is not None
        places, grads = found[0], found[1].to(table.wide)
        settings = (tuple(group["betas"]), group["eps"])
        if group["mode"] == "lazy":
            if history.now > history.base:  # it was another mode before
                rows.catch_up(None, for_step=True)
        else:
            if settings != (history.betas, history.eps) or (
                history.horizon is None and history.now - history.base >= _LONGEST
            ):
                rows.catch_up(None, for_step=True)  # by what they were made with
                rows.renew(group)
                history = rows.history
            rows.catch_up(places, for_step=True)
        number = int(self.state[weight]["step"]) + 1
        lr = float(group["lr"])
        step = AdamStep(number, lr, settings[0], settings[1], group["weight_decay"])
        with table.writing():
            rows.shard.weight = table.shard
            self._advance(group["mode"], rows, places, grads, step)
        self.state[weight]["step"].fill_(number)
        if group["mode"] == "lazy":
            history.base = history.now = number
            rows.last.fill_(number)
        else:
            history.append(lr, group["weight_decay"])
            rows.last[places] = number
        rows.at_rest[places] = False
        table.stepped(places)

    def set_costs(self, costs: RowCosts) -> None:
        """Decide "auto" by these instead of measured costs, for benchmarks and tests."""
        self._costs = {(rows.shard.width, rows.table.weight.dtype): costs for rows in self._rows.values()}

    def _advance(self, mode: str, rows: _Rows, places: Tensor, grads: Tensor, step: AdamStep) -> None:
        dense = False
        if mode == "auto" and 2 * len(places) > len(rows.last):
            key = (rows.shard.width, rows.table.weight.dtype)
            if key not in self._costs:
                self._costs[key] = RowCosts.measure(rows.shard)
            dense = self._costs[key].prefer_dense(len(places), len(rows.last))
        start = time.perf_counter()
        (step_dense if dense else step_rows)(rows.shard, places, grads, step)
        if ledger.is_recording():
            way, axis = "dense" if dense else "rows", rows.table.axis
            now = time.perf_counter()
            ledger.note(ledger.Event(f"RowAdam: {way}", axis.wire.rank, start=start, end=now, lane="RowAdam"))

    # What tables ask: see `weft.embedding.table.RowKeeper`.

    @torch.no_grad()
    def catch_up(self, table: RowTable, places: Tensor | None) -> None:
        """Bring own rows of a table (None: all) to where the last step left it."""
        self._rows[table.weight].catch_up(places, for_step=False)

    def is_restless(self, table: RowTable, places: Tensor) -> Tensor:
        """Of own rows: whether the next step changes them even if they get no gradient."""
        rows, group = self._rows[table.weight], self._group_of(table.weight)
        if group["mode"] == "lazy":
            return torch.zeros_like(places, dtype=torch.bool)
        if rows.history.decays or group["weight_decay"]:
            return torch.ones_like(places, dtype=torch.bool)
        return ~rows.at_rest[places]

    def _group_of(self, weight: Tensor) -> dict[str, Any]:
        return next(group for group in self.param_groups if any(weight is one for one in group["params"]))

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """As torch's, with all rows up to date and moments of the whole table, as DTensors; all ranks must ask."""
        saved = super().state_dict()
        for group in saved["param_groups"]:
            group.update(OF_TORCH)
        numbered = [weight for group in self.param_groups for weight in group["params"]]
        for number, weight in enumerate(numbered):
            rows = self._rows[weight]
            rows.catch_up(None, for_step=True)
            table = rows.table
            whole = {name: to_checkpoint(table.axis, table.ownership, self.state[weight][name]) for name in _MOMENTS}
            saved["state"][number] = {"step": self.state[weight]["step"].clone(), **whole}
        return saved

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; also from another number of ranks, and from ``torch.optim.Adam`` or ``AdamW`` of the table."""
        saved, given = take_apart(self, state_dict, keep_own_options(self, state_dict["param_groups"]))
        weights = [weight for group in self.param_groups for weight in group["params"]]
        for number, (values, weight) in enumerate(zip(given, weights, strict=True)):
            table = weight.row_table
            for name in _MOMENTS:
                shape = None if values is None else tuple(values[name].shape)
                if shape not in (None, (table.ownership.rows, weight.shape[1])):
                    raise ValueError(
                        f"RowAdam: {name} of parameter {number} is {list(shape)} in the state, but the table is "
                        f"{[table.ownership.rows, weight.shape[1]]} (rank {table.axis.rank})"
                    )
        for weight in weights:  # the steps that rows have missed were made with the old moments
            self.catch_up(weight.row_table, None)
        own_state = {weight: self.state[weight] for weight in weights}
        super().load_state_dict(saved)
        for values, weight in zip(given, weights, strict=True):
            state = self.state[weight] = own_state[weight]
            table = self._rows[weight].table
            for name in _MOMENTS:
                if values is None:
                    state[name].zero_()
                else:
                    state[name].copy_(from_checkpoint(table.axis, table.ownership, values[name]))
            state["step"].fill_(0.0 if values is None else float(values["step"]))
            self._rows[weight] = _Rows(
                table, (state["exp_avg"], state["exp_avg_sq"]), int(state["step"]), self._group_of(weight)
            )


def _check(group: dict[str, Any]) -> None:
    """Refuse what cannot be right, before anything is changed."""
    b1, b2 = group["betas"]
    if float(group["lr"]) < 0 or group["eps"] < 0 or group["weight_decay"] < 0:
        raise ValueError(
            f"RowAdam: lr, eps and weight_decay must not be negative, got {float(group['lr'])}, {group['eps']} and "
            f"{group['weight_decay']}"
        )
    if not (0 <= b1 < 1 and 0 <= b2 < 1):
        raise ValueError(f"RowAdam: betas must be in [0, 1), got ({b1}, {b2})")
    if float(group["lr"]) * group["weight_decay"] >= 1:
        raise ValueError(
            f"RowAdam: lr * weight_decay must be below 1, got {float(group['lr'])} * {group['weight_decay']}"
        )
    if group["mode"] not in MODES:
        raise ValueError(f"RowAdam: mode {group['mode']!r} is not one of {', '.join(MODES)}")
    for weight in group["params"]:
        if not isinstance(getattr(weight, "row_table", None), RowTable):
            raise TypeError(
                f"RowAdam: a parameter of shape {list(weight.shape)} is not the weight of a weft.ShardedEmbedding; "
                f"step it with another optimizer"
            )
