"""What `RowAdam` refuses, and in which words."""

from __future__ import annotations

from typing import Any

from weft.embedding import RowTable

MODES = ("exact", "lazy", "auto")


def check_group(group: dict[str, Any]) -> None:
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
