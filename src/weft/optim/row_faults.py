"""What `RowAdam` refuses, and in which words."""

from __future__ import annotations

import math
from typing import Any

from weft.comm.arguments import find_choice_fault
from weft.embedding import RowTable
from weft.optim.group_faults import find_kind_fault

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
    for weight in group["params"]:
        if not isinstance(getattr(weight, "row_table", None), RowTable):
            return TypeError(
                f"RowAdam: a parameter of shape {list(weight.shape)} is not the weight of a weft.ShardedEmbedding; "
                f"step it with another optimizer"
            )
    return None
