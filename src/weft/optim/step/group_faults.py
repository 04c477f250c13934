"""What every optimizer demands of the numbers of a parameter group and of its own options."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from weft.comm.arguments import at, find_choice_fault, find_number_fault, read, show

ON_NONFINITE = ("raise", "skip")


def find_kind_fault(optimizer: str, group: dict[str, Any], *names: str) -> Exception | None:
    """What in a group is no number: ``lr`` (a tensor of one element, too), ``betas`` (two of them) and ``names``."""
    for name in ("lr", *names):
        if fault := find_number_fault(optimizer, name, group.get(name), None, allow="any", tensor=name == "lr"):
            return fault
    betas = group.get("betas")
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        return TypeError(f"{optimizer}: betas must be two numbers, got {show(betas)}")
    return next(filter(None, (find_number_fault(optimizer, "betas", beta, None, allow="any") for beta in betas)), None)


def first_group_fault(
    optimizer: str, groups: Iterable[dict[str, Any]], find: Callable[[dict[str, Any]], Exception | None], rank: int
) -> Exception | None:
    """The first fault that ``find(group)`` gives, with the rank that found it."""
    for group in groups:
        if (fault := read(optimizer, rank, lambda group=group: find(group))) is not None:  # type: ignore[misc]
            return fault if str(fault).endswith(at(rank)) else type(fault)(f"{fault}{at(rank)}")
    return None


def find_option_fault(optimizer: str, on_nonfinite: object, clip: object, rank: int | None = None) -> Exception | None:
    """What is wrong with ``on_nonfinite`` and ``clip``."""
    if fault := find_choice_fault(optimizer, "on_nonfinite", on_nonfinite, rank, ON_NONFINITE):
        return fault
    if clip is None:
        return None
    if fault := find_number_fault(optimizer, "clip", clip, rank, allow="infinite"):
        return fault
    return None if float(clip) > 0 else ValueError(f"{optimizer}: clip must be > 0, got {clip}{at(rank)}")  # type: ignore[arg-type]


def list_params(optimizer: str, params: Any, rank: int) -> list[Any] | Exception:
    """``params`` as a list, or what torch's optimizers say of what is none."""
    if isinstance(params, Tensor):
        return TypeError(f"{optimizer}: params must be an iterable of tensors or groups, got one tensor{at(rank)}")
    listed = read(optimizer, rank, lambda: list(params))
    if isinstance(listed, Exception):
        return TypeError(f"{optimizer}: params must be an iterable of tensors or groups, got {show(params)}{at(rank)}")
    return listed or ValueError(f"{optimizer}: params are empty{at(rank)}")
