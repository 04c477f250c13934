"""`OverlappedStep`: one optimizer step made of parts; while the messages of one travel, another works."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from weft.comm.arguments import find_flag_fault, find_integer_fault, show
from weft.optim.step.compare import gather_verdict, parameters_of
from weft.optim.step.early_gradients import EarlyGradients
from weft.optim.step.part import StepPart, call_closure, find_option_fault
from weft.optim.step.record import StepRecord
from weft.optim.step.run import StepRun, Unit, union_of_axes
from weft.optim.step.state import agree_to_load, join_states, read_states


class OverlappedStep(torch.optim.Optimizer):
    """A ``torch.optim.Optimizer`` made of parts: `ShardedAdamW`, `REKLS`, `RowAdam`, or a `StepPart` of one's own.

    All gradients are sent; then buckets are worked on, each as its gradients arrive, and send their results on while
    the next is worked on: tables first, then the parts as they are listed. The result is that of the parts one after
    the other, to the bit, in any order.

    ``bucket_bytes``: gradients of an owner in a bucket of `ShardedAdamW` or `REKLS`; None: as these were made. A table
    is one bucket.

    ``clip``: the largest norm of all gradients together, rows and matrices that lie on several ranks counted once.
    ``norm`` is the last one before clipping. ``overlap_backward``: buckets leave within the backward, once their
    gradients are final; run all backwards but the last of an accumulation in `no_sync`. The gradients of tables always
    do.

    Nothing of any part is changed before it is known that every rank can make the step. A gradient that is not finite,
    or work that cannot be done, leaves everything as it was on all ranks: the step raises, or with
    ``on_nonfinite="skip"`` is passed over and logged.

    >>> import weft
    >>> model = torch.nn.Linear(4, 3)
    >>> parts = [weft.optim.REKLS([model.weight], lr=0.1), weft.optim.ShardedAdamW([model.bias])]
    >>> step = OverlappedStep(parts, clip=1.0)
    >>> model(torch.ones(2, 4)).sum().backward()
    >>> step.step()
    """

    def __init__(
        self,
        parts: Sequence[StepPart],
        *,
        bucket_bytes: int | None = None,
        clip: float | None = None,
        overlap_backward: bool = False,
        on_nonfinite: str = "raise",
    ) -> None:
        try:
            _check(parts, clip, bucket_bytes, overlap_backward, on_nonfinite)
            self.parts = name_parts(parts)
            self._clip, self._on_nonfinite = None if clip is None else float(clip), on_nonfinite
            self.norm: float | None = None
            self._last: StepRecord | None = None
            self._expected: list[Tensor] | None = None
            for part in parts:
                if bucket_bytes is not None:
                    part.cut(bucket_bytes)
                part.collect_late()
            # What all parts have: schedulers look there whether momentum can be cycled by betas.
            common = {name: one for name, one in parts[0].defaults.items() if all(name in p.defaults for p in parts)}
            super().__init__([group for part in parts for group in part.param_groups], common)
            self._refresh()
            self._rank = self.axes[-1].rank if self.axes else 0
            self._early = EarlyGradients(self._make_run) if overlap_backward else None
            self._arrange()
        except Exception as error:  # ranks that go on wait for this one, making buckets anew or at the next step
            given = [part for part in parts if isinstance(part, StepPart)] if isinstance(parts, tuple | list) else []
            for axis in union_of_axes(given):
                axis.publish_fault("OverlappedStep", error)
            raise

    def _arrange(self) -> None:
        """Put the buckets of all parts in their order."""
        self.units = order_units(self.parts, early=self._early is not None)
        self._arm()

    def _arm(self) -> None:
        if self._early is not None:
            wanted = [p for p in parameters_of(self) if p.requires_grad]
            self._early.arm(self.units, wanted if self._expected is None else self._expected)

    def _make_run(self) -> StepRun:
        return StepRun("OverlappedStep", self.parts, self.units, self._clip, self._on_nonfinite)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of all parts. Every rank must call it; a ``closure`` is called on each of them."""
        loss = call_closure(closure)
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        run, sent = (self._make_run(), []) if self._early is None else self._early.take()
        self._last = run.record
        try:
            with run.record.stepping():
                if self._early is None:
                    self._expected = run.start(found_inf)
                    run.work(grad_scale)
                else:
                    scaler = None if found_inf is None else "unscaled" if grad_scale is None else "looked"
                    fault = self._early.find_fault(self.parts, scaler, self._rank)
                    self._expected = run.work_on_sent(sent, grad_scale, found_inf, fault)
                run.finish()
        finally:
            self.norm = run.norm
            self._arm()
        return loss

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """A GradScaler leaves grad_scale and found_inf here and calls step on all ranks.

        It asks right before it looks for infinities, where it writes all gradients over, times 1.
        """
        if self._early is not None:
            self._early.let_scaler_write()
        return True

    def no_sync(self) -> AbstractContextManager[None]:
        """With ``overlap_backward``: backwards in here accumulate gradients and send none, but those of tables."""
        return nullcontext() if self._early is None else self._early.paused()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. With ``overlap_backward`` all ranks must call it: what is under way is waited for and dropped.

        Ranks gather whether any gradients have left: a rank whose backward failed sends what the others wait for.
        """
        if self._early is not None:
            begun = gather_verdict(
                self.axes, "OverlappedStep.zero_grad", None, [int(self._early.has_begun)],
                lambda axis, rows: [max(row[0] for row in rows)],
            )[0]  # fmt: skip
            if begun:
                self._early.take()[0].drop()
            self._arm()
        for part in self.parts.values():
            part.zero_grad(set_to_none)

    def explain(self) -> StepRecord:
        """What the last step sent, what of it was hidden and what was exposed, by part, on this rank."""
        if self._last is None or self._last.ended is None:
            raise RuntimeError("OverlappedStep: explain() tells of the last step, and there has been none")
        return self._last

    # Parameter groups and states: those of the parts, one after the other.

    @torch.no_grad()
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; ``param_group["part"]`` names the part it goes to, if there are several. All ranks must call."""
        if self.__dict__.get("axes") is None:  # torch's constructor hands over the groups of the parts
            super().add_param_group(param_group)
            return
        group = dict(param_group)
        name = group.pop("part", next(iter(self.parts)) if len(self.parts) == 1 else None)
        if name not in self.parts:
            raise ValueError(
                f"OverlappedStep: add_param_group needs part=NAME, one of {', '.join(self.parts)}, got {name!r}"
            )
        self.parts[name].add_param_group(group)
        self._refresh()
        self._expected = None
        self._arrange()

    def _refresh(self) -> None:
        """The groups and states of the parts, which they may have made anew."""
        self.param_groups = [group for part in self.parts.values() for group in part.param_groups]
        self.axes = union_of_axes(list(self.parts.values()))
        self.state.clear()
        for part in self.parts.values():
            self.state.update(part.state)

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """As torch's: the states of the parts, numbered through. All ranks must ask."""
        return join_states([part.state_dict() for part in self.parts.values()])

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; from any number of ranks, and from one ``torch.optim.AdamW`` of the same groups."""
        split, fault = read_states(state_dict, self.parts)
        agree_to_load("OverlappedStep", self.axes, fault)  # all parts load, or none
        for part, one in zip(self.parts.values(), split, strict=True):
            part.load_state_dict(one)
        self._refresh()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("OverlappedStep: parts over several ranks are not pickled or copied; save the state_dict()")


def name_parts(parts: Sequence[StepPart]) -> dict[str, StepPart]:
    """Each part by the name of its class; the second of a class is called ``REKLS_2``, and so on.

    >>> import weft
    >>> one, other = (weft.optim.ShardedAdamW([torch.nn.Parameter(torch.ones(2))]) for _ in range(2))
    >>> list(name_parts([one, other]))
    ['ShardedAdamW', 'ShardedAdamW_2']
    """
    named: dict[str, StepPart] = {}
    for part in parts:
        kind = type(part).__name__
        count = sum(type(other).__name__ == kind for other in named.values())
        named[kind if not count else f"{kind}_{count + 1}"] = part
    return named


def order_units(parts: Mapping[str, StepPart], early: bool) -> list[Unit]:
    """Buckets as they send and are worked on. Tables first: their gradients leave in the backward, and are there while
    others travel. ``early``: all leave in the backward, which comes to tables last."""
    units = [Unit(name, part, bucket) for name, part in parts.items() for bucket in range(len(part.buckets()))]
    return sorted(units, key=lambda unit: unit.part.sends_in_step != early)


def _check(
    parts: Sequence[StepPart], clip: float | None, bucket_bytes: int | None, overlap_backward: bool, on_nonfinite: str
) -> None:
    """What cannot be right, before anything is changed."""
    if not isinstance(parts, Sequence) or isinstance(parts, str):
        raise TypeError(f"OverlappedStep: parts must be a list of weft.optim.StepPart, got {show(parts)}")
    if not parts:
        raise ValueError("OverlappedStep: there are no parts")
    for part in parts:
        if not isinstance(part, StepPart):
            raise TypeError(
                f"OverlappedStep: {type(part).__name__} is no StepPart; parts are weft.optim.ShardedAdamW, REKLS, "
                f"weft.optim.RowAdam and classes that have the three verbs (docs/overlapped_step.md)"
            )
        if part.clips:
            raise ValueError(
                f"OverlappedStep: {type(part).__name__} has clip= of its own, which would count its gradients alone; "
                f"give clip= to OverlappedStep"
            )
    fault = find_option_fault("OverlappedStep", on_nonfinite, clip)
    fault = fault or find_flag_fault("OverlappedStep", "overlap_backward", overlap_backward, None)
    if bucket_bytes is not None:
        fault = fault or find_integer_fault("OverlappedStep", "bucket_bytes", bucket_bytes, None, least=1)
    if fault is not None:
        raise fault
