"""Between the state that owners hold and the state as checkpoints hold it: whole tensors, cut into rows over the ranks.

A tensor of the state goes from its owner to the ranks of the last of its axes, ceil(rows / P) to each (and the same on
the other axes), which is what a DTensor with ``Shard(0)`` and `torch.distributed.checkpoint` know; loading is the way
back. The moments of DTensor parameters that AdamW steps lie as the parameter does. Bases and roots are not saved: the
factors give the same bits again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from weft.optim.matrix.plan import Plan
from weft.optim.owners import Averaged, Owners, Replicated, Role, Route, Sharded
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

Given = Sequence[Mapping[str, Any] | None]


def save_tensors(
    parameters: Sequence[Tensor], plans: Mapping[Tensor, Plan], state: Mapping[Tensor, dict[str, Any]]
) -> list[dict[str, Any]]:
    """The state of each parameter as a checkpoint holds it. Every rank must call it."""
    saved = [{"step": state[parameter]["step"].clone()} for parameter in parameters]
    items = [(index, plans[parameter], name) for index, parameter in enumerate(parameters)
             for name in plans[parameter].layout]  # fmt: skip
    wholes = _join([(plan, state[parameters[index]].get(name)) for index, plan, name in items])
    for owners, some in _by_owners([plan.everywhere for _, plan, _ in items]):
        routes = [_row_route(items[at][1], items[at][2]) for at in some]
        pieces = owners.scatter("REKLS.state_dict", routes, [wholes[at] for at in some]).wait()
        for at, route, piece in zip(some, routes, pieces, strict=True):
            index, plan, name = items[at]
            assert piece is not None
            shape = _saved_shape(parameters[index], plan, name)
            saved[index][name] = _as_saved(parameters[index], plan, route, piece, shape)
    return saved


def load_tensors(
    parameters: Sequence[Tensor], plans: Mapping[Tensor, Plan], given: Given
) -> list[dict[str, Any]]:  # fmt: skip
    """The state of each parameter, which was checked, as this rank holds it. Every rank must call it."""
    items = [(index, plans[parameter], name) for index, parameter in enumerate(parameters)
             for name in plans[parameter].layout if given[index] is not None]  # fmt: skip
    wholes: list[Tensor | None] = [None] * len(items)
    for owners, some in _by_owners([plan.everywhere for _, plan, _ in items]):
        routes = [_row_route(items[at][1], items[at][2]) for at in some]
        pieces = [
            _as_loaded(parameters[items[at][0]], items[at][1], route, given[items[at][0]][items[at][2]])  # type: ignore[index]
            for at, route in zip(some, routes, strict=True)
        ]
        for at, whole in zip(some, owners.gather("REKLS.load", routes, pieces).wait(), strict=True):
            wholes[at] = whole
    held = _cut([(plan, whole) for (_, plan, _), whole in zip(items, wholes, strict=True)])
    states = []
    for parameter, values in zip(parameters, given, strict=True):
        step = first_count().fill_(0.0 if values is None else float(values["step"]))
        state = {"step": step} if values is not None else {"step": step, **plans[parameter].fresh(parameter.device)}
        states.append(state)
    for (index, _, name), tensor in zip(items, held, strict=True):
        if tensor is not None:
            states[index][name] = tensor
    for parameter, values, state in zip(parameters, given, states, strict=True):
        if values is not None and plans[parameter].is_mine:
            plans[parameter].rule.derive(state)
    return states


def check_tensors(parameter: Tensor, plan: Plan, values: Mapping[str, Any] | None) -> None:
    """Refuse what is missing, too much, or has another shape."""
    if values is None:
        return
    wanted = {"step", *plan.layout}
    if set(values) != wanted:
        raise ValueError(
            f"REKLS: the state of {plan.name} has {', '.join(sorted(values))}, but {', '.join(sorted(wanted))} are "
            f"needed; was it saved with another variant, algorithm or max_factor_dim?"
        )
    for name in plan.layout:
        shape = _saved_shape(parameter, plan, name)
        if tuple(values[name].shape) != shape:
            raise ValueError(
                f"REKLS: {name} of {plan.name} is {list(values[name].shape)} in the state, not {list(shape)}"
            )


def _saved_shape(parameter: Tensor, plan: Plan, name: str) -> tuple[int, ...]:
    """The shape a checkpoint has of a tensor of the state: that of the whole parameter, for moments of AdamW."""
    if plan.has_factors:
        return plan.layout[name][0]
    if is_dtensor(parameter) or parameter.ndim == 0:
        return tuple(parameter.shape)
    return plan.placement.whole if parameter.ndim <= 2 else (plan.placement.whole[0], *parameter.shape[1:])


def _row_route(plan: Plan, name: str) -> Route:
    """How a tensor of the state lies on all ranks in a checkpoint."""
    shape, dtype = plan.layout[name]
    owners = plan.everywhere
    if not plan.has_factors:
        shape = plan.placement.whole
    roles: list[Role] = [Replicated()] * len(owners.axes)
    if shape and owners.axes and has_process_group(owners.axes[-1]):
        roles[-1] = Sharded(0, _chunks(shape[0], owners.axes[-1].size))
    return Route(shape, tuple(roles), plan.home, dtype, plan.route.device)


def _chunks(rows: int, ranks: int) -> tuple[int, ...]:
    """ceil(rows / ranks) on each rank as far as they go, as torch cuts."""
    each = -(-rows // ranks)
    return tuple(max(0, min(each, rows - rank * each)) for rank in range(ranks))


def _as_saved(parameter: Tensor, plan: Plan, route: Route, piece: Tensor, shape: tuple[int, ...]) -> Tensor:
    if not plan.has_factors and is_dtensor(parameter):
        return like_parameter(parameter, piece.reshape(local_of(parameter).shape))
    if not any(isinstance(role, Sharded) for role in route.roles):
        return piece.reshape(shape)
    return as_dtensor(plan.everywhere.axes[-1], piece.reshape(len(piece), *shape[1:]), shape[0])


def _as_loaded(parameter: Tensor, plan: Plan, route: Route, value: Tensor) -> Tensor:
    """This rank's piece of what a checkpoint holds: a DTensor on any ranks, or a whole tensor."""
    if not plan.has_factors and is_dtensor(parameter):
        piece = local_part(value, parameter)
    else:
        here = rows_here(plan.everywhere.axes[-1], value) if plan.everywhere.axes else None
        role = route.roles[-1] if route.roles else None
        if not isinstance(role, Sharded):
            piece = whole_of(value)
        elif here is not None:
            piece = here
        else:
            rank = plan.everywhere.here[-1]
            piece = whole_of(value).narrow(0, sum(role.sizes[:rank]), role.sizes[rank])
    shape = route.whole
    for rank, role in zip(plan.everywhere.here, route.roles, strict=True):
        shape = role.shape_on(rank, shape)
    return piece.to(device=route.device, dtype=route.dtype).reshape(shape)


def _by_owners(chosen: Sequence[Owners]) -> list[tuple[Owners, list[int]]]:
    """Indices of those that lie on the same ranks together, in the order of the first of each."""
    groups: dict[int, tuple[Owners, list[int]]] = {}
    for index, owners in enumerate(chosen):
        groups.setdefault(id(owners), (owners, []))[1].append(index)
    return list(groups.values())


def _part_route(plan: Plan) -> Route:
    """How moments of AdamW lie on all ranks between steps: as the parameter, in the row of their owner."""
    roles = tuple(Replicated() if isinstance(role, Averaged) else role for role in plan.placement.roles)
    return Route(plan.placement.whole, roles, plan.home, plan.wide, plan.route.device)


def _join(held: Sequence[tuple[Plan, Tensor | None]]) -> list[Tensor | None]:
    """Whole tensors at their homes, None elsewhere: what AdamW keeps on several ranks is put together."""
    return _between(held, lambda owners, routes, tensors: owners.gather("REKLS.join", routes, tensors).wait())


def _cut(held: Sequence[tuple[Plan, Tensor | None]]) -> list[Tensor | None]:
    """The opposite of `_join`."""
    pieces = _between(held, lambda owners, routes, tensors: owners.scatter("REKLS.cut", routes, tensors).wait())
    return [piece if plan.is_mine else None for (plan, _), piece in zip(held, pieces, strict=True)]


def _between(held: Sequence[tuple[Plan, Tensor | None]], move: Any) -> list[Tensor | None]:
    found = [tensor for _, tensor in held]
    parts = [index for index, (plan, _) in enumerate(held) if not plan.has_factors]
    for owners, some in _by_owners([held[index][0].everywhere for index in parts]):
        chosen = [parts[at] for at in some]
        moved = move(owners, [_part_route(held[index][0]) for index in chosen], [found[index] for index in chosen])
        for index, tensor in zip(chosen, moved, strict=True):
            found[index] = tensor
    return found
