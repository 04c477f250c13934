"""The states of several optimizers as one, numbered through, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from weft.optim.step.orders import Orders
from weft.optim.step.part import StepPart
from weft.optim.step.saved_state import find_state_fault

_SCATTER, _WORK = "scatter_order", "work_order"  # in the first group: checkpoints keep groups and states only


def join_states(states: Sequence[Mapping[str, Any]], orders: Orders) -> dict[str, Any]:
    """One state_dict of several: groups one after the other, parameters numbered on."""
    joined: dict[str, Any] = {"state": {}, "param_groups": []}
    before = 0
    for state in states:
        count = sum(len(group["params"]) for group in state["param_groups"])
        joined["state"].update({before + number: value for number, value in state["state"].items()})
        joined["param_groups"] += [
            {**group, "params": [before + number for number in group["params"]]} for group in state["param_groups"]
        ]
        before += count
    joined["param_groups"][0].update({_SCATTER: list(orders.scatter), _WORK: list(orders.work)})
    return joined


def read_states(
    state_dict: Mapping[str, Any], parts: Mapping[str, StepPart]
) -> tuple[list[dict[str, Any]], Exception | None]:
    """What each part loads, and why some part cannot, if so."""
    try:
        halves = split_state(state_dict, parts)
    except ValueError as error:
        return [], error
    except (KeyError, TypeError, AttributeError) as error:
        return [], ValueError(f"OverlappedStep: the state cannot be read ({type(error).__name__}: {error})")
    faults = (find_state_fault(part, one) for part, one in zip(parts.values(), halves, strict=True))
    return halves, next((fault for fault in faults if fault is not None), None)


def split_state(
    state_dict: Mapping[str, Any], parts: Mapping[str, torch.optim.Optimizer]
) -> list[dict[str, Any]]:  # fmt: skip
    """What each part loads. Numbers of groups and parameters are compared before any part loads anything."""
    groups = [dict(group) for group in state_dict["param_groups"]]
    wanted = sum(len(part.param_groups) for part in parts.values())
    if len(groups) != wanted:
        raise ValueError(f"OverlappedStep: the state has {len(groups)} parameter groups, the parts have {wanted}")
    found, first = [], 0
    for name, part in parts.items():
        own = groups[first : first + len(part.param_groups)]
        first += len(part.param_groups)
        for at, (group, now) in enumerate(zip(own, part.param_groups, strict=True)):
            group.pop(_SCATTER, None), group.pop(_WORK, None)
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


def read_orders(state_dict: Mapping[str, Any]) -> Orders | None:
    """The orders that were saved, if any were."""
    first = state_dict["param_groups"][0]
    if _SCATTER not in first or _WORK not in first:
        return None
    return Orders(tuple(first[_SCATTER]), tuple(first[_WORK]))
