"""The engine of matrix optimizers: steps in buckets, from gradients to owners, by rules, to updates on every rank.

Nothing is changed before the work of all ranks has succeeded.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from weft.comm import Axis
from weft.comm.device import outside_autocast
from weft.optim.matrix.checkpoint import check_tensors, load_tensors, save_tensors
from weft.optim.matrix.plan import Plan, Planner
from weft.optim.matrix.rule import EigenError, Settings
from weft.optim.owners import Bucket, Held, OwnedPart, Place, Transfer
from weft.optim.step.compare import Examined
from weft.optim.step.state import agree_to_load, find_state_fault, take_apart
from weft.parallel.dtensor import local_gradient, local_of

BUCKET_BYTES = 8 << 20  # of gradients that an owner gets in a bucket, at most about: nothing hides the first and last
SMALLEST_BYTES = 1 << 20  # at least: a message has a cost of its own
_PLACING = ("partition_dim", "flatten")  # what a loaded state does not change: how parameters lie here


@dataclass
class Task:
    """One parameter in a step."""

    parameter: Tensor
    plan: Plan
    settings: Settings
    new_state: dict[str, Any] = field(default_factory=dict)


@dataclass
class TaskBucket(Bucket):
    """Tasks whose pieces travel together. ``weights`` are those that decay gradients."""

    tasks: list[Task] = field(default_factory=list)
    weights: Transfer | None = None

    def drain(self) -> Held:
        if self.weights is not None:
            self.weights.wait()
        return super().drain()


class MatrixOptimizer(OwnedPart):
    """What all rules have in common. A subclass fills ``_plans`` (for each parameter) and ``_axes``."""

    def _begin(self, tensor_axis: Axis, data_axis: Axis | None) -> None:
        self._tensor_axis, self._data_axis = tensor_axis, data_axis
        self._planner = Planner()
        self._plans: dict[Tensor, Plan] = {}
        self._axes: list[Axis] = []
        self._buckets: list[list[Tensor]] | None = None
        self._bucket_bytes: int | None = None
        self._under_way: list[TaskBucket] = []

    def _find_fault(self, groups: list[dict[str, Any]]) -> Exception | None:
        """What is wrong with the numbers of groups."""
        raise NotImplementedError

    # The verbs of a part.

    def step_axes(self) -> list[Axis]:
        """All axes that a parameter lies on."""
        return list(self._axes)

    def cut(self, bucket_bytes: int) -> None:
        """Buckets of which an owner gets about so many bytes of gradients."""
        self._bucket_bytes, self._buckets = bucket_bytes, None

    def buckets(self) -> list[list[Tensor]]:
        """What does not travel, then matrices whose pieces travel together."""
        if self._buckets is None:
            parameters = list(self._plans)
            filled = fill_buckets(list(self._plans.values()), self._bucket_bytes)
            self._buckets = [[parameters[index] for index in bucket] for bucket in filled]
        return self._buckets

    def replicated_over(self, parameter: Tensor) -> list[Axis]:
        """Where it is the same, or averaged."""
        return self._plans[parameter].placement.whole_over

    def examine(self) -> Examined:
        """Which gradients are here; those of replicated parameters must be the same over the tensor axis."""
        found = super().examine()
        found.fault = self._find_fault(self.param_groups) or found.fault
        if found.fault is None:
            found.settings = tuple(Settings.of(group) for group in self.param_groups)
            now = self._settings()
            tasks = (task for bucket in self._under_way for task in bucket.tasks)
            if any(now[task.parameter].decays_gradient != task.settings.decays_gradient for task in tasks):
                found.fault = ValueError(
                    "REKLS: weight_decay or its method was changed between the backward and the step, when gradients "
                    "had been sent"
                )
        found.alike = [self._tensor_axis if self._plans[p].replicated else None for p in found.parameters]
        return found

    def _settings(self) -> dict[Tensor, Settings]:
        found: dict[Tensor, Settings] = {}
        for group in self.param_groups:
            found |= dict.fromkeys(group["params"], Settings.of(group))
        return found

    def begin(self, present: Collection[Tensor]) -> None:
        """Take what has gradients, in buckets."""
        super().begin(present)
        settings = self._settings()
        self._under_way = [
            TaskBucket(tasks=[Task(p, self._plans[p], settings[p]) for p in bucket if p in present])
            for bucket in self.buckets()
        ]

    def gradient_of(self, parameter: Tensor) -> Tensor:
        """Also of a DTensor whose ranks' gradients are still to be added up."""
        return super().gradient_of(parameter) if parameter.grad is None else local_gradient(parameter)

    def send(self, bucket: int) -> None:
        """Start gradients to their owners, with the weights that a decay of gradients needs."""
        one = self._under_way[bucket]
        if one.tasks:
            owners = one.tasks[0].plan.owners
            pieces = [self.gradient_of(task.parameter).reshape(task.plan.placement.local) for task in one.tasks]
            one.gradients = owners.gather("REKLS", [task.plan.route for task in one.tasks], pieces)
            decayed = [task for task in one.tasks if task.settings.decays_gradient]
            if decayed:
                pieces = [local_of(task.parameter).reshape(task.plan.placement.local) for task in decayed]
                one.weights = owners.gather("REKLS.weights", [task.plan.weight_route for task in decayed], pieces)

    def travels(self, bucket: int) -> bool:
        """Not where every rank steps its own elements."""
        tasks = self._under_way[bucket].tasks
        return bool(tasks) and bool(tasks[0].plan.owners.axes)

    def _counts(self, one: TaskBucket, place: int) -> bool:
        """Of what every rank steps alone, each element once."""
        task = one.tasks[place]
        return task.plan.counts_here(task.parameter, self._axes)

    def work_on(self, bucket: int, scale: float | Tensor) -> None:
        """Apply the rules to what this rank owns, with gradients times ``scale``; start updates on their way back."""
        one = self._under_way[bucket]
        if not one.tasks:
            return
        now, numbers = self._settings(), {parameter: number for number, parameter in enumerate(self._plans)}
        weights = iter([] if one.weights is None else one.weights.wait())
        one.weights, updates = None, list[Tensor | None]()
        for task, grad in zip(one.tasks, one.arrive(), strict=True):
            weight = next(weights) if task.settings.decays_gradient else None
            if now[task.parameter].decays_gradient == task.settings.decays_gradient:  # else `examine` refuses the step
                task.settings = now[task.parameter]  # a scheduler may have changed the rate since gradients left
            if grad is None:
                updates.append(None)
                continue
            number = numbers[task.parameter]
            work = partial(self._apply_rule, task, number, grad, scale, weight)
            updates.append(self.attempt(number, work, partial(torch.zeros_like, grad)))
        one.arrived = []
        one.results = one.tasks[0].plan.owners.scatter("REKLS", [task.plan.route for task in one.tasks], updates)

    def _apply_rule(
        self, task: Task, number: int, grad: Tensor, scale: float | Tensor, weight: Tensor | None
    ) -> Tensor:
        """The update of a parameter; the new state stays apart. What fails is noted, and nobody will apply it."""
        grad = grad if isinstance(scale, float) and scale == 1 else grad * scale
        weight = None if weight is None else weight.to(task.plan.wide)
        fail = partial(self._fail, number)
        try:
            if (fine := self.verdict.are_finite([grad], fail)) is not False:  # a sum over ranks can overflow
                grad = grad if fine is True else torch.where(fine, grad, 0.0)  # what is not finite has no eigenvalues
                task.new_state, update = task.plan.rule.advance(self.state[task.parameter], grad, weight, task.settings)
                if self.verdict.are_finite([update], fail) is not False:
                    return update
        except EigenError:
            fail()
        return torch.zeros_like(grad)

    def _fail(self, number: int) -> None:
        self.failed = self.failed or 1 + number

    def _accept(self, one: TaskBucket, results: Held) -> None:
        """Apply the updates, and keep the owned states."""
        for task, update in zip(one.tasks, results, strict=True):
            assert update is not None
            _apply_update(task, update)
            self.state[task.parameter]["step"] += 1
            self.state[task.parameter].update(task.new_state)

    # Saving and loading.

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """As torch's, with whole tensors as DTensors over the ranks; all ranks must ask."""
        saved = super().state_dict()
        saved["state"] = dict(enumerate(save_tensors(self._plans, self.state)))
        return saved

    def _take_apart(self, state_dict: Mapping[str, Any]) -> tuple[dict[str, Any], list[Mapping[str, Any] | None]]:
        groups = [dict(group) for group in state_dict["param_groups"]]
        for group, now in zip(groups, self.param_groups, strict=False):
            group.update({name: now[name] for name in _PLACING})
        return take_apart(self, state_dict, groups)

    def check_state(self, state_dict: Mapping[str, Any]) -> None:
        """Raise if a state cannot be loaded."""
        check_tensors(self._plans, self._take_apart(state_dict)[1])

    @torch.no_grad()
    @outside_autocast()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, in fp32 for bf16 parameters, and from any number of ranks. All ranks must call it."""
        agree_to_load("REKLS", self._axes, find_state_fault(self, state_dict))
        saved, given = self._take_apart(state_dict)
        loaded = load_tensors(self._plans, given)
        super().load_state_dict(saved)
        self.state.update(zip(self._plans, loaded, strict=True))


def _apply_update(task: Task, update: Tensor) -> None:
    """Decay the weight and subtract the update. In fp32 for bf16: rounded once."""
    local, shrink = local_of(task.parameter), task.settings.shrink
    update = update.reshape(local.shape)
    if local.dtype == task.plan.wide:
        if shrink != 1:
            local.mul_(shrink)
        local.sub_(update)
    else:
        local.copy_(local.to(task.plan.wide).mul_(shrink).sub_(update))


def fill_buckets(plans: Sequence[Plan], bucket_bytes: int | None = None) -> list[list[int]]:
    """Indices of plans whose pieces travel together, in the order in which they are worked on.

    An owner gets about ``bucket_bytes`` of gradients in a bucket; None: `BUCKET_BYTES`, or if that is less than four
    buckets, up to four of at least `SMALLEST_BYTES`. What does not travel comes first: it is worked on while the first
    pieces are on their way. Nothing hides the first pieces' way to their owners and the last ones' way back, so each
    owner's two smallest matrices go first and last.
    """
    by_ranks: dict[int, list[int]] = {}
    for index, plan in enumerate(plans):
        by_ranks.setdefault(id(plan.owners), []).append(index)
    buckets: list[list[int]] = []
    for indices in sorted(by_ranks.values(), key=lambda indices: len(plans[indices[0]].owners.axes)):
        if not plans[indices[0]].owners.axes:
            buckets.append(indices)
            continue
        of_owner: dict[Place, list[int]] = {}
        for index in sorted(indices, key=lambda index: plans[index].elements):
            of_owner.setdefault(plans[index].route.owner, []).append(index)
        most = max(sum(plans[at].elements * plans[at].wide.itemsize for at in some) for some in of_owner.values())
        wanted = max(1, -(-most // (bucket_bytes or BUCKET_BYTES)))
        if bucket_bytes is None:
            wanted = max(wanted, min(4, most // SMALLEST_BYTES))
        filled: list[list[int]] = [[] for _ in range(min(wanted, max(len(some) for some in of_owner.values())))]
        for some in of_owner.values():
            for index, bucket in zip(some, _bucket_of_each(len(some), len(filled)), strict=True):
                filled[bucket].append(index)
        buckets += [sorted(bucket) for bucket in filled]
    return buckets


def _bucket_of_each(tasks: int, buckets: int) -> list[int]:
    """The bucket of each of an owner's tasks, by size: the smallest first, the next one last, others between."""
    ends = [0, buckets - 1][: min(tasks, buckets)]
    between = max(1, buckets - 2)
    rest = tasks - len(ends)
    return ends + [min(buckets - 1, 1 + at * between // rest) for at in range(rest)]
