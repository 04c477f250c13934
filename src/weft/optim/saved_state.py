"""Saved states of optimizers: taken apart before they are loaded, and what torch.optim.Adam and AdamW have besides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

# Options of Adam's param groups that ours do not have: saved with the values that mean the same.
OF_TORCH = {
    "amsgrad": False, "maximize": False, "foreach": None, "capturable": False, "differentiable": False, "fused": None,
    "decoupled_weight_decay": True,
}  # fmt: skip


def keep_own_options(optimizer: torch.optim.Optimizer, saved: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Saved param groups with the options that the optimizer's groups have, and no others."""
    groups = [dict(group) for group in saved]
    for group, now in zip(groups, optimizer.param_groups, strict=False):
        for name in optimizer.defaults.keys() & now.keys():  # loading puts options of torch's among the defaults
            group.setdefault(name, now[name])
        for name in set(group) - set(now):
            del group[name]
    return groups


def take_apart(
    optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Any], list[Mapping[str, Any] | None]]:
    """(what torch's load_state_dict takes: ``groups`` and no tensors; the tensors of each parameter, None if none).

    torch casts tensors to the dtype of their parameter when it loads them, so they are loaded apart.
    """
    numbers = [number for group in groups for number in group["params"]]
    own = sum(len(group["params"]) for group in optimizer.param_groups)
    if len(numbers) != own:
        name = type(optimizer).__name__
        raise ValueError(f"{name}: the state has {len(numbers)} parameters, this optimizer {own}")
    tensors = state_dict["state"]
    return {**state_dict, "state": {}, "param_groups": list(groups)}, [tensors.get(number) for number in numbers]
