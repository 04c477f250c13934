"""Lanes of real devices: where a multi-round schedule runs while the main computation goes on.

On CPU a background thread, on CUDA a side stream. (In a virtual world it is a forked clock: `virtual`.)
Schedules on threads run side by side; on a stream they run in the order they were started.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from weft.comm.wire import Pending

T = TypeVar("T")


def without_gradients() -> Any:
    """The context of a lane that the caller starts now: in inference mode, if the caller is, as its tensors are."""
    return torch.inference_mode() if torch.is_inference_mode_enabled() else torch.no_grad()


class ThreadLanes:
    """Background threads, as many as there are schedules under way. They never keep the process from ending."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)

    def start(self, schedule: Callable[[], T]) -> Pending[T]:
        done = threading.Event()
        outcome: dict[str, Any] = {}
        context = without_gradients()

        def job() -> None:
            try:
                with context:
                    outcome["value"] = schedule()
            except BaseException as error:  # raised in the caller, who waits for it
                outcome["error"] = error
            done.set()

        def finish() -> T:
            done.wait()  # ends: every wait inside the schedule has the group's timeout
            if "error" in outcome:
                raise outcome["error"]
            return outcome["value"]

        if not self._idle.acquire(blocking=False):
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        self._jobs.put(job)
        return Pending(finish)

    def _work(self) -> None:
        while True:
            self._jobs.get()()
            self._idle.release()


class StreamLane:
    """A side stream. Untested here: no CUDA device on the machines this is developed on."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def start(self, schedule: Callable[[], T]) -> Pending[T]:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with without_gradients(), torch.cuda.stream(self._stream):
            value = schedule()

        def finish() -> T:
            # Holding `schedule` until here keeps its inputs alive while the side stream reads them.
            assert schedule is not None
            main = torch.cuda.current_stream(self._stream.device)
            main.wait_stream(self._stream)
            for tensor in value if isinstance(value, tuple | list) else [value]:
                if isinstance(tensor, torch.Tensor):
                    tensor.record_stream(main)
            return value

        return Pending(finish)
