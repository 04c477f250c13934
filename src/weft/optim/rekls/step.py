"""One step under way: gradients to owners, work, updates back; nothing is changed before all have succeeded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from weft.comm.dtensor import local_gradient, local_of
from weft.optim.owners import Travel
from weft.optim.rekls.eigen import EigenError
from weft.optim.rekls.plan import Plan, in_waves
from weft.optim.rekls.settings import Settings


@dataclass
class Task:
    """One parameter in a step."""

    parameter: Tensor
    plan: Plan
    settings: Settings
    new_state: dict[str, Any] = field(default_factory=dict)


@dataclass
class _Wave:
    """Tasks whose pieces travel together."""

    tasks: list[Task]
    gradients: Travel
    weights: Travel | None
    updates: Travel | None = None


class Step:
    """The parameters of one step. Making it starts their gradients on the way to their owners.

    ``failed`` is the plan of a parameter whose update this rank could not compute.
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.failed: Plan | None = None
        self.worked = False
        self._waves = [_send([tasks[index] for index in wave]) for wave in in_waves([task.plan for task in tasks])]

    def work(self, state: Mapping[Tensor, dict[str, Any]], scale: Tensor | None) -> None:
        """Step what this rank owns, wave by wave as gradients arrive, and start the updates on their way back.

        ``scale`` is what gradients were multiplied by.
        """
        for number, wave in enumerate(self._waves):
            owners = wave.tasks[0].plan.owners
            if owners.axes:  # else there is work to do while the first pieces travel
                wave.gradients.advance()
                for ahead in self._waves[number + 1 : number + 2]:
                    ahead.gradients.advance()
            updates = self._updates(wave, state, scale)
            wave.updates = owners.scatter("REKLS", [task.plan.route for task in wave.tasks], updates)
            for behind in self._waves[max(0, number - 1) : number]:
                assert behind.updates is not None
                behind.updates.advance()
        self.worked = True

    def _updates(
        self, wave: _Wave, state: Mapping[Tensor, dict[str, Any]], scale: Tensor | None
    ) -> list[Tensor | None]:
        """The updates of the parameters this rank owns; their new states stay apart."""
        weights = iter([] if wave.weights is None else wave.weights.wait())
        updates: list[Tensor | None] = []
        for task, grad in zip(wave.tasks, wave.gradients.wait(), strict=True):
            weight = next(weights) if task.settings.decays_gradient else None
            if not task.plan.is_mine:
                updates.append(None)
                continue
            assert grad is not None
            grad = grad.to(task.plan.wide).contiguous()
            if scale is not None:
                grad = grad / scale.to(grad.device)
            weight = None if weight is None else weight.to(task.plan.wide)
            updates.append(self._try(task, state[task.parameter], grad, weight))
        return updates

    def _try(self, task: Task, state: dict[str, Any], grad: Tensor, weight: Tensor | None) -> Tensor:
        """The update of a parameter; if it cannot be computed that is noted, and nobody will apply it."""
        try:
            if bool(torch.isfinite(grad).all()):  # a sum over ranks can overflow
                task.new_state, update = task.plan.rule.advance(state, grad, weight, task.settings)
                if bool(torch.isfinite(update).all()):
                    return update
        except EigenError:
            pass
        self.failed = self.failed or task.plan
        return torch.zeros_like(grad)

    def finish(self, state: Mapping[Tensor, dict[str, Any]], accepted: bool) -> None:
        """Take what comes back and, if ``accepted``, change weights and state."""
        for wave in self._waves:
            assert wave.updates is not None
            for task, update in zip(wave.tasks, wave.updates.wait(), strict=True):
                if accepted:
                    assert update is not None
                    _apply(task, state[task.parameter], update)


def _send(tasks: list[Task]) -> _Wave:
    owners = tasks[0].plan.owners
    pieces = [local_gradient(task.parameter).reshape(task.plan.placement.local) for task in tasks]
    gradients = owners.gather("REKLS", [task.plan.route for task in tasks], pieces)
    decayed = [task for task in tasks if task.settings.decays_gradient]
    weights = None
    if decayed:
        pieces = [local_of(task.parameter).reshape(task.plan.placement.local) for task in decayed]
        weights = owners.gather("REKLS.weights", [task.plan.weight_route for task in decayed], pieces)
    return _Wave(tasks, gradients, weights)


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
