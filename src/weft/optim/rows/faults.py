"""What `RowAdam` refuses, and in which words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from weft.comm.arguments import find_choice_fault
from weft.ops.embedding import RowTable
from weft.optim.step.part import find_kind_fault

MODES = ("exact", "lazy", "auto")


def find_group_fault(group: dict[str, Any]) -> Exception | None:
    """What cannot be right, before anything is changed."""
    if fault := find_kind_fault("RowAdam", group, "eps", "weight_decay"):
        return fault
    b1, b2 = group["betas"]
    if not all(0 <= value < math.inf for value in (float(group["lr"]), group["eps"], group["weight_decay"])):
        return ValueError(
            f"RowAdam: lr, eps and weight_decay must be finite and not negative, got {float(group['lr'])}, "
            f"{group['eps']} and {group['weight_decay']}"
        )
    if not (0 <= b1 < 1 and 0 <= b2 < 1):
        return ValueError(f"RowAdam: betas must be in [0, 1), got ({b1}, {b2})")
    if float(group["lr"]) * group["weight_decay"] >= 1:
        return ValueError(
            f"RowAdam: lr * weight_decay must be below 1, got {float(group['lr'])} * {group['weight_decay']}"
        )
    if fault := find_choice_fault("RowAdam", "mode", group["mode"], None, MODES):
        return fault
    if len({id(weight) for weight in group["params"]}) < len(group["params"]):
        return ValueError("RowAdam: a parameter is listed twice in a group; it would be stepped twice in each step")
    for weight in group["params"]:
        if not isinstance(getattr(weight, "row_table", None), RowTable):
            return TypeError(
                f"RowAdam: a parameter of shape {list(weight.shape)} is not the weight of a weft.ShardedEmbedding; "
                f"step it with another optimizer"
            )
    return None


def find_table_fault(table: RowTable, keeper: object, moment: Tensor) -> Exception | None:
    """Whether another optimizer has taken the table, or it is of another kind than when its state was made."""
    if table.keeper is not keeper:
        return ValueError(
            f"RowAdam: a table of shape {list(table.weight.shape)} has been taken over by another RowAdam, which keeps "
            f"its rows since (rank {table.axis.rank}); step a table with one optimizer, the newest"
        )
    if (moment.dtype, moment.device) != (table.wide, table.weight.device):
        return TypeError(
            f"RowAdam: a table is {table.weight.dtype} on {table.weight.device} now, but its moments were made "
            f"{moment.dtype} on {moment.device} (rank {table.axis.rank}); make the optimizer after .to()"
        )
    return None


def check_saved(groups: Sequence[Mapping[str, Any]], states: Mapping[Any, Mapping[str, Any]]) -> None:
    """Refuse a state of an Adam that RowAdam is not."""
    for number, group in enumerate(groups):
        if group.get("weight_decay", 0) and not group.get("decoupled_weight_decay", True):
            raise ValueError(
                f"RowAdam: group {number} of the state has weight_decay={group['weight_decay']} of Adam's kind (L2); "
                f"RowAdam's is AdamW's"
            )
    for number, values in states.items():
        if "max_exp_avg_sq" in values:
            raise ValueError(f"RowAdam: parameter {number} of the state has max_exp_avg_sq, of amsgrad=True")


def check_moments(given: Sequence[Mapping[str, Any] | None], tables: Sequence[RowTable]) -> None:
    """Refuse moments of tables of other shapes."""
    for number, (values, table) in enumerate(zip(given, tables, strict=True)):
        wanted = [table.ownership.rows, table.weight.shape[1]]
        for name in ("exp_avg", "exp_avg_sq"):
            if values is not None and list(values[name].shape) != wanted:
                raise ValueError(
                    f"RowAdam: {name} of parameter {number} is {list(values[name].shape)} in the state, but the table "
                    f"is {wanted} (rank {table.axis.rank})"
                )
