"""`StopRequest`: SIGTERM and Ctrl-C as a request that training looks at between steps."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)
TOGETHER = 1.0  # seconds within which signals are one: `timeout` sends to a process and to its group


def status_of(number: int) -> int:
    """The exit status of a run that a signal ended.

    >>> status_of(signal.SIGTERM), status_of(signal.SIGINT)
    (143, 130)
    """
    return 128 + number


class StopRequest:
    """Within this context the first SIGTERM or SIGINT is noted in ``signal``; the next one ends the process at once.

    ``seconds``: how long the process may go on after the first; then it ends all the same. A thread sees to both, as
    Python's own handlers wait for the main thread, which may stand in a call of torch. Main thread only.

    >>> with StopRequest(25.0) as stop:
    ...     stop.signal
    0
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.signal = 0

    def __enter__(self) -> StopRequest:
        self._wakes, self._woken = socket.socketpair()
        self._wakes.setblocking(False)
        taken = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]  # by a shell or nohup
        self._before: dict[int, Any] = {number: signal.signal(number, _leave_to_thread) for number in taken}
        self._fd_before = signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="weft-signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(self._fd_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._wakes.close()  # the thread reads the end of it
        self._thread.join()
        self._woken.close()

    def _watch(self) -> None:
        first = 0.0
        while True:
            left = max(0.0, first + self._seconds - time.monotonic()) if self.signal else None
            if not select.select([self._woken], [], [], left)[0]:
                name = signal.Signals(self.signal).name
                _end(self.signal, f"{name}: not done after {self._seconds:g} s (--grace); ended without a checkpoint")
            told = self._woken.recv(64)
            if not told:
                return
            for number in told:
                if number not in SIGNALS:
                    continue
                if not self.signal:
                    self.signal, first = number, time.monotonic()
                elif time.monotonic() - first > TOGETHER:
                    _end(number, f"{signal.Signals(number).name} again: ended without a checkpoint")


def _leave_to_thread(number: int, frame: FrameType | None) -> None:
    """Signals wake the thread; nothing is left to do for the main one."""


def _end(number: int, words: str) -> None:
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"train: {words}", file=sys.stderr, flush=True)
    os._exit(status_of(number))
