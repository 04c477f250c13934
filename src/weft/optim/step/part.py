"""`StepPart`: an optimizer that steps by itself and as a part of an `OverlappedStep`; what its options must be."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from weft.comm.arguments import at, find_choice_fault, find_number_fault, read, show
from weft.optim.step.run import StepRun, Unit
from weft.optim.step.verbs import PartVerbs

ON_NONFINITE = ("raise", "skip")
_PARTS = "the parts of a step are start(), work() and finish()"


def call_closure(closure: Callable[[], Any] | None) -> Any:
    """What a ``closure`` returns, with gradients, as torch's optimizers call it; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class StepPart(PartVerbs):
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
    raises does the same, and is raised on every rank; where others wait for results, compute these in `attempt`, so
    that something is sent all the same.
    """

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
        run = StepRun(type(self).__name__, {type(self).__name__: self}, (self._clip, self._on_nonfinite))
        run.start(self._units(), getattr(self, "found_inf", None))
        self._run, self._next = run, "work"

    @torch.no_grad()
    def work(self) -> None:
        """Step what this rank owns, as gradients arrive, and start the results on their way back."""
        self._expect("work")
        self._next = "start"  # should the work fail
        assert self._run is not None
        self.norm = self._run.work(self._units(), self._clip, getattr(self, "grad_scale", None))
        self._next = "finish"

    @torch.no_grad()
    def finish(self) -> None:
        """Take what comes back; or raise, or with ``on_nonfinite="skip"`` log, why nothing has been changed."""
        self._expect("finish")
        self._next = "start"
        assert self._run is not None
        run, self._run = self._run, None
        run.finish(self._on_nonfinite)

    def _expect(self, what: str) -> None:
        if what == self._next:
            return
        name = type(self).__name__
        if what == "start":
            raise RuntimeError(f"{name}: a step is under way; {self._next}() comes next: {_PARTS}")
        before = {"work": "start", "finish": "work"}[what]
        raise RuntimeError(f"{name}: {what}() without a {before}() before it; {_PARTS}")

    def _units(self) -> list[Unit]:
        return [Unit(self, bucket, "") for bucket in range(len(self.buckets()))]


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


def list_params(optimizer: str, params: Any, rank: int) -> list[Any] | Exception:
    """``params`` as a list, or what torch's optimizers say of what is none."""
    if isinstance(params, Tensor):
        return TypeError(f"{optimizer}: params must be an iterable of tensors or groups, got one tensor{at(rank)}")
    listed = read(optimizer, rank, lambda: list(params))
    if isinstance(listed, Exception):
        return TypeError(f"{optimizer}: params must be an iterable of tensors or groups, got {show(params)}{at(rank)}")
    return listed or ValueError(f"{optimizer}: params are empty{at(rank)}")
