"""A step under way, in waves: gradients to owners, work, updates back; nothing is changed before all have succeeded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from weft.optim.matrix.eigen import EigenError
from weft.optim.matrix.plan import Plan
from weft.optim.matrix.settings import Settings
from weft.optim.owners import Held, Transfer, is_finite
from weft.parallel.dtensor import local_of

Attempt = Callable[[Plan, Callable[[], Tensor], Callable[[], Tensor]], Tensor]


@dataclass
class Task:
    """One parameter in a step."""

    parameter: Tensor
    plan: Plan
    settings: Settings
    new_state: dict[str, Any] = field(default_factory=dict)


class Wave:
    """Tasks of one step whose pieces travel together: gradients to owners, work, updates back.

    ``failed`` is the plan of a parameter whose update this rank could not compute.
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks, self.failed = list(tasks), None
        self._gradients: Transfer | None = None
        self._weights: Transfer | None = None
        self._updates: Transfer | None = None
        self._arrived: Held | None = None

    failed: Plan | None

    @property
    def travels(self) -> bool:
        return bool(self.tasks) and bool(self.tasks[0].plan.owners.axes)

    def send(self, local_gradients: Sequence[Tensor]) -> None:
        """Start gradients to their owners, with the weights that a decay of gradients needs."""
        owners = self.tasks[0].plan.owners
        pieces = [
            grad.reshape(task.plan.placement.local) for task, grad in zip(self.tasks, local_gradients, strict=True)
        ]
        self._gradients = owners.gather("REKLS", [task.plan.route for task in self.tasks], pieces)
        decayed = [task for task in self.tasks if task.settings.decays_gradient]
        if decayed:
            pieces = [local_of(task.parameter).reshape(task.plan.placement.local) for task in decayed]
            self._weights = owners.gather("REKLS.weights", [task.plan.weight_route for task in decayed], pieces)

    def advance(self) -> None:
        """End the hop under way and start the next, if there is one."""
        under_way = self._updates or self._gradients
        if under_way is not None:
            under_way.advance()

    def arrive(self) -> Held:
        """The whole gradients of the parameters this rank owns, in the dtype of the work; None for others."""
        if self._arrived is None:
            assert self._gradients is not None
            found = self._gradients.wait()
            self._arrived, self._gradients = [
                grad.to(task.plan.wide).contiguous() if task.plan.is_mine and grad is not None else None
                for task, grad in zip(self.tasks, found, strict=True)
            ], None  # fmt: skip
        return self._arrived

    def work(self, state: Mapping[Tensor, dict[str, Any]], scale: float, attempt: Attempt) -> None:
        """Step what this rank owns, with gradients times ``scale``; start the updates on their way back.

        New states stay apart. ``attempt(plan, work, instead)`` takes note of what the work raises.
        """
        weights = iter([] if self._weights is None else self._weights.wait())
        self._weights, updates = None, list[Tensor | None]()
        for task, grad in zip(self.tasks, self.arrive(), strict=True):
            weight = next(weights) if task.settings.decays_gradient else None
            if grad is None:
                updates.append(None)
                continue
            advance = partial(self._try, task, state[task.parameter], grad, scale, weight)
            updates.append(attempt(task.plan, advance, partial(_nothing, grad)))
        self._arrived = []
        self._updates = self.tasks[0].plan.owners.scatter("REKLS", [task.plan.route for task in self.tasks], updates)

    def _try(self, task: Task, state: dict[str, Any], grad: Tensor, scale: float, weight: Tensor | None) -> Tensor:
        """The update of a parameter; if it cannot be computed that is noted, and nobody will apply it."""
        grad = grad if scale == 1 else grad * scale
        weight = None if weight is None else weight.to(task.plan.wide)
        try:
            if is_finite(grad):  # a sum over ranks can overflow
                task.new_state, update = task.plan.rule.advance(state, grad, weight, task.settings)
                if is_finite(update):
                    return update
        except EigenError:
            pass
        self.failed = self.failed or task.plan
        return _nothing(grad)

    def commit(self, state: Mapping[Tensor, dict[str, Any]], accepted: bool) -> None:
        """Take what comes back and, if ``accepted``, change weights and state."""
        for under_way in (self._gradients, self._weights):
            if under_way is not None:
                under_way.wait()
        updates = [] if self._updates is None else self._updates.wait()
        for task, update in zip(self.tasks, updates, strict=True) if accepted else ():
            assert update is not None
            _apply(task, state[task.parameter], update)


def _nothing(grad: Tensor) -> Tensor:
    return torch.zeros_like(grad)


def _apply(task: Task, state: dict[str, Any], update: Tensor) -> None:
    """Decay the weight, subtract the update, keep the new state. In fp32 for bf16: rounded once."""
    local, shrink = local_of(task.parameter), task.settings.shrink
    update = update.reshape(local.shape)
    if local.dtype == task.plan.wide:
        if shrink != 1:
            local.mul_(shrink)
        local.sub_(update)
    else:
        local.copy_(local.to(task.plan.wide).mul_(shrink).sub_(update))
    state["step"] += 1
    state.update(task.new_state)


def find_late_change(waves: Sequence[Wave], groups: Sequence[dict[str, Any]]) -> Exception | None:
    """Whether what is added to gradients before they leave has changed since some left, in the backward."""
    now = {p: Settings.of(group).decays_gradient for group in groups for p in group["params"]}
    if all(now[task.parameter] == task.settings.decays_gradient for wave in waves for task in wave.tasks):
        return None
    return ValueError(
        "REKLS: weight_decay or its method was changed between the backward and the step, when gradients had been sent"
    )
