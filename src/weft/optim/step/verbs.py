"""`PartVerbs`: what a step asks of an optimizer that is part of it: gradients sent, worked on, results committed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from weft.comm import Axis
from weft.comm.arguments import read
from weft.comm.ledger import Event
from weft.optim.step.compare import Examined, is_lost
from weft.parallel.dtensor import local_of

T = TypeVar("T")


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters of all groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def names_of(optimizer: torch.optim.Optimizer) -> list[str]:
    """Their names, or their numbers."""
    return [
        group["param_names"][at] if "param_names" in group else f"parameter {at} of group {number}"
        for number, group in enumerate(optimizer.param_groups)
        for at in range(len(group["params"]))
    ]


class PartVerbs(torch.optim.Optimizer):
    """The verbs of a part, with defaults: `weft.optim.StepPart` says which a subclass must have, and steps alone."""

    sends_in_step = True  # whether gradients wait for the step, and are not sent in the backward already
    present: Collection[Tensor] = ()  # parameters with gradients, in the step under way
    failed = 0  # 1 + the number of a parameter whose work could not be done
    error: Exception | None = None  # what the work raised that nobody had expected
    compares_weights = True  # in the next step: whether ranks have the same of what is replicated

    def step_axes(self) -> list[Axis]:
        """The axes whose ranks take part in a step."""
        raise NotImplementedError(f"{type(self).__name__} has no step_axes")

    def buckets(self) -> list[list[Tensor]]:
        """The parameters of each bucket: the same on every rank, and at every step."""
        return [parameters_of(self)]

    def cut(self, bucket_bytes: int) -> None:
        """Make buckets of about this size, before the first step; what has one bucket keeps it."""

    def collect_late(self) -> None:
        """The part is stepped with others: gradients that left in the backward are taken when they are worked on."""

    def examine(self) -> Examined:
        """What this rank has, before a step. Nothing is sent."""
        parameters = parameters_of(self)
        grads = [None if parameter.grad is None else local_of(parameter.grad) for parameter in parameters]
        settings, fault = self._read_settings(None)
        return Examined(parameters, names_of(self), [grad is not None for grad in grads], grads, settings, fault)

    def _read_settings(self, fault: Exception | None) -> tuple[object, Exception | None]:
        """The options of all groups as text, and ``fault``, or what is wrong with them."""
        if fault is not None:
            return None, fault
        axes = self.step_axes()
        options = read(
            type(self).__name__, axes[-1].rank if axes else 0,
            lambda: tuple(str({k: v for k, v in group.items() if k in self.defaults}) for group in self.param_groups),
        )  # fmt: skip
        return (None, options) if isinstance(options, Exception) else (options, None)

    def replicated_over(self, parameter: Tensor) -> list[Axis]:
        """The axes over whose ranks a parameter must be the same: that is compared before the first step."""
        return []

    def begin(self, present: Collection[Tensor]) -> None:
        """A step begins, in which these parameters have gradients on every rank."""
        self.present, self.failed, self.error = present, 0, None

    def attempt(self, number: int | None, work: Callable[[], T], instead: Callable[[], T]) -> T:
        """What ``work()`` gives; if it raises, on the parameter of this number, that is noted and ``instead()`` taken.

        No rank's step is then accepted, and all raise. Messages belong outside: a lost group is not noted but raised.
        """
        try:
            return work()
        except Exception as error:
            if is_lost(error):
                raise
            if self.error is None:
                self.error, self.failed = error, 0 if number is None else 1 + number
            return instead()

    def send(self, bucket: int) -> None:
        """Start the gradients of a bucket on their way."""
        raise NotImplementedError(f"{type(self).__name__} has no send")

    def travels(self, bucket: int) -> bool:
        """Whether anything of a bucket crosses ranks."""
        return True

    def advance(self, bucket: int) -> None:
        """Of messages in several hops: end the one under way and start the next."""

    def sent_before(self, bucket: int) -> list[Event]:
        """Messages of a bucket that left before the step."""
        return []

    def squared_norm(self, bucket: int) -> Tensor:
        """Wait for the gradients of a bucket: the sum of squares of those worked on here, an fp64 scalar."""
        raise NotImplementedError(f"{type(self).__name__} has no squared_norm, which clip= needs")

    def norm_axes(self, bucket: int) -> list[Axis]:
        """The axes along which `squared_norm` is summed; on others, ranks have the same gradients."""
        return self.step_axes()

    def work_ahead(self, bucket: int) -> None:
        """Work that does not depend on the scale of gradients, while the norm travels."""

    def work_on(self, bucket: int, scale: float) -> None:
        """Work on the gradients of a bucket, multiplied by ``scale``, and start results on their way."""
        raise NotImplementedError(f"{type(self).__name__} has no work_on")

    def commit(self, accepted: bool) -> None:
        """Take what comes back; change weights and state, or drop it."""
        raise NotImplementedError(f"{type(self).__name__} has no commit")

    def explain_failure(self, name: str) -> str:
        """In words: what ``failed`` means for the parameter ``name``."""
        return f"the update of {name} could not be computed"

    def check_state(self, state_dict: Mapping[str, Any]) -> None:
        """Raise if a state cannot be loaded. Nothing is sent or changed."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's."""
        self.compares_weights = True
        super().load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's."""
        self.compares_weights = True
        super().add_param_group(param_group)

    def gradient_of(self, parameter: Tensor) -> Tensor:
        """This rank's part of a gradient; zeros where others have one and this rank, against the rules, has not."""
        if parameter.grad is None:
            return torch.zeros_like(local_of(parameter))
        return local_of(parameter.grad)
