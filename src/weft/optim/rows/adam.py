"""`RowAdam`: Adam and AdamW for `ShardedEmbedding` tables, at the cost of the rows touched."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from weft.comm import Axis
from weft.comm.arguments import find_choice_fault, read
from weft.comm.function import outside_modes
from weft.comm.ledger import Event
from weft.ops.embedding import RowTable
from weft.optim.rows.state import MOMENTS, Costs, RowState, RowUpdate
from weft.optim.rows.steps import RowCosts
from weft.optim.step.compare import Examined
from weft.optim.step.part import StepPart, call_closure, find_adam_fault, first_group_fault
from weft.optim.step.state import OF_TORCH, keep_own_options, take_apart

MODES = ("exact", "lazy", "auto")


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
        self._costs: Costs = {}
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "mode": mode})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; every parameter must be the weight of a `ShardedEmbedding`."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if fault := read("RowAdam", None, lambda: find_group_fault(group)):
            self.param_groups.pop()
            raise fault
        for weight in group["params"]:
            self._rows[weight] = RowState(self, weight.row_table, self._costs)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every table that has a gradient."""
        loss = call_closure(closure)
        if fault := self._find_fault():
            for axis in self.step_axes():  # nothing is sent here: the others learn it when they wait for this rank
                axis.publish_fault("RowAdam", fault)
            raise fault
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.row_table.has_gradient:
                    with outside_modes(weight):
                        RowUpdate(self._rows[weight]).step_in_place()
        return loss

    def _find_fault(self) -> Exception | None:
        every = list(self._rows.values())
        rank = every[0].table.axis.rank if every else 0
        fault = first_group_fault("RowAdam", self.param_groups, find_group_fault, rank)
        return fault or next(filter(None, (rows.find_fault() for rows in every)), None)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; gradients that are still under way are waited for first."""
        for rows in self._rows.values():
            rows.table.collect()
            rows.table.pushes.events.clear()
        super().zero_grad(set_to_none)

    def set_costs(self, costs: RowCosts) -> None:
        """Decide "auto" by these instead of measured costs, for benchmarks and tests."""
        for rows in self._rows.values():
            self._costs[rows.shard.width, rows.table.weight.dtype] = costs

    # The verbs of a part: gradients leave in the backward, and nothing comes back before the next forward asks for it.

    sends_in_step = False

    def step_axes(self) -> list[Axis]:
        """The axes of the tables."""
        axes = (rows.table.axis for rows in self._rows.values())
        return list({id(axis): axis for axis in axes if axis.size > 1}.values())

    def buckets(self) -> list[list[Tensor]]:
        """Each table is one."""
        return [[weight] for weight in self._rows]

    def examine(self) -> Examined:
        """Which tables have gradients. Whether these are finite is known when they have arrived."""
        names = [f"table {at} of group {number}" for number, group in enumerate(self.param_groups)
                 for at in range(len(group["params"]))]  # fmt: skip
        settings, fault = self._read_settings(self._find_fault())
        present = [rows.table.has_gradient for rows in self._rows.values()]
        return Examined(list(self._rows), names, present, [None] * len(present), settings, fault)

    def begin(self, present: Collection[Tensor]) -> None:
        """Take the tables that have gradients."""
        super().begin(present)
        self._updates = [RowUpdate(rows) if weight in present else None for weight, rows in self._rows.items()]

    def collect_late(self) -> None:
        """Take gradients when they are worked on, not at the end of the backward: they travel under other work."""
        for rows in self._rows.values():
            rows.table.collects_late = True

    def send(self, bucket: int) -> None:
        """Nothing: they are on their way since the backward."""

    def sent_before(self, bucket: int) -> list[Event]:
        """What left in the backward."""
        return list(self._table(bucket).pushes.events)

    def squared_norm(self, bucket: int) -> Tensor:
        """Of the rows this rank owns."""
        if (update := self._updates[bucket]) is None:
            return torch.zeros((), dtype=torch.float64)
        self._check(bucket, update)
        return torch.linalg.vector_norm(update.gradient[1], dtype=torch.float64).square()

    def norm_axes(self, bucket: int) -> list[Axis]:
        """The ranks of the table."""
        return [self._table(bucket).axis]

    def _table(self, bucket: int) -> RowTable:
        return list(self._rows.values())[bucket].table

    def work_ahead(self, bucket: int) -> None:
        """Copy the touched rows out, and bring the copies up to date."""
        if (update := self._updates[bucket]) is not None:
            update.copy_rows()

    def work_on(self, bucket: int, scale: float | Tensor) -> None:
        """Adam on the touched rows, in copies."""
        if (update := self._updates[bucket]) is not None:
            update.work(scale)
            self._check(bucket, update)

    def _check(self, bucket: int, update: RowUpdate) -> None:
        """Whether the gradient is finite, once: on a device that is part of the step's verdict."""

        def fail() -> None:
            self.failed = self.failed or 1 + bucket

        if not update.is_checked:
            update.is_checked = True
            self.verdict.are_finite([update.gradient[1]], fail)

    def commit(self, accepted: bool) -> None:
        """Put the copies back."""
        updates, self._updates = self._updates, []
        for update in updates:
            if update is not None:
                update.commit(accepted)

    def explain_failure(self, name: str) -> str:
        """The gradient, once its rows have been summed."""
        return f"the gradient of {name} is not finite"

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """As torch's, with all rows up to date and moments of the whole table, as DTensors; all ranks must ask."""
        saved = super().state_dict()
        for group in saved["param_groups"]:
            group.update(OF_TORCH)
        for number, rows in enumerate(self._rows.values()):
            saved["state"][number] = rows.save()
        return saved

    def check_state(self, state_dict: Mapping[str, Any]) -> None:
        """Raise if a state cannot be loaded."""
        self._read_state(state_dict)

    def _read_state(self, state_dict: Mapping[str, Any]) -> tuple[dict[str, Any], list[Mapping[str, Any] | None]]:
        """What `take_apart` gives, unless it is of an Adam that RowAdam is not, or of tables of other shapes."""
        groups = state_dict["param_groups"]
        saved, given = take_apart(self, state_dict, keep_own_options(self, groups))
        for number, group in enumerate(groups):
            if group.get("weight_decay", 0) and not group.get("decoupled_weight_decay", True):
                words = f"group {number} of the state has weight_decay={group['weight_decay']} of Adam's kind (L2)"
                raise ValueError(f"RowAdam: {words}; RowAdam's is AdamW's")
        for number, values in state_dict["state"].items():
            if "max_exp_avg_sq" in values:
                raise ValueError(f"RowAdam: parameter {number} of the state has max_exp_avg_sq, of amsgrad=True")
        for number, (moments, rows) in enumerate(zip(given, self._rows.values(), strict=True)):
            wanted = [rows.table.ownership.rows, rows.shard.width]
            shapes = {} if moments is None else {name: list(moments[name].shape) for name in MOMENTS}
            for name, shape in shapes.items():
                if shape != wanted:
                    words = f"{name} of parameter {number} is {shape} in the state, but the table is {wanted}"
                    raise ValueError(f"RowAdam: {words} (rank {rows.table.axis.rank})")
        return saved, given

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; also from another number of ranks, and from ``torch.optim.Adam`` or ``AdamW`` of the table."""
        saved, given = self._read_state(state_dict)
        for rows in self._rows.values():  # the steps that rows have missed were made with the old moments
            rows.catch_up(None, for_step=False)
        super().load_state_dict(saved)
        for values, (weight, rows) in zip(given, self._rows.items(), strict=True):
            self.state[weight] = rows.state
            rows.load(values)

    def __deepcopy__(self, memo: dict[int, Any]) -> RowAdam:
        """An optimizer of copies of the tables: those of a model that is copied beside it."""
        groups = []
        for group in self.param_groups:
            for weight in group["params"]:
                self._rows[weight].flush()
            options = {name: copy.deepcopy(value, memo) for name, value in group.items() if name != "params"}
            weights = [copy.deepcopy(weight.row_table, memo).weight for weight in group["params"]]
            groups.append({**options, "params": weights})
        made = memo[id(self)] = type(self)(groups)
        made.defaults.update(self.defaults)
        for rows, other in zip(self._rows.values(), made._rows.values(), strict=True):
            other.go_on_from(*(rows.state[name] for name in ("step", *MOMENTS)))
        return made

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("RowAdam: an optimizer of tables over ranks is not pickled; save its state_dict()")


def find_group_fault(group: dict[str, Any]) -> Exception | None:
    """What cannot be right, before anything is changed."""
    if fault := find_adam_fault("RowAdam", group):
        return fault
    lr, decay = float(group["lr"]), group["weight_decay"]
    if lr * decay >= 1:
        return ValueError(f"RowAdam: lr * weight_decay must be below 1, got {lr} * {decay}")
    if fault := find_choice_fault("RowAdam", "mode", group["mode"], None, MODES):
        return fault
    if len({id(weight) for weight in group["params"]}) < len(group["params"]):
        return ValueError("RowAdam: a parameter is listed twice in a group; it would be stepped twice in each step")
    for weight in group["params"]:
        if not isinstance(getattr(weight, "row_table", None), RowTable):
            words = f"a parameter of shape {list(weight.shape)} is not the weight of a weft.ShardedEmbedding"
            return TypeError(f"RowAdam: {words}; step it with another optimizer")
    return None
