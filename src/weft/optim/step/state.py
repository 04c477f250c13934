"""Saved states: checked on all ranks before any loads, taken apart, and those of several parts as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.comm import Axis
from weft.optim.step.compare import gather_verdict, parameters_of
from weft.optim.step.part import StepPart

_FORMER = ("scatter_order", "work_order")  # in states of earlier versions; they changed no result
# Options of Adam's param groups that ours do not have: saved with the values that mean the same.
OF_TORCH = {
    "amsgrad": False, "maximize": False, "foreach": None, "capturable": False, "differentiable": False, "fused": None,
    "decoupled_weight_decay": True,
}  # fmt: skip


def first_count() -> Tensor:
    """The number of steps made: fp32 as torch's, whatever the default dtype is (bf16 ends at 256)."""
    return torch.tensor(0.0, dtype=torch.float32)


def keep_own_options(optimizer: torch.optim.Optimizer, saved: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Saved param groups with the options that the optimizer's groups have, and no others."""
    groups = [dict(group) for group in saved]
    for other in ("amsgrad", "maximize"):
        if any(group.get(other) for group in groups):
            raise ValueError(
                f"{type(optimizer).__name__}: the state is of an optimizer with {other}=True, which this is not"
            )
    for group, now in zip(groups, optimizer.param_groups, strict=False):
        for name in set(optimizer.defaults) & set(now):  # torch adds a default of its own when it loads a state
            group.setdefault(name, now[name])
        for name in set(group) - set(now):
            del group[name]
    return groups


def find_state_fault(part: StepPart, state_dict: Mapping[str, Any]) -> Exception | None:
    """Why a part cannot load a state, if it cannot."""
    try:
        part.check_state(state_dict)
    except (ValueError, TypeError, NotImplementedError) as error:
        return error
    except Exception as error:  # whatever the state is, all ranks must raise it
        return ValueError(f"{type(part).__name__}: the state cannot be read ({type(error).__name__}: {error})")
    return None


def agree_to_load(label: str, axes: Sequence[Axis], fault: Exception | None) -> None:
    """Raise the fault of one rank on all, before any of them loads anything."""
    gather_verdict(
        [axis for axis in axes if axis.size > 1], f"{label}.load_state_dict", None, [], lambda axis, rows: [], fault
    )


def take_apart(
    optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Any], list[Mapping[str, Any] | None]]:
    """(what torch's load_state_dict takes: ``groups`` and no tensors; the tensors of each parameter, None if none).

    torch casts tensors to the dtype of their parameter when it loads them, so they are loaded apart.
    """
    numbers, name = [number for group in groups for number in group["params"]], type(optimizer).__name__
    own = len(parameters_of(optimizer))
    if len(numbers) != own:
        raise ValueError(f"{name}: the state has {len(numbers)} parameters, this optimizer {own}")
    sizes = [[len(group["params"]) for group in some] for some in (groups, optimizer.param_groups)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"{name}: the groups of the state have {sizes[0]} parameters, those of this optimizer {sizes[1]}"
        )
    tensors = state_dict["state"]
    return {**state_dict, "state": {}, "param_groups": list(groups)}, [tensors.get(number) for number in numbers]


def join_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One state_dict of several: groups one after the other, parameters numbered on."""
    joined: dict[str, Any] = {"state": {}, "param_groups": []}
    before = 0
    for state in states:
        joined["state"].update({before + number: value for number, value in state["state"].items()})
        joined["param_groups"] += [
            {**group, "params": [before + number for number in group["params"]]} for group in state["param_groups"]
        ]
        before += sum(len(group["params"]) for group in state["param_groups"])
    return joined


def read_states(
    state_dict: Mapping[str, Any], parts: Mapping[str, StepPart]
) -> tuple[list[dict[str, Any]], Exception | None]:
    """What each part loads, and why some part cannot, if so."""
    try:
        split = _split_state(state_dict, parts)
    except ValueError as error:
        return [], error
    except (KeyError, TypeError, AttributeError) as error:
        return [], ValueError(f"OverlappedStep: the state cannot be read ({type(error).__name__}: {error})")
    faults = (find_state_fault(part, one) for part, one in zip(parts.values(), split, strict=True))
    return split, next((fault for fault in faults if fault is not None), None)


def _split_state(state_dict: Mapping[str, Any], parts: Mapping[str, StepPart]) -> list[dict[str, Any]]:
    """What each part loads. Numbers of groups and parameters are compared before any part loads anything."""
    groups = [{name: one for name, one in group.items() if name not in _FORMER} for group in state_dict["param_groups"]]
    wanted = sum(len(part.param_groups) for part in parts.values())
    if len(groups) != wanted:
        raise ValueError(f"OverlappedStep: the state has {len(groups)} parameter groups, the parts have {wanted}")
    found, first = [], 0
    for name, part in parts.items():
        own = groups[first : first + len(part.param_groups)]
        first += len(part.param_groups)
        for at, (group, now) in enumerate(zip(own, part.param_groups, strict=True)):
            if len(group["params"]) != len(now["params"]):
                raise ValueError(
                    f"OverlappedStep: group {at} of {name} has {len(now['params'])} parameters, in the state "
                    f"{len(group['params'])}"
                )
        numbers = [number for group in own for number in group["params"]]
        places = {number: place for place, number in enumerate(numbers)}
        found.append({
            "state": {places[n]: state_dict["state"][n] for n in numbers if n in state_dict["state"]},
            "param_groups": [{**group, "params": [places[number] for number in group["params"]]} for group in own],
        })  # fmt: skip
    return found
