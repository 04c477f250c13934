"""Gives matrices to the ranks that step them, and the decompositions of their factors to steps."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from weft.comm import Axis
from weft.optim.matrix.adamw import ADAMW
from weft.optim.matrix.plan import Placement, Plan
from weft.optim.matrix.rule import FactorSettings, Rule, Settings
from weft.optim.owners import Averaged, Owners, Place, Replicated, Route
from weft.parallel.dtensor import is_dtensor

EIGH = 25  # operations of a decomposition for each of the n^3 that a product has
LARGE = 1024  # rows of a factor that a second owner may decompose: 4 MB go there and 4 come back
PRODUCTS = 7  # with both factors, that a step makes for each element and row or column


@dataclass(frozen=True)
class Piece:
    """What one plan is made for: a matrix of a parameter, or a parameter that AdamW steps."""

    name: str
    parameter: Tensor
    placement: Placement
    view: tuple[int, ...]
    suffix: str
    matrix: bool
    elements: int

    def costs(self, settings: Settings) -> dict[str, float]:
        """What the work costs, the same on every rank: decompositions by side, and under "" every step's."""
        if not self.matrix:
            return {"": self.elements}
        rows, columns = self.placement.whole[-2:]
        sides = settings.sides((rows, columns)) if isinstance(settings, FactorSettings) else []
        return {"": PRODUCTS * rows * columns * (rows + columns), **{side: EIGH * dim**3 for side, dim in sides}}


class Planner:
    """Gives matrices to owners and decompositions to steps. Those on the same axes share their ranks' loads."""

    def __init__(self, after: Planner | None = None) -> None:
        """``after``: one whose turns are gone on with, as in a copy of an optimizer."""
        self._owners: dict[tuple[int, ...], Owners] = {}
        # By ``root_every``: what each step in turn decomposes.
        self._turns: dict[int, list[float]] = (
            {} if after is None else {every: list(loads) for every, loads in after._turns.items()}
        )
        self._loads: dict[Owners, dict[Place, dict[tuple[int, int] | None, float]]] = {}  # under None: of all steps

    def over(self, axes: Sequence[Axis]) -> Owners:
        """The ranks of some axes, one and the same object for the same axes."""
        key = tuple(id(axis) for axis in axes)
        if key not in self._owners:
            self._owners[key] = owners = Owners(axes)
            places = itertools.product(*(range(axis.size) for axis in axes))
            self._loads[owners] = {place: defaultdict(float) for place in places}
        return self._owners[key]

    def plan(self, pieces: Sequence[Piece], rule: Rule, settings: Settings) -> list[Plan]:
        """A plan for each piece; the costliest are given away first."""
        costs = [piece.costs(settings) for piece in pieces]
        every = settings.root_every if isinstance(settings, FactorSettings) else 1
        turns = self._take_turns(costs, every)
        plans: dict[int, Plan] = {}
        costliest_first = sorted(range(len(pieces)), key=lambda index: -sum(costs[index].values()))
        for index in costliest_first:
            plans[index] = self._plan(pieces[index], rule, settings, costs[index], turns[index])
        for index in costliest_first:
            if _is_large_at_once(plans[index]):
                plans[index] = self._share(plans[index], costs[index]["R"], every)
        return [plans[index] for index in range(len(pieces))]

    def _take_turns(self, costs: Sequence[dict[str, float]], every: int) -> list[dict[str, int]]:
        """In which of ``every`` steps each factor is decomposed: equal shares for all. Ranks do not matter."""
        loads = self._turns.setdefault(every, [0.0] * every)
        found: list[dict[str, int]] = [{side: 0 for side in cost if side} for cost in costs]
        sides = [(cost[side], index, side) for index, cost in enumerate(costs) for side in cost if side]
        for size, index, side in sorted(sides, key=lambda one: -one[0]):
            found[index][side] = turn = min(range(every), key=loads.__getitem__)
            loads[turn] += size
        return found

    def _plan(
        self, piece: Piece, rule: Rule, settings: Settings, costs: dict[str, float], turns: dict[str, int]
    ) -> Plan:
        placement, parameter = piece.placement, piece.parameter
        rule, whole = (rule, placement.whole) if piece.matrix else (ADAMW, placement.local)
        chosen = [at for at, role in enumerate(placement.roles) if piece.matrix or isinstance(role, Averaged)]
        owners = self.over([placement.axes[at] for at in chosen])
        every = settings.root_every if isinstance(settings, FactorSettings) else 1
        kinds = {side: (every, turns[side]) if side else (0, 0) for side in costs}
        stays = placement.lies_whole_at() if len(placement.whole) > 2 else {}
        owner = self._assign(owners, costs, kinds, {chosen.index(at): rank for at, rank in stays.items()})
        wide = torch.promote_types(parameter.dtype, torch.float32)
        route = Route(whole, tuple(placement.roles[at] for at in chosen), owner, wide, parameter.device)
        places = dict(zip(chosen, owner, strict=True))
        matrix = whole[-2:]
        return Plan(
            name=piece.name, rule=rule, placement=placement, view=piece.view, owners=owners, route=route,
            everywhere=self.over(placement.axes),
            home=tuple(places.get(at, 0) for at in range(len(placement.roles))),
            layout=rule.layout(matrix, wide, settings), kept=rule.kept(matrix, wide, settings),
            suffix=piece.suffix, turns=turns, second={}, elements=piece.elements,
            replicated=not is_dtensor(parameter) and any(isinstance(role, Replicated) for role in placement.roles),
        )  # fmt: skip

    def _assign(
        self, owners: Owners, costs: dict[str, float], kinds: dict[str, tuple[int, int]], stays: dict[int, int]
    ) -> Place:
        """The owner of the next piece: where it ``stays`` (matrices that lie whole on one rank), else the
        least loaded, in the steps in which its factors are decomposed and in those in which all are.
        """
        loads = self._loads[owners]
        fit = [place for place in loads if all(place[at] == rank for at, rank in stays.items())]
        place = min(fit, key=lambda at: loads[at][None] + sum(loads[at][kinds[side]] for side in costs if side))
        for side, cost in costs.items():
            for kind in (kinds[side], None):
                loads[place][kind] += cost
        return place

    def _share(self, plan: Plan, cost: float, every: int) -> Plan:
        """With a second owner for R, if another rank has so much less to do in the steps in which it is due."""
        loads, kind = self._loads[plan.owners], (every, plan.turns["R"])
        place = min(loads, key=lambda place: (loads[place][kind], loads[place][None]))
        if loads[place][kind] + cost >= loads[plan.route.owner][kind]:
            return plan
        for one in (kind, None):
            loads[plan.route.owner][one] -= cost
            loads[place][one] += cost
        return replace(plan, second={"R": place})


def _is_large_at_once(plan: Plan) -> bool:
    """Whether both factors of a matrix are large, and decomposed in the same steps."""
    turns = plan.turns if plan.kept else {}
    return len(turns) == 2 and turns["L"] == turns["R"] and min(plan.matrix) >= LARGE
