"""What the states of torch.optim.Adam and AdamW have besides ours, so that either can go on from the other's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Options of their param groups that these optimizers do not have: saved with the values that mean the same.
OF_TORCH = {
    "amsgrad": False, "maximize": False, "foreach": None, "capturable": False, "differentiable": False, "fused": None,
    "decoupled_weight_decay": True,
}  # fmt: skip


def keep_own_options(
    saved: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Saved param groups with the options that these groups have, and no others."""
    groups = [dict(group) for group in saved]
    for group, now in zip(groups, own, strict=False):
        for name in defaults:
            group.setdefault(name, now[name])
        for name in set(group) - set(now):
            del group[name]
    return groups
