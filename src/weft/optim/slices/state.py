"""Between flat slices of a state and whole tensors, as checkpoints and torch.optim.AdamW have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from weft.comm import Axis
from weft.comm.call import exchange_coalesced
from weft.optim.slices.layout import Range, row_ranges
from weft.parallel.dtensor import as_dtensor, has_process_group, rows_here, whole_of

Ranges = Mapping[Tensor, list[Range]]  # of each parameter: the slice of each rank
Given = Sequence[Mapping[str, Any] | None]


@dataclass(frozen=True)
class _Options:
    """What the ranks must have in common when they exchange ranges."""

    tensors: int


def _saved_ranges(axis: Axis, parameter: Tensor) -> list[Range] | None:
    """The rows of each rank in a checkpoint; None where every rank gets the whole."""
    cut = axis.size > 1 and parameter.ndim > 0 and has_process_group(axis)
    return row_ranges(parameter.shape, axis.size) if cut else None


def save_slices(axis: Axis, ranges: Ranges, state: Mapping[Tensor, dict[str, Any]]) -> list[dict[str, Any]]:
    """The state of each parameter of ``ranges``, its slices put together. Every rank must call it."""
    saved = [{"step": state[parameter]["step"].clone()} for parameter in ranges]
    items = [
        (at, parameter, name) for at, parameter in enumerate(ranges) for name in state[parameter] if name != "step"
    ]
    found = [state[parameter][name] for _, parameter, name in items]
    rows = [_saved_ranges(axis, parameter) for _, parameter, _ in items]
    if axis.size > 1:
        before = [ranges[parameter] for _, parameter, _ in items]
        after = [some or [(0, item[1].numel())] * axis.size for some, item in zip(rows, items, strict=True)]
        found = _reshard(axis, "ShardedAdamW.state_dict", found, before, after)
    for (at, parameter, name), some, flat in zip(items, rows, found, strict=True):
        shape, length = parameter.shape, parameter.shape[1:].numel()
        if some is None:
            saved[at][name] = flat.view(shape)
        else:
            block = flat.view(flat.numel() // length if length else 0, *shape[1:])
            saved[at][name] = as_dtensor(axis, block, shape[0])
    return saved


def check_slices(names: Mapping[Tensor, str], state: Mapping[Tensor, dict[str, Any]], given: Given) -> None:
    """Refuse what is missing or has another shape. A state of torch's AdamW has no masters."""
    for (parameter, label), values in zip(names.items(), given, strict=True):
        if values is None:
            continue
        float(values["step"])
        for name in state[parameter]:
            if name != "step" and (name in values or name != "master"):
                found = list(values[name].shape) if name in values else "missing"
                if found != list(parameter.shape):
                    raise ValueError(
                        f"ShardedAdamW: {name} of {label} is {found} in the state, not {list(parameter.shape)}"
                    )


def load_slices(axis: Axis, ranges: Ranges, fresh: list[dict[str, Any]], given: Given) -> list[dict[str, Any]]:
    """``fresh`` states with what was ``given`` and checked, cut into this rank's slices."""
    moved: list[tuple[dict[str, Any], str, Tensor]] = []  # rows that other ranks have slices of
    before, after = list[list[Range]](), list[list[Range]]()
    for parameter, state, values in zip(ranges, fresh, given, strict=True):
        if values is None:
            continue
        for name in [name for name in state if name != "step" and name in values]:  # weights stand in for a master
            rows = _saved_ranges(axis, parameter)
            here = None if rows is None else rows_here(axis, values[name])
            if rows is None or here is None:
                state[name].copy_(whole_of(values[name]).reshape(-1)[slice(*ranges[parameter][axis.rank])])
            else:
                moved.append((state, name, here.reshape(-1).to(state[name])))
                before.append(rows)
                after.append(ranges[parameter])
        state["step"].fill_(float(values["step"]))
    if moved:
        slices = _reshard(axis, "ShardedAdamW.load", [flat for _, _, flat in moved], before, after)
        for (state, name, _), flat in zip(moved, slices, strict=True):
            state[name] = flat
    return fresh


def _reshard(
    axis: Axis, name: str, mine: Sequence[Tensor], before: Sequence[list[Range]], after: Sequence[list[Range]]
) -> list[Tensor]:
    """Of each tensor the range ``after[rank]`` of this rank, made of what the ranks hold: rank r has ``before[r]``.

    ``mine`` are this rank's ranges, flat. What is needed travels, in one exchange.
    """
    call = axis.begin(name, _Options(len(mine)))
    sends: dict[int, list[Tensor]] = {rank: [] for rank in call.others}
    receives: dict[int, list[Tensor]] = {rank: [] for rank in call.others}
    found = []
    for tensor, held, wanted in zip(mine, before, after, strict=True):
        start, stop = wanted[axis.rank]
        own = held[axis.rank][0]
        out = tensor.new_empty(stop - start)
        for rank in range(axis.size):
            low, high = _overlap(held[rank], wanted[axis.rank])
            if rank == axis.rank:
                out[low - start : high - start] = tensor[low - own : high - own]
            elif low < high:
                receives[rank].append(out[low - start : high - start])
            low, high = _overlap(held[axis.rank], wanted[rank])
            if rank != axis.rank and low < high:
                sends[rank].append(tensor[low - own : high - own])
        found.append(out)
    coalesced = ([(rank, some) for rank, some in side.items() if some] for side in (sends, receives))
    exchange_coalesced(call, *coalesced).wait()
    return found


def _overlap(one: Range, other: Range) -> Range:
    low = max(one[0], other[0])
    return low, max(low, min(one[1], other[1]))
