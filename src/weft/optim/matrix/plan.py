"""What is done with each parameter, by whom and in which wave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from weft.comm import Axis
from weft.optim.matrix import adam, exact, stable
from weft.optim.matrix.placement import Placement, is_matrix
from weft.optim.matrix.settings import Layout, Settings
from weft.optim.owners import Averaged, Owners, Place, Replicated, Route, Sharded
from weft.parallel.dtensor import is_dtensor, mesh_axes

VARIANTS: dict[str, ModuleType] = {"exact": exact, "stable": stable}
WAVES = 4  # at most: more messages than that hide little more
WAVE_BYTES = 1 << 20  # of gradients that an owner gets in a wave, at least: a message has a cost of its own


@dataclass(frozen=True)
class Plan:
    """One parameter: how it lies on the ranks, which of them steps it, and how pieces get there and back.

    ``owners`` are the ranks its gradient travels over, ``route`` its way. A matrix travels over all ranks it lies on;
    what AdamW steps only over those where it is averaged. ``everywhere`` are all ranks it lies on, and ``home`` the one
    of them that a checkpoint's tensors come from. ``layout`` has the shape and dtype of each tensor that is saved.
    """

    name: str
    rule: ModuleType
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
    def has_factors(self) -> bool:
        return self.rule is not adam

    def fresh(self, device: torch.device) -> dict[str, Any]:
        """The state before the first step, where this rank does the work."""
        if not self.is_mine:
            return {}
        state = {name: torch.zeros(shape, dtype=dtype, device=device) for name, (shape, dtype) in self.layout.items()}
        self.rule.derive(state)
        return state

    @property
    def is_mine(self) -> bool:
        """Whether this rank does the work."""
        return self.owners.here == self.route.owner

    @property
    def weight_route(self) -> Route:
        roles = tuple(Replicated() if isinstance(role, Averaged) else role for role in self.route.roles)
        return Route(self.route.whole, roles, self.route.owner, self.route.dtype, self.route.device)


def counts_here(plan: Plan, parameter: Tensor, axes: Sequence[Axis]) -> bool:
    """Whether what this rank works on counts in a norm over ``axes``: each element of a parameter does so once.

    It has one owner on the axes it travels over. On others it is cut, or the same: then the first rank's counts.
    """
    cut = [axis for axis, role in zip(plan.placement.axes, plan.placement.roles, strict=True)
           if isinstance(role, Sharded)]  # fmt: skip
    if is_dtensor(parameter):
        cut += [axis for axis, dim in mesh_axes(parameter) if dim is not None]
    apart = [*plan.owners.axes, *cut]
    return all(axis.rank == 0 or any(axis is one for one in apart) for axis in axes)


class Planner:
    """Gives parameters to owners. Those that lie on the same axes share their ranks' loads."""

    def __init__(self) -> None:
        self._owners: dict[tuple[int, ...], Owners] = {}

    def over(self, placement: Placement, averaged_only: bool) -> tuple[Owners, list[int]]:
        """The owners on the axes of a placement (or on those where it is averaged), and which of its axes these are."""
        chosen = [
            index for index, role in enumerate(placement.roles) if not averaged_only or isinstance(role, Averaged)
        ]
        axes = [placement.axes[index] for index in chosen]
        key = tuple(id(axis) for axis in axes)
        if key not in self._owners:
            self._owners[key] = Owners(axes)
        return self._owners[key], chosen

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
            owners, chosen = self.over(placement, averaged_only=not matrix)
            roles = tuple(placement.roles[at] for at in chosen)
            whole = placement.whole if matrix else placement.local
            wide = torch.promote_types(parameter.dtype, torch.float32)
            route = Route(whole, roles, owners.assign(costs[index]), wide, parameter.device)
            rule = VARIANTS[group["variant"]] if matrix else adam
            everywhere, _ = self.over(placement, averaged_only=False)
            places = dict(zip(chosen, route.owner, strict=True))
            home = tuple(places.get(at, 0) for at in range(len(placement.roles)))
            replicated = not is_dtensor(parameter) and any(isinstance(role, Replicated) for role in placement.roles)
            plans[index] = Plan(
                names[index], rule, placement, owners, route, everywhere, home, rule.layout(whole, wide, settings),
                replicated, _elements(parameter, placement),
            )  # fmt: skip
        return [plans[index] for index in range(len(parameters))]


def _cost(parameter: Tensor, placement: Placement, group: dict[str, Any]) -> float:
    """What the work on a parameter costs, the same on every rank: decompositions and a pass over the elements."""
    elements = _elements(parameter, placement)
    if not is_matrix(parameter, group):
        return elements
    return elements + sum(dim**3 for dim in placement.whole if dim <= group["max_factor_dim"])


def _elements(parameter: Tensor, placement: Placement) -> int:
    return parameter.numel() if is_dtensor(parameter) else torch.Size(placement.whole).numel()


def in_waves(plans: Sequence[Plan], wave_bytes: int | None = None) -> list[list[int]]:
    """Indices of plans whose pieces travel together, in the order in which they are worked on.

    An owner gets about ``wave_bytes`` of gradients in a wave; None: at least `WAVE_BYTES`, in at most `WAVES`.

    What does not travel comes first: it is worked on while the first pieces are on their way. Nothing hides the first
    pieces' way to their owners and the last ones' way back, so each owner's two smallest matrices go first and last.
    """
    by_ranks: dict[int, list[int]] = {}
    for index, plan in enumerate(plans):
        by_ranks.setdefault(id(plan.owners), []).append(index)
    waves: list[list[int]] = []
    for indices in sorted(by_ranks.values(), key=lambda indices: len(plans[indices[0]].owners.axes)):
        if not plans[indices[0]].owners.axes:
            waves.append(indices)
            continue
        of_owner: dict[Any, list[int]] = {}
        for index in sorted(indices, key=lambda index: plans[index].elements):
            of_owner.setdefault(plans[index].route.owner, []).append(index)
        most = max(
            sum(plans[index].elements * plans[index].wide.itemsize for index in some) for some in of_owner.values()
        )
        wanted = min(WAVES, max(1, most // WAVE_BYTES)) if wave_bytes is None else -(-most // wave_bytes)
        count = min(wanted, max(len(some) for some in of_owner.values()))
        cut: list[list[int]] = [[] for _ in range(count)]
        for some in of_owner.values():
            for index, wave in zip(some, _wave_of_each(len(some), count), strict=True):
                cut[wave].append(index)
        waves += [sorted(wave) for wave in cut]
    return waves


def _wave_of_each(tasks: int, waves: int) -> list[int]:
    """The wave of each of an owner's tasks, which stand by size: the smallest first, the next last, others between."""
    ends = [0, waves - 1][: min(tasks, waves)]
    between = max(1, waves - 2)
    rest = tasks - len(ends)
    return ends + [min(waves - 1, 1 + at * between // rest) for at in range(rest)]
