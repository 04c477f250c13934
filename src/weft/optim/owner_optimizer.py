"""`OwnerOptimizer`: an optimizer whose step has three parts, gradients to owners, work, results back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch

logger = logging.getLogger(__name__)
ON_NONFINITE = ("raise", "skip")
_PARTS = "the parts of a step are start(), work() and finish()"


class OwnerOptimizer(torch.optim.Optimizer):
    """What `REKLS` and `ShardedAdamW` share: the order of the parts, closures, and steps that change nothing.

    A subclass has `_start` (compare gradients over the ranks and start them to their owners), `_work` (step what this
    rank owns and start the results on their way back) and `_finish` (take what comes back). Nothing may be changed
    before it is known that all ranks can make the step; `_finish` returns why it was not made.
    """

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any], on_nonfinite: str, rank: int) -> None:
        self._set_up(on_nonfinite, rank)
        super().__init__(params, defaults)

    def _set_up(self, on_nonfinite: str, rank: int) -> None:
        if on_nonfinite not in ON_NONFINITE:
            name = type(self).__name__
            raise ValueError(f"{name}: on_nonfinite {on_nonfinite!r} is not one of {', '.join(ON_NONFINITE)}")
        self._on_nonfinite, self._rank = on_nonfinite, rank
        self._next = "start"  # the part that may be called

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. Every rank must call it; a ``closure`` is called on each of them."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.start()
        self.work()
        self.finish()
        return loss

    @torch.no_grad()
    def start(self) -> None:
        """Compare gradients over the ranks, then start them to their owners. Do not touch them until `finish`."""
        if self._next != "start":
            raise RuntimeError(f"{type(self).__name__}: a step is under way; {self._next}() comes next: {_PARTS}")
        self._start()
        self._next = "work"

    @torch.no_grad()
    def work(self) -> None:
        """Step what this rank owns, as gradients arrive, and start the results on their way back."""
        if self._next != "work":
            raise RuntimeError(f"{type(self).__name__}: work() without a start() before it; {_PARTS}")
        self._next = "start"  # should the work fail
        self._work()
        self._next = "finish"

    @torch.no_grad()
    def finish(self) -> None:
        """Take what comes back; or raise, or with ``on_nonfinite="skip"`` log, why nothing has been changed."""
        if self._next != "finish":
            raise RuntimeError(f"{type(self).__name__}: finish() without a work() before it; {_PARTS}")
        self._next = "start"
        reason = self._finish()
        if reason is not None:
            words = f"{type(self).__name__}: {reason}; weights and state are as before"
            if self._on_nonfinite == "raise":
                raise RuntimeError(words)
            logger.warning("%s: the step is skipped (rank %d)", words, self._rank)

    def _start(self) -> None:
        raise NotImplementedError(f"{type(self).__name__} has no _start")

    def _work(self) -> None:
        raise NotImplementedError(f"{type(self).__name__} has no _work")

    def _finish(self) -> str | None:
        raise NotImplementedError(f"{type(self).__name__} has no _finish")
