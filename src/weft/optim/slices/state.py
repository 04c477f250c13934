"""Between flat slices of a state and whole tensors, as checkpoints and torch.optim.AdamW have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from weft.comm import Axis
from weft.optim.slices.layout import Range, row_ranges, trade
from weft.parallel.dtensor import as_dtensor, has_process_group, rows_here, whole_of

Ranges = Mapping[Tensor, list[Range]]


def _saved_ranges(axis: Axis, parameter: Tensor) -> list[Range] | None:
    """The rows of each rank in a checkpoint; None where every rank gets the whole."""
    cut = axis.size > 1 and parameter.ndim > 0 and has_process_group(axis)
    return row_ranges(parameter.shape, axis.size) if cut else None


def save_slices(
    axis: Axis, parameters: Sequence[Tensor], ranges: Ranges, state: Mapping[Tensor, dict[str, Any]]
) -> list[dict[str, Any]]:
    """The state of each parameter, its slices put together. Every rank must call it."""
    saved = [{"step": state[parameter]["step"].clone()} for parameter in parameters]
    items = [(at, name) for at, parameter in enumerate(parameters) for name in state[parameter] if name != "step"]
    after = [
        _saved_ranges(axis, parameters[at]) or [(0, parameters[at].numel())] * axis.size for at, _ in items
    ]  # fmt: skip
    mine = [state[parameters[at]][name] for at, name in items]
    found = mine if axis.size == 1 else trade(
        axis, "ShardedAdamW.state_dict", mine, [ranges[parameters[at]] for at, _ in items], after
    )  # fmt: skip
    for (at, name), flat in zip(items, found, strict=True):
        shape = parameters[at].shape
        if _saved_ranges(axis, parameters[at]) is None:
            saved[at][name] = flat.view(shape)
        else:
            length = shape[1:].numel()
            block = flat.view(flat.numel() // length if length else 0, *shape[1:])
            saved[at][name] = as_dtensor(axis, block, shape[0])
    return saved


def check_slices(
    parameters: Sequence[Tensor], names: Mapping[Tensor, str], state: Mapping[Tensor, dict[str, Any]],
    given: Sequence[Mapping[str, Any] | None],
) -> None:  # fmt: skip
    """Refuse what is missing or has another shape. A state of torch's AdamW has no masters."""
    for parameter, values in zip(parameters, given, strict=True):
        for name in state[parameter] if values is not None else ():
            assert values is not None
            if name == "step":
                float(values[name])
            elif name in values or name != "master":
                found = list(values[name].shape) if name in values else "missing"
                if found != list(parameter.shape):
                    raise ValueError(
                        f"ShardedAdamW: {name} of {names[parameter]} is {found} in the state, not "
                        f"{list(parameter.shape)}"
                    )


def load_slices(
    axis: Axis, parameters: Sequence[Tensor], ranges: Ranges, fresh: list[dict[str, Any]],
    given: Sequence[Mapping[str, Any] | None],
) -> list[dict[str, Any]]:  # fmt: skip
    """``fresh`` states with what was ``given`` and checked, cut into this rank's slices."""
    items = [
        (at, name, values[name]) for at, values in enumerate(given) if values is not None
        for name in fresh[at] if name != "step" and name in values  # without a master the weights are what there is
    ]  # fmt: skip
    trading: list[tuple[int, str, Tensor]] = []
    for at, name, value in items:
        target = fresh[at][name]
        here = rows_here(axis, value) if _saved_ranges(axis, parameters[at]) is not None else None
        if here is not None:
            trading.append((at, name, here.reshape(-1).to(target)))
        else:
            start, stop = ranges[parameters[at]][axis.rank]
            target.copy_(whole_of(value).reshape(-1)[start:stop])
    if trading:
        before = [row_ranges(parameters[at].shape, axis.size) for at, _, _ in trading]
        after = [ranges[parameters[at]] for at, _, _ in trading]
        slices = trade(axis, "ShardedAdamW.load", [flat for _, _, flat in trading], before, after)
        for (at, name, _), flat in zip(trading, slices, strict=True):
            fresh[at][name] = flat
    for state, values in zip(fresh, given, strict=True):
        if values is not None:
            state["step"].fill_(float(values["step"]))
    return fresh
