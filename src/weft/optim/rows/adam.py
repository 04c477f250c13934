"""`RowAdam`: Adam and AdamW for `ShardedEmbedding` tables, at the cost of the rows touched."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from weft.comm import Axis, ledger
from weft.comm.arguments import find_choice_fault, read
from weft.comm.ledger import Event
from weft.comm.modes import outside_modes
from weft.ops.embedding import RowTable
from weft.ops.embedding.spare import SpareMemory
from weft.optim.rows.costs import RowCosts
from weft.optim.rows.faults import MODES, check_moments, check_saved, find_group_fault, find_table_fault
from weft.optim.rows.state import RowState
from weft.optim.rows.steps import AdamStep, step_dense, step_rows
from weft.optim.rows.update import RowUpdate
from weft.optim.step.compare import Examined
from weft.optim.step.part import StepPart, call_closure, first_group_fault
from weft.optim.step.state import OF_TORCH, first_count, keep_own_options, take_apart


class RowAdam(StepPart):
    """Adam (AdamW where ``weight_decay`` is not 0) for the tables of `weft.ShardedEmbedding`.

    ``params`` are weights of such tables, or param groups of them. Each rank steps the rows it owns; nothing crosses
    ranks. Moments are fp32 for bf16 tables (fp64 for fp64).

    - "exact" equals ``torch.optim.Adam`` or ``AdamW`` on the whole table. A row that gets no gradient is left alone and
      brought up to date, for all the steps it missed at once, when it is next pulled, stepped or saved.
    - "lazy" steps only the rows that have a gradient, as ``torch.optim.SparseAdam`` does: for the others neither
      moments nor weights change, and no weight decay is applied. The bias corrections count all steps.
    - "auto" is "exact", and picks for each step the cheaper of two ways that give the same bits, by costs measured at
      the first step: rows copied out and back, or the whole shard where it lies. The ledger says which.

    Between steps rows may be behind in memory. Whatever reads them, a lookup or anything else that computes with
    ``embedding.weight``, brings them up to date first. A table has one optimizer: a new one takes it over.

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
        if fault := find_choice_fault("RowAdam", "mode", mode, None, MODES):
            raise fault
        self._rows: dict[Tensor, RowState] = {}
        self._updates: list[RowUpdate | None] = []  # of the step under way
        self._spare: dict[Tensor, list[SpareMemory]] = {}
        self._costs: dict[tuple[int, torch.dtype], RowCosts] = {}
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "mode": mode})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; every parameter must be the weight of a `ShardedEmbedding`."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if fault := read("RowAdam", None, lambda: find_group_fault(group)):
            self.param_groups.pop()
            raise fault
        for weight in group["params"]:
            table: RowTable = weight.row_table
            shape = (table.ownership.count(table.axis.rank), weight.shape[1])
            first, second = (torch.zeros(shape, dtype=table.wide, device=weight.device) for _ in range(2))
            self.state[weight] = {"step": first_count(), "exp_avg": first, "exp_avg_sq": second}
            self._rows[weight] = RowState(table, (first, second), 0, group)
            table.current()  # another optimizer may have kept it until now
            table.keeper = self

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every table that has a gradient."""
        loss = call_closure(closure)
        if fault := self._find_fault():
            for axis in self.step_axes():  # nothing is sent here: the others hear of it when they wait for this rank
                axis.publish_fault("RowAdam", fault)
            raise fault
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.row_table.has_gradient:
                    with outside_modes(weight):
                        self._step(group, weight)
        return loss

    def _find_fault(self) -> Exception | None:
        rank = next((rows.table.axis.rank for rows in self._rows.values()), 0)
        fault = first_group_fault("RowAdam", self.param_groups, find_group_fault, rank)
        for rows in self._rows.values():
            fault = fault or find_table_fault(rows.table, self, rows.moments[0])
        return fault

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; gradients that are still under way are waited for first."""
        for rows in self._rows.values():
            rows.table.collect()
            rows.table.pushes.events.clear()
        super().zero_grad(set_to_none)

    def _step(self, group: dict[str, Any], weight: Tensor) -> None:
        rows = self._rows[weight]
        table = rows.table
        found = table.gradient()
        assert found is not None
        places, grads = found[0], found[1].to(table.wide)
        rows.prepare(group)
        if group["mode"] != "lazy":
            rows.catch_up(places, for_step=True)
        number = int(self.state[weight]["step"]) + 1
        step = AdamStep(number, float(group["lr"]), tuple(group["betas"]), group["eps"], group["weight_decay"])
        with table.writing():
            rows.shard.weight = table.shard
            self._advance(group["mode"], rows, places, grads, step)
        self.state[weight]["step"].fill_(number)
        rows.stepped(group, number, places)

    def set_costs(self, costs: RowCosts) -> None:
        """Decide "auto" by these instead of measured costs, for benchmarks and tests."""
        self._costs = {(rows.shard.width, rows.table.weight.dtype): costs for rows in self._rows.values()}

    def _advance(self, mode: str, rows: RowState, places: Tensor, grads: Tensor, step: AdamStep) -> None:
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
            ledger.note(Event(f"RowAdam: {way}", axis.wire.rank, start=start, end=now, lane="RowAdam"))

    # The verbs of a part: gradients leave in the backward, and nothing comes back before the next forward asks for it.

    sends_in_step = False

    def step_axes(self) -> list[Axis]:
        """The axes of the tables."""
        found: list[Axis] = []
        for rows in self._rows.values():
            axis = rows.table.axis
            if axis.size > 1 and not any(axis is one for one in found):
                found.append(axis)
        return found

    def buckets(self) -> list[list[Tensor]]:
        """Each table is one."""
        return [[weight] for weight in self._rows]

    def examine(self) -> Examined:
        """Which tables have gradients. Whether these are finite is known when they have arrived."""
        names = [f"table {at} of group {number}" for number, group in enumerate(self.param_groups)
                 for at in range(len(group["params"]))]  # fmt: skip
        settings, fault = self._read_settings(self._find_fault())
        weights, present = list(self._rows), [rows.table.has_gradient for rows in self._rows.values()]
        return Examined(weights, names, present, [None] * len(weights), settings, fault)

    def begin(self, present: Collection[Tensor]) -> None:
        """Take the tables that have gradients."""
        super().begin(present)
        self._updates = []
        for weight, rows in self._rows.items():
            memory = self._spare.setdefault(weight, [SpareMemory() for _ in range(3)])
            number, group = int(self.state[weight]["step"]) + 1, self._group_of(weight)
            self._updates.append(RowUpdate(rows, group, number, memory) if weight in present else None)

    def collect_late(self) -> None:
        """Take gradients when they are worked on, not at the end of the backward: they travel under other work."""
        for rows in self._rows.values():
            rows.table.collects_late = True

    def send(self, bucket: int) -> None:
        """Nothing: they are on their way since the backward."""

    def sent_before(self, bucket: int) -> list[Event]:
        """What left in the backward."""
        table: RowTable = self.buckets()[bucket][0].row_table  # type: ignore[attr-defined]
        return list(table.pushes.events)

    def squared_norm(self, bucket: int) -> Tensor:
        """Of the rows this rank owns."""
        if (update := self._updates[bucket]) is None:
            return torch.zeros((), dtype=torch.float64)
        grads = update.receive()
        self.failed = self.failed or (0 if update.finite else 1 + bucket)
        return torch.linalg.vector_norm(grads, dtype=torch.float64).square()

    def norm_axes(self, bucket: int) -> list[Axis]:
        """The ranks of the table."""
        return [self.buckets()[bucket][0].row_table.axis]  # type: ignore[attr-defined]

    def work_ahead(self, bucket: int) -> None:
        """Copy the touched rows out, and bring the copies up to date."""
        if (update := self._updates[bucket]) is not None:
            update.copy_rows()

    def work_on(self, bucket: int, scale: float) -> None:
        """Adam on the touched rows, in copies."""
        if (update := self._updates[bucket]) is not None:
            update.work(scale)
            self.failed = self.failed or (0 if update.finite else 1 + bucket)

    def commit(self, accepted: bool) -> None:
        """Put the copies back."""
        updates, self._updates = self._updates, []
        for (weight,), update in zip(self.buckets(), updates, strict=False):
            if update is not None and update.commit(accepted):
                self.state[weight]["step"] += 1
                self._rows[weight].table.pushes.events.clear()

    def explain_failure(self, name: str) -> str:
        """The gradient, once its rows have been summed."""
        return f"the gradient of {name} is not finite"

    # What tables ask: see `weft.ops.embedding.table.DeferredRows`.

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
        for number, (weight, rows) in enumerate(self._rows.items()):
            step = self.state[weight]["step"].clone()
            saved["state"][number] = {"step": step, **rows.save(self._group_of(weight))}
        return saved

    def check_state(self, state_dict: Mapping[str, Any]) -> None:
        """Raise if a state cannot be loaded."""
        _, given = take_apart(self, state_dict, keep_own_options(self, state_dict["param_groups"]))
        check_saved(state_dict["param_groups"], state_dict["state"])
        check_moments(given, [rows.table for rows in self._rows.values()])

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; also from another number of ranks, and from ``torch.optim.Adam`` or ``AdamW`` of the table."""
        self.check_state(state_dict)
        saved, given = take_apart(self, state_dict, keep_own_options(self, state_dict["param_groups"]))
        weights = list(self._rows)
        for rows in self._rows.values():  # the steps that rows have missed were made with the old moments
            rows.catch_up(None, for_step=False)
        own_state = {weight: self.state[weight] for weight in weights}
        super().load_state_dict(saved)
        for values, weight in zip(given, weights, strict=True):
            state = self.state[weight] = own_state[weight]
            state["step"].fill_(0.0 if values is None else float(values["step"]))
            self._rows[weight].load(values, int(state["step"]), self._group_of(weight))

    def __deepcopy__(self, memo: dict[int, Any]) -> RowAdam:
        """An optimizer of copies of the tables: those of a model that is copied beside it."""
        groups = []
        for group in self.param_groups:
            for weight in group["params"]:
                self._rows[weight].flush(group)
            options = {name: copy.deepcopy(value, memo) for name, value in group.items() if name != "params"}
            weights = [copy.deepcopy(weight.row_table, memo).weight for weight in group["params"]]
            groups.append({**options, "params": weights})
        made = memo[id(self)] = type(self)(groups)
        made.defaults.update(self.defaults)
        for weight, other in zip(self._rows, made._rows, strict=True):
            step = made.state[other]["step"].copy_(self.state[weight]["step"])
            made._rows[other].take(self._rows[weight].moments, int(step), made._group_of(other))
        return made

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("RowAdam: an optimizer of tables over ranks is not pickled; save its state_dict()")
