"""Where the parameters of a group lie on the ranks, which rule steps each of them, and which rank does that work.

Placements are read from DTensors, said by ``partition_dim``, and made of the shapes that ranks gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from weft.comm import Axis
from weft.optim.matrix import exact, stable
from weft.optim.matrix.rule import AdamW, Layout, Rule, Settings
from weft.optim.owners import Averaged, Owners, Place, Replicated, Role, Route, Sharded
from weft.optim.step.compare import gather_verdict
from weft.parallel.dtensor import is_dtensor, local_of, mesh_axes

RULES: dict[str, Rule] = {"exact": exact, "stable": stable}
Cuts = list[tuple[Axis, int | None]]  # the axes a parameter lies on, and the dimension it is cut along on each


@dataclass(frozen=True)
class Placement:
    """A parameter, seen as a matrix or a vector, over the ranks.

    ``whole`` is its shape, ``local`` that of this rank's part; ``roles[i]`` says how it lies on ``axes[i]``, each of
    more than one rank, in the order in which pieces are put together.
    """

    whole: tuple[int, ...]
    local: tuple[int, ...]
    axes: tuple[Axis, ...] = ()
    roles: tuple[Role, ...] = ()

    @property
    def whole_over(self) -> list[Axis]:
        """The axes on which it is the same, or averaged."""
        return [axis for axis, role in zip(self.axes, self.roles, strict=True) if not isinstance(role, Sharded)]


@dataclass(frozen=True)
class _Options:
    """What the ranks must have in common when a group is added."""

    dtypes: tuple[str, ...]
    dims: tuple[str, ...]
    settings: str


def find_placements(
    parameters: Sequence[Tensor], group: dict[str, Any], tensor_axis: Axis, data_axis: Axis | None,
    fault: Exception | None,
) -> tuple[list[Placement], list[Axis]]:  # fmt: skip
    """Where each parameter lies, and all axes that anything lies on.

    Ranks gather the shapes they hold, once for each axis; ``fault`` is raised on all.
    """
    all_cuts: list[Cuts] = []
    for number, parameter in enumerate(parameters):
        try:
            all_cuts.append(_cuts(number, parameter, group, tensor_axis))
        except NotImplementedError as error:
            fault, all_cuts = fault or error, all_cuts + [[]]
    shapes = [_matrix_shape(local_of(parameter)) for parameter in parameters]
    found = [Placement(shape, shape) for shape in shapes]
    axes = [] if data_axis is None or data_axis.size == 1 else [data_axis]
    if tensor_axis.size > 1 and not all(is_dtensor(parameter) for parameter in parameters):
        axes.append(tensor_axis)
    for number, (parameter, cuts) in enumerate(zip(parameters, all_cuts, strict=True)):
        lies_on = [axis for axis, _ in (mesh_axes(parameter) if is_dtensor(parameter) else cuts)]
        axes += [axis for axis in lies_on if axis.size > 1 and axis not in axes]
        if [axis for axis in axes if any(axis is own for own, _ in cuts)] != [axis for axis, _ in cuts]:
            fault = fault or NotImplementedError(
                f"REKLS: parameter {number} is cut along the axes of its mesh in another order than the parameters "
                f"before it; put it into an optimizer of its own (rank {tensor_axis.rank})"
            )
    settings = {name: group[name] for name in sorted(group) if name not in ("params", "param_names", "lr")}
    options = _Options(
        tuple(f"{parameter.dtype} on {parameter.device.type}" for parameter in parameters),
        tuple(str([dim for _, dim in cuts]) for cuts in all_cuts),
        "" if fault else str(settings),  # what is at fault may not even be shown
    )

    def merge(axis: Axis, gathered: list[tuple[int, ...]]) -> list[int]:
        for index, placement in enumerate(found):
            rows = [numbers[2 * index : 2 * index + 2] for numbers in gathered]
            dims = [dim for own, dim in all_cuts[index] if own is axis]
            if axis is data_axis:
                found[index] = _extend(index, placement, axis, Averaged(), None, rows)
            elif dims:
                found[index] = _extend(index, placement, axis, Replicated(), dims[0], rows)
        return [number for placement in found for number in _pair(placement.whole)]

    numbers = [number for shape in shapes for number in _pair(shape)]
    gather_verdict(axes, "REKLS.add_param_group", options, numbers, merge, fault)
    return found, axes


def _extend(
    number: int, placement: Placement, axis: Axis, role: Role, dim: int | None, rows: list[tuple[int, ...]]
) -> Placement:
    """The placement with one more axis, whose ranks hold matrices of the shapes ``rows``: cut along ``dim``, if any."""
    alike = [tuple(size for at, size in enumerate(row) if at != dim) for row in rows]
    if any(one != alike[0] for one in alike):
        kind = f"is cut along dimension {dim} over" if dim is not None else "must have one shape on all"
        shown = "; ".join(f"{list(row)} on rank {rank}" for rank, row in enumerate(rows))
        raise ValueError(f"REKLS: parameter {number} {kind} {axis.size} ranks, but is {shown}")
    whole = placement.whole
    if dim is not None:
        role = Sharded(dim, tuple(row[dim] for row in rows))
        whole = (*whole[:dim], sum(role.sizes), *whole[dim + 1 :])
    return Placement(whole, placement.local, (*placement.axes, axis), (*placement.roles, role))


def is_matrix(parameter: Tensor, group: dict[str, Any]) -> bool:
    """Whether the group's rule steps a parameter; the others are stepped by AdamW."""
    return parameter.ndim >= 2 and group["algorithm"] == "rekls"


def _matrix_shape(local: Tensor) -> tuple[int, ...]:
    """A rank's part as a vector or a matrix: further dimensions are joined to the second."""
    return (local.numel(),) if local.ndim < 2 else (local.shape[0], local.shape[1:].numel())


def _cuts(number: int, parameter: Tensor, group: dict[str, Any], tensor_axis: Axis) -> Cuts:
    """Of a parameter; a data axis, on which it is whole, is not among them."""
    if is_dtensor(parameter) and not is_matrix(parameter, group):
        return []  # every rank steps its own elements
    cuts = mesh_axes(parameter) if is_dtensor(parameter) else [(tensor_axis, group["partition_dim"])]
    if parameter.ndim > 2 and any(dim is not None and dim > 0 for _, dim in cuts):
        raise NotImplementedError(
            f"REKLS: parameter {number} {list(parameter.shape)} is flattened and cut along another dimension than the "
            f"first (rank {tensor_axis.rank}); shard it along dimension 0"
        )
    return [(axis, dim) for axis, dim in cuts if axis.size > 1]


def _pair(shape: tuple[int, ...]) -> list[int]:
    """A shape as two integers."""
    return [shape[0], shape[1] if len(shape) > 1 else 0]


@dataclass(frozen=True)
class Plan:
    """One parameter: how it lies on the ranks, which of them steps it, and how pieces get there and back.

    ``owners`` are the ranks its gradient travels over, ``route`` its way. A matrix travels over all ranks it lies on;
    what AdamW steps only over those where it is averaged. ``everywhere`` are all ranks it lies on, and ``home`` the one
    of them that a checkpoint's tensors come from. ``layout`` has the shape and dtype of each tensor that is saved.
    """

    name: str
    rule: Rule
    placement: Placement
    owners: Owners
    route: Route
    everywhere: Owners
    home: Place
    layout: Layout
    replicated: bool  # over the tensor axis, as a plain tensor: its gradients must be the same there
    elements: int  # of the whole, the same on every rank

    @property
    def wide(self) -> torch.dtype:
        """The dtype of the state and of the work."""
        return self.route.dtype

    @property
    def is_split(self) -> bool:
        """Whether each rank steps the elements that lie there, by AdamW, and so has the state of these alone."""
        return self.rule is AdamW

    @property
    def is_mine(self) -> bool:
        """Whether this rank does the work."""
        return self.owners.here == self.route.owner

    @property
    def weight_route(self) -> Route:
        return replace(self.route, roles=_unaveraged(self.route.roles))

    @property
    def state_route(self) -> Route:
        """Of what is split: how its state lies on all ranks between steps, in the row of its owner."""
        return replace(self.route, whole=self.placement.whole, roles=_unaveraged(self.placement.roles), owner=self.home)

    def fresh(self, device: torch.device) -> dict[str, Any]:
        """The state before the first step, where this rank does the work."""
        if not self.is_mine:
            return {}
        state = {name: torch.zeros(shape, dtype=dtype, device=device) for name, (shape, dtype) in self.layout.items()}
        self.rule.derive(state, zero=True)
        return state

    def counts_here(self, parameter: Tensor, axes: Sequence[Axis]) -> bool:
        """Whether what this rank works on counts in a norm over ``axes``: each element of a parameter does so once.

        It has one owner on the axes it travels over. On others it is cut, or the same: then the first rank's counts.
        """
        lies_on = zip(self.placement.axes, self.placement.roles, strict=True)
        apart = [*self.owners.axes, *(axis for axis, role in lies_on if isinstance(role, Sharded))]
        if is_dtensor(parameter):
            apart += [axis for axis, dim in mesh_axes(parameter) if dim is not None]
        return all(axis.rank == 0 or any(axis is one for one in apart) for axis in axes)


def _unaveraged(roles: Sequence[Role]) -> tuple[Role, ...]:
    """The roles of what is the same on the ranks that average gradients."""
    return tuple(Replicated() if isinstance(role, Averaged) else role for role in roles)


class Planner:
    """Gives parameters to owners. Those that lie on the same axes share their ranks' loads."""

    def __init__(self) -> None:
        self._owners: dict[tuple[int, ...], Owners] = {}

    def _over(self, axes: Sequence[Axis]) -> Owners:
        key = tuple(id(axis) for axis in axes)
        if key not in self._owners:
            self._owners[key] = Owners(axes)
        return self._owners[key]

    def plan(
        self, parameters: Sequence[Tensor], names: Sequence[str], placements: Sequence[Placement], group: dict[str, Any]
    ) -> list[Plan]:
        """A plan for each parameter; the costliest are given away first."""
        settings = Settings.of(group)
        costs = [_cost(*pair, group) for pair in zip(parameters, placements, strict=True)]
        plans: dict[int, Plan] = {}
        for index in sorted(range(len(parameters)), key=lambda index: -costs[index]):
            parameter, placement = parameters[index], placements[index]
            matrix = is_matrix(parameter, group)
            rule, whole = (RULES[group["variant"]], placement.whole) if matrix else (AdamW, placement.local)
            chosen = [at for at, role in enumerate(placement.roles) if matrix or isinstance(role, Averaged)]
            owners = self._over([placement.axes[at] for at in chosen])
            wide = torch.promote_types(parameter.dtype, torch.float32)
            roles = tuple(placement.roles[at] for at in chosen)
            route = Route(whole, roles, owners.assign(costs[index]), wide, parameter.device)
            places = dict(zip(chosen, route.owner, strict=True))
            home = tuple(places.get(at, 0) for at in range(len(placement.roles)))
            replicated = not is_dtensor(parameter) and any(isinstance(role, Replicated) for role in placement.roles)
            plans[index] = Plan(
                names[index], rule, placement, owners, route, self._over(placement.axes), home,
                rule.layout(whole, wide, settings), replicated, _elements(parameter, placement),
            )  # fmt: skip
        return [plans[index] for index in range(len(parameters))]


def _cost(parameter: Tensor, placement: Placement, group: dict[str, Any]) -> float:
    """What the work on a parameter costs, the same on every rank: decompositions and a pass over the elements."""
    sides = placement.whole if is_matrix(parameter, group) else ()
    return _elements(parameter, placement) + sum(dim**3 for dim in sides if dim <= group["max_factor_dim"])


def _elements(parameter: Tensor, placement: Placement) -> int:
    return parameter.numel() if is_dtensor(parameter) else torch.Size(placement.whole).numel()
