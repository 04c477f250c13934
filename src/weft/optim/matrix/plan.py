"""How a matrix lies on the ranks, which rule steps it, on which rank, and in which steps its factors are decomposed."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from weft.comm import Axis
from weft.optim.matrix.adamw import ADAMW
from weft.optim.matrix.rule import FactorSettings, Layout, Rule, Settings, State
from weft.optim.owners import Averaged, Owners, Place, Replicated, Role, Route, Sharded
from weft.parallel.dtensor import is_dtensor, mesh_axes

Box = tuple[tuple[int, int], ...]  # a part of a tensor: from where to where along each dimension


@dataclass(frozen=True)
class Placement:
    """A parameter over the ranks, seen as a matrix, a vector or a stack of matrices; or one matrix of it.

    ``whole`` is its shape, ``local`` that of this rank's part; ``roles[i]`` says how it lies on ``axes[i]``, each of
    more than one rank, in the order in which pieces are put together. ``box``: where it lies in the parameter's local
    tensor, None for all of it.
    """

    whole: tuple[int, ...]
    local: tuple[int, ...]
    axes: tuple[Axis, ...] = ()
    roles: tuple[Role, ...] = ()
    box: Box | None = None

    @property
    def whole_over(self) -> list[Axis]:
        """The axes on which it is the same, or averaged."""
        return [axis for axis, role in zip(self.axes, self.roles, strict=True) if not isinstance(role, Sharded)]

    def within(self, box: Box) -> Placement:
        """How the part ``box`` of the whole lies on the same ranks."""
        starts, roles = [0] * len(box), list(self.roles)
        for at in reversed(range(len(roles))):  # the last axis has the coarsest pieces
            role = roles[at]
            if isinstance(role, Sharded):
                edges = [starts[role.dim] + edge for edge in (0, *itertools.accumulate(role.sizes))]
                shared = tuple(_overlap(pair, box[role.dim]) for pair in itertools.pairwise(edges))
                roles[at] = Sharded(role.dim, tuple(stop - start for start, stop in shared))
                starts[role.dim] = edges[self.axes[at].rank]
        here = [(start, start + size) for start, size in zip(starts, self.local, strict=True)]
        inside = [_overlap(pair, wanted) for pair, wanted in zip(here, box, strict=True)]
        moved = tuple((one - start, end - start) for (one, end), start in zip(inside, starts, strict=True))
        sizes, local = (tuple(stop - start for start, stop in ranges) for ranges in (box, inside))
        return replace(self, whole=sizes, local=local, roles=tuple(roles), box=moved)

    def of(self, local: Tensor, view: tuple[int, ...]) -> Tensor:
        """This rank's part of it, in the memory of the parameter's ``local`` part, which is seen as ``view``."""
        local = local.reshape(view)
        return local if self.box is None else local[tuple(slice(*pair) for pair in self.box)]

    def lies_whole_at(self) -> dict[int, int]:
        """On the axes where one rank has all of it, that rank."""
        found = {}
        for at, role in enumerate(self.roles):
            if isinstance(role, Sharded) and sum(size > 0 for size in role.sizes) == 1:
                found[at] = max(range(len(role.sizes)), key=role.sizes.__getitem__)
        return found


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    """What two ranges share: of no length, at an end of the first, if nothing."""
    start, stop = max(one[0], other[0]), min(one[1], other[1])
    return (start, stop) if start < stop else (one[0], one[0])


def is_matrix(parameter: Tensor, group: dict[str, Any]) -> bool:
    """Whether the group's rule steps a parameter; the others are stepped by AdamW."""
    return parameter.ndim >= 2 and group["algorithm"] != "adamw"


@dataclass(frozen=True)
class Plan:
    """One matrix, or a parameter that AdamW steps: how it lies on the ranks, who steps it, and how it gets there.

    ``owners`` are the ranks its gradient travels over, ``route`` its way. A matrix travels over all ranks it lies on;
    what AdamW steps only over those where it is averaged. ``everywhere`` are all ranks it lies on, and ``home`` the one
    of them that a checkpoint's tensors come from. ``layout`` has the shape and dtype of each tensor of its state,
    ``kept`` of those that are made of them. ``suffix`` tells its state from that of the parameter's other matrices.
    ``turns``: in which of ``root_every`` steps each factor is decomposed; ``second``: by whom, if not by the owner.
    """

    name: str
    rule: Rule
    placement: Placement
    view: tuple[int, ...]  # the parameter's local part, as `Placement.of` sees it
    owners: Owners
    route: Route
    everywhere: Owners
    home: Place
    layout: Layout
    kept: Layout
    suffix: str
    turns: Mapping[str, int]
    second: Mapping[str, Place]
    replicated: bool  # over the tensor axis, as a plain tensor: its gradients must be the same there
    elements: int  # of the whole, the same on every rank

    @property
    def wide(self) -> torch.dtype:
        """The dtype of the state and of the work."""
        return self.route.dtype

    @property
    def matrix(self) -> tuple[int, ...]:
        """Its shape as its rule sees it."""
        return self.route.whole[-2:]

    @property
    def is_split(self) -> bool:
        """Whether each rank steps the elements that lie there, by AdamW, and so has the state of these alone."""
        return self.rule is ADAMW

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

    def piece(self, tensor: Tensor) -> Tensor:
        """This rank's part of it, of the local part of the parameter or its gradient."""
        return self.placement.of(tensor, self.view)

    def due(self, number: int, settings: Settings) -> Collection[str]:
        """The sides that are decomposed in the ``number``-th step: the step alone decides that."""
        if not isinstance(settings, FactorSettings) or number <= max(1, settings.dense_steps):
            return tuple(self.turns)
        every = settings.root_every
        return tuple(side for side, turn in self.turns.items() if number % every == turn % every)

    def fresh(self, device: torch.device) -> State:
        """The state before the first step, where this rank does the work."""
        if not self.is_mine:
            return {}
        state = {name: torch.zeros(shape, dtype=dtype, device=device) for name, (shape, dtype) in self.layout.items()}
        self.rule.derive(state, tuple(self.turns), zero=True)
        return self.saved(state)

    def state_of(self, saved: State) -> State:
        """Its own state, of all that the parameter has."""
        if not self.suffix:
            return saved
        names = (name for name in (*self.layout, *self.kept) if name + self.suffix in saved)
        return {"step": saved["step"], **{name: saved[name + self.suffix] for name in names}}

    def saved(self, state: State) -> State:
        """Its own state, named as among all that the parameter has."""
        return {name + self.suffix: value for name, value in state.items()}

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
