"""A process in which Triton kernels run without a GPU: Triton asks for its interpreter when it is imported."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch


class Interpreter:
    """Runs functions of test modules, one at a time, with ``TRITON_INTERPRET=1``."""

    def __init__(self, timeout: float = 1100) -> None:  # pytest's own limit of a test comes first
        self._timeout = timeout

    def __enter__(self) -> Interpreter:
        before = os.environ.get("TRITON_INTERPRET")
        os.environ["TRITON_INTERPRET"] = "1"
        try:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(1, mp_context=context, initializer=torch.set_num_threads, initargs=(1,))
            assert self._pool.submit(os.getpid).result(self._timeout) != os.getpid()
        finally:
            if before is None:
                del os.environ["TRITON_INTERPRET"]
        return self

    def __exit__(self, *what: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def run(self, fn: Callable[..., Any], *args: Any) -> Any:
        """``fn(*args)`` in the process; what it raises is raised here."""
        return self._pool.submit(fn, *args).result(self._timeout)
