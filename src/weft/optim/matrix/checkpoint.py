"""Between the state that owners hold and the state as checkpoints hold it: whole tensors, cut into rows over the ranks.

A tensor of the state goes from its owner to the ranks of the last of its axes, ceil(rows / P) to each (and the same on
the other axes), which is what a DTensor with ``Shard(0)`` and `torch.distributed.checkpoint` know; loading is the way
back. The moments of DTensor parameters that AdamW steps lie as the parameter does. What a rule makes of its state is
saved only where it may be older than that state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.optim.matrix.plan import Plan
from weft.optim.matrix.rule import Settings
from weft.optim.owners import Held, Owners, Replicated, Role, Route, Sharded, Transfer
from weft.optim.step.state import first_count
from weft.parallel.dtensor import (
    as_dtensor,
    has_process_group,
    is_dtensor,
    like_parameter,
    local_of,
    local_part,
    rows_here,
    whole_of,
)

Plans = Mapping[Tensor, Sequence[Plan]]


class _Item(NamedTuple):
    """A tensor of the state of the ``at``-th parameter."""

    at: int
    parameter: Tensor
    plan: Plan
    name: str

    @property
    def key(self) -> str:
        """Its name among all tensors of the parameter's state."""
        return self.name + self.plan.suffix

    @property
    def shape_and_dtype(self) -> tuple[tuple[int, ...], torch.dtype]:
        return (self.plan.layout | self.plan.kept)[self.name]


def save_tensors(
    label: str, plans: Plans, state: Mapping[Tensor, dict[str, Any]], settings: Mapping[Tensor, Settings]
) -> list[dict[str, Any]]:
    """The state of each parameter as a checkpoint holds it. Every rank must call it."""
    saved = [{"step": state[parameter]["step"].clone()} for parameter in plans]
    items = [
        _Item(at, parameter, plan, name)
        for at, (parameter, some) in enumerate(plans.items())
        for plan in some
        for name in (*plan.layout, *(plan.kept if settings[parameter].keeps_roots else ()))
    ]
    held = [state[item.parameter].get(item.key) for item in items]
    _move(Owners.gather, f"{label}.join", items, _state_routes(items), held)
    rows = [_row_route(item) for item in items]
    _move(Owners.scatter, f"{label}.state_dict", items, rows, held)
    for item, route, piece in zip(items, rows, held, strict=True):
        assert piece is not None
        saved[item.at][item.key] = _as_saved(item, route, piece)
    return saved


def load_tensors(label: str, plans: Plans, given: Sequence[Mapping[str, Any] | None]) -> list[dict[str, Any]]:
    """The state of each parameter, which was checked, as this rank holds it. Every rank must call it."""
    states: list[dict[str, Any]] = []
    items: list[_Item] = []
    rows: list[Route] = []
    held: Held = []
    for at, ((parameter, some), values) in enumerate(zip(plans.items(), given, strict=True)):
        states.append({"step": first_count()})
        if values is None:
            for plan in some:
                states[at] |= plan.fresh(parameter.device)
            continue
        states[at]["step"].fill_(float(values["step"]))
        for plan in some:
            for name in (*plan.layout, *(plan.kept if _has_kept(plan, values) else ())):
                items.append(_Item(at, parameter, plan, name))
                rows.append(_row_route(items[-1]))
                held.append(_as_loaded(items[-1], rows[-1], values[items[-1].key]))
    _move(Owners.gather, f"{label}.load", items, rows, held)
    _move(Owners.scatter, f"{label}.cut", items, _state_routes(items), held)
    for item, tensor in zip(items, held, strict=True):
        if item.plan.is_mine and tensor is not None:
            kept = item.name in item.plan.kept
            states[item.at][item.key] = item.plan.rule.laid_out(item.name, tensor) if kept else tensor
    for some, values, state in zip(plans.values(), given, states, strict=True):
        for plan in some:
            if values is not None and plan.is_mine and not _has_kept(plan, values):
                own = plan.state_of(state)
                plan.rule.derive(own, tuple(plan.turns))
                state |= plan.saved({name: own[name] for name in plan.kept})
    return states


def _has_kept(plan: Plan, values: Mapping[str, Any]) -> bool:
    """Whether a saved state has what is made of the other tensors; else it is made anew."""
    return all(name + plan.suffix in values for name in plan.kept)


def check_tensors(label: str, plans: Plans, given: Sequence[Mapping[str, Any] | None]) -> None:
    """Refuse what is missing, too much, or has another shape."""
    for (parameter, some), values in zip(plans.items(), given, strict=True):
        if values is None:
            continue
        wanted = {"step", *(name + plan.suffix for plan in some for name in plan.layout)}
        known = wanted | {name + plan.suffix for plan in some for name in plan.kept}
        if not wanted <= set(values) <= known:
            found, needed = ", ".join(sorted(values)), ", ".join(sorted(wanted))
            raise ValueError(
                f"{label}: the state of {some[0].name} has {found}, but {needed} are needed; was it saved with another "
                f"variant, algorithm or max_factor_dim?"
            )
        items = [_Item(0, parameter, plan, name) for plan in some for name in (*plan.layout, *plan.kept)]
        for item in (item for item in items if item.key in values):
            shape = _saved_shape(item)
            if tuple(values[item.key].shape) != shape:
                raise ValueError(
                    f"{label}: {item.name} of {item.plan.name} is {list(values[item.key].shape)} in the state, not "
                    f"{list(shape)}"
                )


def _move(
    move: Callable[..., Transfer], name: str, items: Sequence[_Item], routes: Sequence[Route | None], held: Held
) -> None:
    """Gather or scatter what is held of items, in place, where they have routes: one exchange for the same ranks."""
    by_ranks: dict[int, list[int]] = {}
    for at, (item, route) in enumerate(zip(items, routes, strict=True)):
        if route is not None:
            by_ranks.setdefault(id(item.plan.everywhere), []).append(at)
    for some in by_ranks.values():
        owners = items[some[0]].plan.everywhere
        moved = move(owners, name, [routes[at] for at in some], [held[at] for at in some]).wait()
        for at, tensor in zip(some, moved, strict=True):
            held[at] = tensor


def _state_routes(items: Sequence[_Item]) -> list[Route | None]:
    """Between its whole at its home and how the ranks hold it, for what they hold in parts."""
    return [item.plan.state_route if item.plan.is_split else None for item in items]


def _row_route(item: _Item) -> Route:
    """How a tensor of the state lies on all ranks in a checkpoint."""
    plan, axes = item.plan, item.plan.everywhere.axes
    shape, dtype = item.shape_and_dtype
    if plan.is_split:
        shape = plan.placement.whole
    roles: list[Role] = [Replicated()] * len(axes)
    if shape and axes and has_process_group(axes[-1]):
        each = -(-shape[0] // axes[-1].size)  # as far as rows go, as torch cuts
        roles[-1] = Sharded(0, tuple(max(0, min(each, shape[0] - rank * each)) for rank in range(axes[-1].size)))
    return Route(shape, tuple(roles), plan.home, dtype, plan.route.device)


def _saved_shape(item: _Item) -> tuple[int, ...]:
    """The shape a checkpoint has of a tensor of the state: that of the whole parameter, for moments of AdamW."""
    parameter, plan = item.parameter, item.plan
    if not plan.is_split:
        return item.shape_and_dtype[0]
    if is_dtensor(parameter) or parameter.ndim == 0:
        return tuple(parameter.shape)
    return plan.placement.whole if parameter.ndim <= 2 else (plan.placement.whole[0], *parameter.shape[1:])


def _as_saved(item: _Item, route: Route, piece: Tensor) -> Tensor:
    """This rank's piece as what a checkpoint holds: a DTensor, or a whole tensor."""
    if item.plan.is_split and is_dtensor(item.parameter):
        return like_parameter(item.parameter, piece.reshape(local_of(item.parameter).shape))
    shape = _saved_shape(item)
    if not any(isinstance(role, Sharded) for role in route.roles):
        return piece.reshape(shape)
    return as_dtensor(item.plan.everywhere.axes[-1], piece.reshape(len(piece), *shape[1:]), shape[0])


def _as_loaded(item: _Item, route: Route, value: Tensor) -> Tensor:
    """This rank's piece of what a checkpoint holds: a DTensor on any ranks, or a whole tensor."""
    here, role = item.plan.everywhere.here, route.roles[-1] if route.roles else None
    if item.plan.is_split and is_dtensor(item.parameter):
        piece = local_part(value, item.parameter)
    elif not isinstance(role, Sharded):
        piece = whole_of(value)
    elif (rows := rows_here(item.plan.everywhere.axes[-1], value)) is not None:
        piece = rows
    else:
        piece = whole_of(value).narrow(0, sum(role.sizes[: here[-1]]), role.sizes[here[-1]])
    shape = route.whole
    for rank, one in zip(here, route.roles, strict=True):
        shape = one.shape_on(rank, shape)
    return piece.to(device=route.device, dtype=route.dtype).reshape(shape)
