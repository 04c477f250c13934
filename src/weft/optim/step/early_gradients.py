"""Gradients that leave within the backward: hooks start each unit once its gradients are final."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from weft.comm.device import Written, outside_autocast, runs_behind
from weft.optim.step.compare import names_of, parameters_of
from weft.optim.step.part import StepPart
from weft.optim.step.run import StepRun, Unit
from weft.optim.step.verdict import device_of
from weft.parallel.dtensor import local_of

_watched = WeakIdKeyDictionary()  # by parameter: whose hook it has, and the hook


class EarlyGradients:
    """Starts units in one order, the same on every rank, whatever the order in which gradients become final.

    ``expected`` are the parameters that had gradients in the last step (at first: those that require them). A unit
    leaves when all of them in it have one; what is missing when the step begins travels as zeros, so that all ranks
    have sent the same when they compare.
    """

    def __init__(self, make_run: Callable[[], StepRun]) -> None:
        self._make_run = make_run
        self._expected: list[Tensor] = []
        self._scatter: list[Unit] = []
        self._units_of: dict[Tensor, list[int]] = {}  # several, of a parameter that is cut into matrices
        self._run: StepRun | None = None
        self._missing: list[set[Tensor]] = []  # of each unit
        self._written: list[list[Written]] = []  # the gradients of each: a backward may use several streams
        self._next = 0  # the unit that leaves next
        self._sent: dict[Tensor, tuple[Tensor | None, int]] = {}
        self._changed: Tensor | None = None  # the gradient of which somebody changed before a scaler came
        self._paused = False

    def arm(self, scatter: Sequence[Unit], expected: Sequence[Tensor]) -> None:
        """Wait for the next backward."""
        self._run, self._sent, self._next, self._changed = None, {}, 0, None
        self._scatter, self._expected = list(scatter), list(expected)
        self._units_of = {}
        for place, unit in enumerate(self._scatter):
            for parameter in unit.part.buckets()[unit.bucket]:
                self._units_of.setdefault(parameter, []).append(place)
        self._missing, self._written = [set() for _ in self._scatter], [[] for _ in self._scatter]
        for parameter in self._expected:
            # Those of tables leave by themselves; what has no elements may be in no bucket.
            if not hasattr(parameter, "row_table") and parameter in self._units_of:
                for place in self._units_of[parameter]:
                    self._missing[place].add(parameter)
                self._watch(parameter)

    def _watch(self, parameter: Tensor) -> None:
        """Hook a parameter's gradients. It has one step: a new one takes it over, a step that is gone lets it go."""
        owner, handle = _watched.get(parameter, (None, None))
        if owner is not None and owner() is self:
            return
        if handle is not None:
            handle.remove()
        me = weakref.ref(self)

        def arrived(parameter: Tensor) -> None:
            early = me()
            if early is not None:
                early._arrived(parameter)

        _watched[parameter] = me, parameter.register_post_accumulate_grad_hook(arrived)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Backwards in here only accumulate."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    @torch.no_grad()
    def _arrived(self, parameter: Tensor) -> None:
        places = self._units_of.get(parameter, ())
        if self._paused or not places or places[0] < self._next:
            return  # what has left is told by `find_fault`
        for place in places:
            self._missing[place].discard(parameter)
            if parameter.grad is not None and parameter.grad.layout == torch.strided:
                self._written[place].append(Written(local_of(parameter.grad)))
        while self._next < len(self._scatter) and not self._missing[self._next]:
            self._leave()

    def _begin(self) -> StepRun:
        if self._run is None:
            self._run = self._make_run()
            self._run.begin(self._expected)
        return self._run

    def _leave(self) -> None:
        run = self._begin()
        unit = self._scatter[self._next]
        for written in self._written[self._next]:
            written.read_here()
        for parameter in unit.part.buckets()[unit.bucket]:
            grad = None if parameter.grad is None else local_of(parameter.grad)
            self._sent[parameter] = grad, 0 if grad is None else grad._version
        run.send([unit])
        self._next += 1

    def take(self) -> tuple[StepRun, list[Tensor]]:
        """The run, all of whose units have left, and the parameters it was begun with."""
        while self._next < len(self._scatter):
            self._leave()
        return self._begin(), self._expected

    @property
    def has_begun(self) -> bool:
        return self._run is not None

    @outside_autocast()
    def let_scaler_write(self) -> None:
        """A GradScaler will multiply gradients by 1, in place: on a device, after the messages that read them."""
        self._changed = self._find_changed()
        for unit in self._scatter[: self._next]:
            if runs_behind(device_of(unit.part.buckets()[unit.bucket])):
                with self._begin().record.doing(unit.name):
                    unit.part.wait_sent(unit.bucket)

    def _find_changed(self, unscaled: bool = False) -> Tensor | None:
        """The first parameter whose gradient is not what has left; torch does not count what a scaler writes."""
        for parameter, (grad, version) in self._sent.items():
            if grad is None or hasattr(parameter, "row_table"):
                continue
            now = parameter.grad
            if unscaled or now is None or local_of(now) is not grad or grad._version != version:
                return parameter
        return None

    def find_fault(self, parts: Mapping[str, StepPart], scaler: str | None, rank: int) -> Exception | None:
        """Whether a gradient was changed after it had left.

        ``scaler``: whether a GradScaler has "unscaled" them, or will not and has "looked" at them.
        """
        changed = self._changed if scaler == "looked" else self._find_changed(scaler == "unscaled")
        if changed is None:
            return None
        names = {p: f"{own} ({part})" for part, one in parts.items()
                 for p, own in zip(parameters_of(one), names_of(one), strict=True)}  # fmt: skip
        return ValueError(
            f"OverlappedStep: the gradient of {names[changed]} was changed after it had been sent in the backward "
            f"(rank {rank}); run all backwards but the last in no_sync(), clip with clip=, or use "
            f"overlap_backward=False"
        )
