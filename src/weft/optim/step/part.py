"""`StepPart`: an optimizer that steps by itself and as a part of an `OverlappedStep`; what its options must be."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from weft.comm import Axis
from weft.comm.arguments import at, find_choice_fault, find_number_fault, read, show
from weft.comm.ledger import Event
from weft.optim.step.compare import Examined, is_lost, names_of, parameters_of
from weft.optim.step.run import StepRun, Unit
from weft.optim.step.verdict import Verdict
from weft.parallel.dtensor import local_of

T = TypeVar("T")
ON_NONFINITE = ("raise", "skip")
_PARTS = "the parts of a step are start(), work() and finish()"


def call_closure(closure: Callable[[], Any] | None) -> Any:
    """What a ``closure`` returns, with gradients, as torch's optimizers call it; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class StepPart(torch.optim.Optimizer):
    """An optimizer that is complete by itself, and a part that `weft.optim.OverlappedStep` can take.

    Its parameters stand in buckets, whose gradients travel together. A step calls, in the same order on every rank:

    | verb                      | what a subclass does                                                                |
    |---------------------------|-------------------------------------------------------------------------------------|
    | ``send(bucket)``          | start this rank's gradients on their way; return without waiting                    |
    | ``work_on(bucket, scale)``| wait for them, compute what changes, start results on their way; change nothing yet |
    | ``commit(accepted)``      | wait for results; change weights and state, or drop everything if not accepted      |

    Every subclass has these three and ``step_axes``, the axes whose ranks take part. The rest has defaults: `buckets`
    (one), `examine` (every parameter, its name and the options of its group), `advance` (for messages of several hops),
    `squared_norm` (only needed with ``clip``) and `work_ahead` (what does not depend on the scale of gradients).

    ``commit(False)`` may come when nothing was worked on: wait for what is under way and drop it. Where work cannot
    be done, put ``1 +`` the parameter's number into ``failed``: no rank's step is then accepted. What ``work_on``
    raises does so too, on every rank; where others wait for results, compute these in `attempt`: something is sent.
    """

    sends_in_step = True  # whether gradients wait for the step, and are not sent in the backward already
    present: Collection[Tensor] = ()  # parameters with gradients, in the step under way
    failed = 0  # 1 + the number of a parameter whose work could not be done
    error: Exception | None = None  # what the work raised that nobody had expected
    verdict = Verdict()  # of the step under way: what is on a device and decides about it
    compares_weights = True  # in the next step: whether ranks have the same of what is replicated
    _run: StepRun | None = None  # the step under way
    _next = "start"  # what may be called
    norm: float | None = None  # of the last step's gradients, with clip

    def __init__(
        self, params: Iterable[Any], defaults: dict[str, Any], on_nonfinite: str = "raise", clip: float | None = None
    ) -> None:
        self._set_up(on_nonfinite, clip)
        super().__init__(params, defaults)

    def _set_up(self, on_nonfinite: str, clip: float | None = None) -> None:
        if fault := find_option_fault(type(self).__name__, on_nonfinite, clip):
            raise fault
        self._on_nonfinite, self._clip = on_nonfinite, None if clip is None else float(clip)

    @property
    def clips(self) -> bool:
        """Whether the part clips by the norm of its own gradients."""
        return self._clip is not None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. Every rank must call it; a ``closure`` is called on each of them."""
        loss = call_closure(closure)
        self.start()
        self.work()
        self.finish()
        return loss

    @torch.no_grad()
    def start(self) -> None:
        """Compare gradients over the ranks, then start them to their owners. Do not touch them until `finish`."""
        self._expect("start")
        name = type(self).__name__
        units = [Unit(name, self, bucket) for bucket in range(len(self.buckets()))]
        run = StepRun(name, {name: self}, units, self._clip, self._on_nonfinite)
        run.start(getattr(self, "found_inf", None))
        self._run, self._next = run, "work"

    @torch.no_grad()
    def work(self) -> None:
        """Step what this rank owns, as gradients arrive, and start the results on their way back."""
        self._expect("work")
        self._next = "start"  # should the work fail
        assert self._run is not None
        self._run.work(getattr(self, "grad_scale", None))
        self.norm, self._next = self._run.norm, "finish"

    @torch.no_grad()
    def finish(self) -> None:
        """Take what comes back; or raise, or with ``on_nonfinite="skip"`` log, why nothing has been changed."""
        self._expect("finish")
        self._next = "start"
        assert self._run is not None
        run, self._run = self._run, None
        try:
            run.finish()
        finally:
            self.norm = run.norm

    def _expect(self, what: str) -> None:
        if what == self._next:
            return
        name = type(self).__name__
        if what == "start":
            raise RuntimeError(f"{name}: a step is under way; {self._next}() comes next: {_PARTS}")
        before = {"work": "start", "finish": "work"}[what]
        raise RuntimeError(f"{name}: {what}() without a {before}() before it; {_PARTS}")

    # The verbs.

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

    def crosses_ranks(self, bucket: int) -> bool:
        """Whether anything of a bucket crosses ranks."""
        return True

    def advance(self, bucket: int) -> None:
        """Of messages in several hops: end the one under way and start the next."""

    def wait_sent(self, bucket: int) -> None:
        """Gradients of a bucket are about to be written: order the current stream after the messages that read them."""

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

    def work_on(self, bucket: int, scale: float | Tensor) -> None:
        """Work on the gradients of a bucket, multiplied by ``scale``, and start results on their way.

        On a device ``scale`` may be an fp64 scalar there, and what is found there is told to ``verdict``: the host must
        not wait.
        """
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
        return torch.zeros_like(local_of(parameter)) if parameter.grad is None else local_of(parameter.grad)


def find_listed_twice(label: str, parameters: Iterable[Tensor], rank: int) -> Exception | None:
    """torch only warns of a parameter that stands twice in a group; it would be stepped twice."""
    first: dict[int, int] = {}
    for number, parameter in enumerate(parameters):
        if (before := first.setdefault(id(parameter), number)) != number:
            return ValueError(
                f"{label}: parameter {number} of a group is parameter {before} again; list each once (rank {rank})"
            )
    return None


def find_kind_fault(optimizer: str, group: dict[str, Any], *names: str) -> Exception | None:
    """What in a group is no number: ``lr`` (a tensor of one element, too), ``betas`` (two of them) and ``names``."""
    for name in ("lr", *names):
        if fault := find_number_fault(optimizer, name, group.get(name), None, allow="any", tensor=name == "lr"):
            return fault
    betas = group.get("betas")
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        return TypeError(f"{optimizer}: betas must be two numbers, got {show(betas)}")
    return next(filter(None, (find_number_fault(optimizer, "betas", beta, None, allow="any") for beta in betas)), None)


def find_adam_fault(optimizer: str, group: dict[str, Any]) -> Exception | None:
    """What is wrong with the numbers that Adam has, in a group."""
    if fault := find_kind_fault(optimizer, group, "eps", "weight_decay"):
        return fault
    lr, (b1, b2), eps, decay = float(group["lr"]), group["betas"], group["eps"], group["weight_decay"]
    if not all(0 <= value < math.inf for value in (lr, eps, decay)):
        words = f"lr, eps and weight_decay must be finite and not negative, got {lr}, {eps} and {decay}"
        return ValueError(f"{optimizer}: {words}")
    return (
        None if 0 <= b1 < 1 and 0 <= b2 < 1 else ValueError(f"{optimizer}: betas must be in [0, 1), got ({b1}, {b2})")
    )


def first_group_fault(
    optimizer: str, groups: Iterable[dict[str, Any]], find: Callable[[dict[str, Any]], Exception | None], rank: int
) -> Exception | None:
    """The first fault that ``find(group)`` gives, with the rank that found it."""
    for group in groups:
        if (fault := read(optimizer, rank, lambda group=group: find(group))) is not None:  # type: ignore[misc]
            return fault if str(fault).endswith(at(rank)) else type(fault)(f"{fault}{at(rank)}")
    return None


def find_option_fault(optimizer: str, on_nonfinite: object, clip: object, rank: int | None = None) -> Exception | None:
    """What is wrong with ``on_nonfinite`` and ``clip``."""
    if fault := find_choice_fault(optimizer, "on_nonfinite", on_nonfinite, rank, ON_NONFINITE):
        return fault
    if clip is None:
        return None
    if fault := find_number_fault(optimizer, "clip", clip, rank, allow="infinite"):
        return fault
    return None if float(clip) > 0 else ValueError(f"{optimizer}: clip must be > 0, got {clip}{at(rank)}")  # type: ignore[arg-type]
