"""Forward and backward of an operation with a state: local kernels around one scan of their maps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from weft.comm import Axis, Call, Pending
from weft.ops.scan.affine import Form
from weft.ops.scan.methods import choose
from weft.ops.scan.state_scan import (
    LocalRun,
    SequencePlan,
    StateScan,
    collect_final_gradients,
    initial_gradient,
    plan_own,
    plan_sequence,
    segment_maps,
    share_final_states,
    states_by_run,
)
from weft.ops.sequence.layout import ANY_LENGTHS, Bounds, Sequence, predict, resolve


class PassOptions(Protocol):
    """What is asked here of the options that ranks have in common."""

    @property
    def operation(self) -> str: ...

    @property
    def method(self) -> str: ...

    @property
    def layout(self) -> str: ...

    @property
    def cu_seqlens(self) -> Bounds | None: ...

    @property
    def output_final_state(self) -> bool: ...

    def form(self, device: torch.device, /) -> Form: ...


class Kernel(Protocol):
    """The work on one run: the constructor finds its ``maps``, `intra` needs no state, `finish` takes it."""

    @property
    def maps(self) -> tuple[Tensor | None, Tensor]: ...

    def intra(self) -> None: ...

    def finish(self, state: Tensor | None, /) -> Any: ...


K = TypeVar("K", bound=Kernel)
R = TypeVar("R")


@dataclass(frozen=True)
class ForwardPass(Generic[K]):
    """What a forward has done before its kernels finish, and what its backward needs to know."""

    plan: SequencePlan
    method: str
    number: int  # of the call
    kernels: list[K]
    entering: list[Tensor | None]  # the states that enter the runs [B*N, HV, K, V], None for zero
    final: Pending[Tensor] | None  # the documents' final states, if asked for


@dataclass(frozen=True)
class Started(Generic[R]):
    """A pass whose maps travel. Its kernels have all that needs no state still to do, and then it has its result."""

    kernels: Items[Kernel]
    result: Pending[R]


def finish_in_turn(passes: Items[Started[R]]) -> Iterator[R]:
    """The results, one by one; before the first is waited for, all passes do what needs no state."""
    for one in passes:
        for kernel in one.kernels:
            kernel.intra()
    for one in passes:
        yield one.result.wait()


def run_forward(
    options: PassOptions, axis: Axis, given: Sequence | None, length: int, device: torch.device,
    work: Callable[[SequencePlan], list[K]], initial: Tensor | None,
) -> ForwardPass[K]:  # fmt: skip
    """`start_forward` on a call of its own, to its end."""
    call = axis.begin(options.operation, options, metadata=None if given else (length,))
    return next(finish_in_turn([start_forward(options, call, axis, given, length, device, work, initial)]))


def start_forward(
    options: PassOptions, call: Call, axis: Axis, given: Sequence | None, length: int, device: torch.device,
    work: Callable[[SequencePlan], list[K]], initial: Tensor | None,
) -> Started[ForwardPass[K]]:  # fmt: skip
    """``work(plan)`` makes the kernels of a plan's runs; while their maps travel, they do all that needs no state.

    With dense maps a segment that goes on from another run has a run of its own. ``initial`` are states that enter
    the documents and that the kernels do not know of.
    """
    form = options.form(device)
    batch = form.shape[0]
    method = choose(form, axis.size) if options.method == "auto" else options.method
    plan, scan, kernels = _begin_work(options, call, axis, given, length, form, method, work)
    found = _maps_of(kernels, plan, form)
    maps = segment_maps(plan, found, batch, form.kind == "dense")
    pending = scan.start(maps, None if initial is None else initial.detach().to(form.dtype))

    def finish() -> ForwardPass[K]:
        entering = pending.wait()
        arriving = None
        if options.output_final_state:
            ended = {
                one.segment.document: one.own.apply(state)
                for one, state in zip(maps, entering, strict=True)
                if one.segment.is_last
            }
            arriving = share_final_states(call, plan, ended, batch, like=found[0][1])
        return ForwardPass(plan, method, call.number, kernels, states_by_run(plan, entering, found), arriving)

    return Started(kernels, Pending(finish))


def run_backward(
    options: PassOptions, axis: Axis, how: tuple[SequencePlan, str, int], device: torch.device,
    work: Callable[[], list[K]], grad_final: Tensor | None, initial: Tensor | None,
) -> tuple[list[Any], Tensor | None]:  # fmt: skip
    """`start_backward` on a call of its own, to its end."""
    call = axis.begin(f"{options.operation}.backward", options, of=how[2])
    return next(finish_in_turn([start_backward(options, call, how, device, work, grad_final, initial)]))


def start_backward(
    options: PassOptions, call: Call, how: tuple[SequencePlan, str, int], device: torch.device,
    work: Callable[[], list[K]], grad_final: Tensor | None, initial: Tensor | None,
) -> Started[tuple[list[Any], Tensor | None]]:  # fmt: skip
    """What the kernels of ``work()`` give, run by run, and the gradient of ``initial`` (None if that is).

    ``how`` are plan, method and number of the forward. The last thing each kernel gives is the gradient of the states
    that enter its run.
    """
    (plan, method, _), form = how, options.form(device)
    batch = form.shape[0]
    seeds = None
    if options.output_final_state:
        shape = (batch * len(plan.ends), *form.shape[1:])
        grad_final = form.new_empty(*shape).zero_() if grad_final is None else grad_final.to(form.dtype)
        seeds = collect_final_gradients(call, plan, grad_final, batch)
    scan = StateScan(call, plan, form, method, reverse=True)
    kernels = work()
    found = _maps_of(kernels, plan, form)
    maps = segment_maps(plan, found, batch, form.kind == "dense")
    pending = scan.start(maps, None if seeds is None else seeds.wait())

    def finish() -> tuple[list[Any], Tensor | None]:
        leaving = states_by_run(plan, pending.wait(), found)
        grads = [kernel.finish(grad) for kernel, grad in zip(kernels, leaving, strict=True)]
        return grads, initial_gradient(initial, maps, [grad[-1] for grad in grads])

    return Started(kernels, Pending(finish))


def _begin_work(
    options: PassOptions, call: Call, axis: Axis, given: Sequence | None, length: int, form: Form,
    method: str, work: Callable[[SequencePlan], list[K]],
) -> tuple[SequencePlan, StateScan, list[K]]:  # fmt: skip
    """The plan of a call, its scan with receives posted, and what ``work(plan)`` gives.

    The work needs no other rank's length unless documents are packed or chunks dealt: then it begins on a prediction
    while lengths are gathered, and again if that was wrong. With a sequence that was ``given`` nothing is gathered.
    """
    layout, bounds = options.layout, options.cu_seqlens

    def cut(plan: SequencePlan) -> SequencePlan:
        return plan.apart() if form.kind == "dense" else plan

    if given is not None or (bounds is None and layout in ANY_LENGTHS):
        plan = cut(plan_own(axis, layout, length) if given is None else plan_sequence(given))
        scan = StateScan(call, plan, form, method)
        done = work(plan)
        if given is None:
            call.metadata.wait()
        return plan, scan, done
    predicted = predict(axis, length, layout, bounds)
    if predicted is not None:
        plan = cut(plan_sequence(predicted))
        done = work(plan)
    sequence = resolve(options.operation, call, axis, layout, bounds)
    if predicted is None or predicted.lengths != sequence.lengths:
        plan = cut(plan_sequence(sequence))
        done = work(plan)
    return plan, StateScan(call, plan, form, method), done


def _maps_of(kernels: Items[Kernel], plan: SequencePlan, form: Form) -> list[tuple[Tensor | None, Tensor]]:
    """The maps of the runs' segments, as they are sent."""
    if form.kind != "dense":
        return [kernel.maps for kernel in kernels]
    return [_with_transition(kernel.maps, run, form) for kernel, run in zip(kernels, plan.runs, strict=True)]


def _with_transition(maps: tuple[Tensor | None, Tensor], run: LocalRun, form: Form) -> tuple[Tensor | None, Tensor]:
    """What begins here leaves as it does whatever the map before it is: where a map is sent, M is zero."""
    transition, state = maps
    if transition is None and any(one.path.size > 1 for one in run.segments):
        transition = form.new_empty(*state.shape[:-1], state.shape[-2]).zero_()
    return transition, state
