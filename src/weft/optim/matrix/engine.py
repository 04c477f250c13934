"""The engine of matrix optimizers: steps in buckets, from gradients to owners, by rules, to updates on every rank.

Nothing is changed before the work of all ranks has succeeded.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from weft.comm import Axis
from weft.optim.matrix.plan import Plan
from weft.optim.matrix.rule import EigenError, RuleRun, Settings, State, complete, find_group_fault
from weft.optim.matrix.second_owner import Lent, SecondOwners
from weft.optim.owners import Bucket, Held, OwnedPart, Place, Transfer
from weft.optim.step.compare import Examined, join_faults
from weft.optim.step.part import first_group_fault
from weft.parallel.dtensor import local_gradient, local_of

BUCKET_BYTES = 8 << 20  # of gradients that an owner gets in a bucket, at most about: nothing hides the first and last
SMALLEST_BYTES = 1 << 20  # at least: a message has a cost of its own


@dataclass
class Task:
    """One matrix in a step, or a parameter that AdamW steps."""

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


class MatrixEngine(OwnedPart):
    """The verbs of a part, for every rule. `MatrixOptimizer` fills what it works with."""

    _tensor_axis: Axis
    _data_axis: Axis | None
    _axes: list[Axis]  # all that anything lies on
    _plans: dict[Tensor, list[Plan]]  # of each parameter: one, or one for each matrix that it is cut into
    _buckets: list[list[tuple[Tensor, Plan]]] | None
    _bucket_bytes: int | None
    _under_way: list[TaskBucket]
    label: str  # the optimizer's name, in errors and messages
    settings_kind: type[Settings]

    @property
    def _rank(self) -> int:
        """What this rank is called in errors."""
        return (self._data_axis or self._tensor_axis).rank

    def find_own_fault(self, group: dict[str, Any]) -> Exception | None:
        """What is wrong with the options of a group that only this optimizer has."""
        return None

    def _find_fault(self, groups: list[dict[str, Any]]) -> Exception | None:
        """What is wrong with the numbers and options of groups."""
        return first_group_fault(self.label, groups, self._find_group_fault, self._rank)

    def _find_group_fault(self, group: dict[str, Any]) -> Exception | None:
        return join_faults([find_group_fault(self.label, group), self.find_own_fault(group)])

    # The verbs of a part.

    def step_axes(self) -> list[Axis]:
        """All axes that a parameter lies on."""
        return list(self._axes)

    def cut(self, bucket_bytes: int) -> None:
        """Buckets of which an owner gets about so many bytes of gradients."""
        self._bucket_bytes, self._buckets = bucket_bytes, None

    def _cut_buckets(self) -> list[list[tuple[Tensor, Plan]]]:
        """What does not travel, then matrices whose pieces travel together."""
        if self._buckets is None:
            pairs = [(parameter, plan) for parameter, plans in self._plans.items() for plan in plans]
            filled = fill_buckets([plan for _, plan in pairs], self._bucket_bytes)
            self._buckets = [[pairs[index] for index in bucket] for bucket in filled]
        return self._buckets

    def buckets(self) -> list[list[Tensor]]:
        """The parameters of each; one that is cut into matrices may stand in several."""
        return [list(dict.fromkeys(parameter for parameter, _ in bucket)) for bucket in self._cut_buckets()]

    def replicated_over(self, parameter: Tensor) -> list[Axis]:
        """Where it is the same, or averaged."""
        return self._plans[parameter][0].placement.whole_over

    def examine(self) -> Examined:
        """Which gradients are here; those of replicated parameters must be the same over the tensor axis."""
        found = super().examine()
        found.fault = self._find_fault(self.param_groups) or found.fault
        if found.fault is None:
            found.settings = tuple(self.settings_kind.of(group) for group in self.param_groups)
            now = self._settings()
            tasks = (task for bucket in self._under_way for task in bucket.tasks)
            if any(now[task.parameter].decays_gradient != task.settings.decays_gradient for task in tasks):
                found.fault = ValueError(
                    f"{self.label}: weight_decay or its method was changed between the backward and the step, when "
                    f"gradients had been sent"
                )
        found.alike = [self._tensor_axis if self._plans[p][0].replicated else None for p in found.parameters]
        return found

    def _settings(self) -> dict[Tensor, Settings]:
        found: dict[Tensor, Settings] = {}
        for group in self.param_groups:
            found |= dict.fromkeys(group["params"], self.settings_kind.of(group))
        return found

    def begin(self, present: Collection[Tensor]) -> None:
        """Take what has gradients, in buckets."""
        super().begin(present)
        settings = self._settings()
        self._under_way = [
            TaskBucket(tasks=[Task(p, plan, settings[p]) for p, plan in bucket if p in present])
            for bucket in self._cut_buckets()
        ]

    def gradient_of(self, parameter: Tensor) -> Tensor:
        """Also of a DTensor whose ranks' gradients are still to be added up."""
        return super().gradient_of(parameter) if parameter.grad is None else local_gradient(parameter)

    def send(self, bucket: int) -> None:
        """Start gradients to their owners, with the weights that a decay of gradients needs."""
        one = self._under_way[bucket]
        if one.tasks:
            owners = one.tasks[0].plan.owners
            pieces = [task.plan.piece(self.gradient_of(task.parameter)) for task in one.tasks]
            one.gradients = owners.gather(self.label, [task.plan.route for task in one.tasks], pieces)
            decayed = [task for task in one.tasks if task.settings.decays_gradient]
            if decayed:
                pieces = [task.plan.piece(local_of(task.parameter)) for task in decayed]
                routes = [task.plan.weight_route for task in decayed]
                one.weights = owners.gather(f"{self.label}.weights", routes, pieces)

    def crosses_ranks(self, bucket: int) -> bool:
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
        one.weights, runs = None, dict[int, RuleRun]()
        for at, (task, grad) in enumerate(zip(one.tasks, one.arrive(), strict=True)):
            weight = next(weights) if task.settings.decays_gradient else None
            if now[task.parameter].decays_gradient == task.settings.decays_gradient:  # else `examine` refuses the step
                task.settings = now[task.parameter]  # a scheduler may have changed the rate since gradients left
            if grad is not None:
                number = numbers[task.parameter]
                work = self._apply_rule(task, number, grad, scale, weight)
                runs[at] = RuleRun(number, task.plan.rule, work, grad)
        one.arrived = []
        lent = [
            Lent(at, numbers[task.parameter], task.plan, side)
            for at, task in enumerate(one.tasks) if task.plan.second and len(due := self._due(task)) > 1
            for side in due if side in task.plan.second
        ]  # fmt: skip
        updates = SecondOwners(self, lent, runs).work() if lent else {at: self.run(run) for at, run in runs.items()}
        results = [updates.get(at) for at in range(len(one.tasks))]
        one.results = one.tasks[0].plan.owners.scatter(self.label, [task.plan.route for task in one.tasks], results)

    def _due(self, task: Task) -> Collection[str]:
        """The sides whose factors are decomposed in this step, the same on every rank."""
        return task.plan.due(int(self.state[task.parameter]["step"]) + 1, task.settings)

    def _apply_rule(
        self, task: Task, number: int, grad: Tensor, scale: float | Tensor, weight: Tensor | None
    ) -> Generator[State, State, Tensor]:
        """The update of a matrix, by way of the factors that are due. What fails is noted: nobody will apply it.

        The new state stays apart.
        """
        grad = grad if isinstance(scale, float) and scale == 1 else grad * scale
        fail, plan = partial(self.fail, number), task.plan
        try:
            if (fine := self.verdict.are_finite([grad], fail)) is not False:  # a sum over ranks can overflow
                grad = grad if fine is True else torch.where(fine, grad, 0.0)  # what is not finite has no eigenvalues
                state = plan.state_of(self.state[task.parameter])
                weight = None if weight is None else weight.to(plan.wide).reshape(plan.matrix)
                found = plan.rule.advance(state, grad.reshape(plan.matrix), weight, task.settings, self._due(task))
                new, update = (yield from found) if isinstance(found, Generator) else found
                task.new_state = plan.saved(new)
                if self.verdict.are_finite([update], fail) is not False:
                    return update.to(plan.wide).reshape(plan.route.whole)
        except EigenError:
            fail()
        return torch.zeros_like(grad)

    def run(self, run: RuleRun) -> Tensor:
        """The update of a matrix of which this rank does all the work."""
        return self.attempt(run.number, partial(complete, run.work, run.rule), partial(torch.zeros_like, run.grad))

    def fail(self, number: int) -> None:
        """The step of a parameter cannot be made: nobody's is accepted."""
        self.failed = self.failed or 1 + number

    def _accept(self, one: TaskBucket, results: Held) -> None:
        """Apply the updates, and keep the owned states."""
        for task, update in zip(one.tasks, results, strict=True):
            assert update is not None
            _apply_update(task, update)
            state = self.state[task.parameter]
            state.update(task.new_state)
            if task.plan is self._plans[task.parameter][-1]:
                state["step"] += 1


def _apply_update(task: Task, update: Tensor) -> None:
    """Decay the weight and subtract the update. In fp32 for bf16: rounded once.

    ``cautious``: only elements decay that the update moves towards zero.
    """
    plan, settings, local = task.plan, task.settings, local_of(task.parameter)
    weight = local if plan.placement.box is None else plan.piece(local)
    wide, update = weight.to(plan.wide), update.reshape(weight.shape)
    if settings.shrink != 1:
        if settings.cautious:
            wide.copy_(torch.where(update * wide >= 0, wide * settings.shrink, wide))
        else:
            wide.mul_(settings.shrink)
    wide.sub_(update, alpha=plan.rule.rate(plan.matrix, settings))
    if wide is not weight:
        weight.copy_(wide)


def fill_buckets(plans: Sequence[Plan], bucket_bytes: int | None = None) -> list[list[int]]:
    """Indices of plans whose pieces travel together, in the order in which they are worked on.

    An owner gets about ``bucket_bytes`` of gradients in a bucket; None: `BUCKET_BYTES`, or if that is less than four
    buckets, up to four of at least `SMALLEST_BYTES`. All owners' buckets are filled to the same size, as the ranks of a
    bucket wait for the one that has most. What does not travel comes first: it is worked on while the first pieces are
    on their way. Nothing hides the first pieces' way to their owners and the last ones' way back, so the two smallest
    buckets go first and last.
    """
    by_ranks: dict[int, list[int]] = {}
    for index, plan in enumerate(plans):
        by_ranks.setdefault(id(plan.owners), []).append(index)
    buckets: list[list[int]] = []
    for indices in sorted(by_ranks.values(), key=lambda indices: len(plans[indices[0]].owners.axes)):
        if not plans[indices[0]].owners.axes:
            buckets.append(indices)
            continue
        sizes = {index: plans[index].elements * plans[index].wide.itemsize for index in indices}
        of_owner: dict[Place, list[int]] = {}
        for index in sorted(indices, key=lambda index: -sizes[index]):
            of_owner.setdefault(plans[index].route.owner, []).append(index)
        most = max(sum(sizes[at] for at in some) for some in of_owner.values())
        wanted = max(1, -(-most // (bucket_bytes or BUCKET_BYTES)))
        if bucket_bytes is None:
            wanted = max(wanted, min(4, most // SMALLEST_BYTES))
        filled = _fill(list(of_owner.values()), sizes, max(-(-most // wanted), *sizes.values()))
        buckets += [sorted(bucket) for bucket in filled]
    return buckets


def _fill(of_owners: Sequence[Sequence[int]], sizes: dict[int, int], limit: int) -> list[list[int]]:
    """Buckets in which no owner has more than ``limit``: the largest pieces first, each where it still fits."""
    filled: dict[int, list[int]] = {}
    for some in of_owners:
        left: list[int] = []
        for index in some:
            at = next((at for at, free in enumerate(left) if free >= sizes[index]), len(left))
            if at == len(left):
                left.append(limit)
            left[at] -= sizes[index]
            filled.setdefault(at, []).append(index)
    first, *rest = sorted(filled.values(), key=lambda bucket: sum(sizes[index] for index in bucket))
    return [first, *rest[1:], *rest[:1]]
