"""Real local ranks: Gloo processes of this machine, started once and sent functions."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

import torch

from weft.comm.axis import Axis
from weft.comm.rounds import gather_bytes
from weft.errors import RankError, name_failing_rank
from weft.parallel.rendezvous import gloo_world, open_store
from weft.parts import PUBLIC
from weft.world.local_ranks import GRACE, check_count

T = TypeVar("T")

UNGUARDED = 113  # exit status of a rank whose import of the user's script has come to `launch` again


class ProcessWorld:
    """``ranks`` Gloo processes, kept between calls of `run`. Use it as a context manager.

    The processes are forked from a server that has already imported torch, so that a rank starts in
    milliseconds. The rendezvous store lives in this process, on a port of the loopback that the system chooses.
    """

    def __init__(self, ranks: int, timeout: timedelta = timedelta(minutes=5)) -> None:
        _leave_if_importing()
        check_count(ranks, "launch")
        self.size = ranks
        self._store = open_store()
        context: Any = multiprocessing.get_context("forkserver" if os.name == "posix" else "spawn")
        if os.name == "posix":
            context.set_forkserver_preload(list(PUBLIC))
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        try:
            for rank in range(ranks):
                self._start(context, rank, timeout)
        except BaseException:  # Ctrl-C too: leave nobody behind
            self.close()
            raise

    def _start(self, context: Any, rank: int, timeout: timedelta) -> None:
        ours, theirs = context.Pipe()
        arguments = (theirs, rank, self.size, self._store.port, timeout)
        process = context.Process(target=_serve, args=arguments, name=f"rank {rank}", daemon=True)
        process.start()
        theirs.close()
        self._pipes.append(ours)
        self._processes.append(process)

    def run(self, fn: Callable[..., T], *args: Any) -> list[T]:
        """``fn(axis, *args)`` on every rank; results in rank order, or the first failure with its traceback.

        ``fn`` and ``args`` must be picklable (a function of a module). After a failure the ranks that hang
        on it are stopped, and the world with them.
        """
        return self._run(_pickled_job(fn, args))

    def _run(self, job: bytes) -> list[Any]:
        for pipe in self._pipes:
            try:
                pipe.send_bytes(job)
            except OSError:  # that rank is gone: it is read of below
                pass
        answers: dict[int, tuple[bool, Any]] = {}
        failed: int | None = None
        deadline: float | None = None
        while len(answers) < self.size and (deadline is None or time.monotonic() < deadline):
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in answers]
            ready = wait(waiting, timeout=0.5)
            for rank in [rank for rank, pipe in enumerate(self._pipes) if pipe in ready]:
                answers[rank] = self._read(rank)
                if failed is None and not answers[rank][0]:
                    failed, deadline = rank, time.monotonic() + GRACE
        if failed is None:
            return [answers[rank][1] for rank in range(self.size)]
        if len(answers) < self.size:
            self.close()
        error, text = answers[failed][1]
        if text == NO_GUARD:
            self.close()
            raise error from None
        raise name_failing_rank(error, failed, self.size) from RankError(f"rank {failed} failed:\n{text}")

    def _read(self, rank: int) -> tuple[bool, Any]:
        try:
            return pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, OSError):
            self._processes[rank].join(timeout=1)
            if self._processes[rank].exitcode == UNGUARDED:
                return False, (RuntimeError(NO_GUARD), NO_GUARD)
            words = f"the process of rank {rank} ended with exit code {self._processes[rank].exitcode}"
            return False, (RankError(words), words)

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        end = time.monotonic() + 2
        for process in self._processes:
            process.join(timeout=max(0.0, end - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()

    def __enter__(self) -> ProcessWorld:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def launch(fn: Callable[..., T], ranks: int, *args: Any) -> list[T]:
    """Run ``fn(axis, *args)`` on ``ranks`` real Gloo processes of this machine; results in rank order.

    The function that runs in a `VirtualWorld` runs here unchanged. The first failing rank's exception is
    raised, with that rank's traceback as its cause.

        def my_rank(axis):
            return weft.exclusive_scan(torch.ones(2, 2), group=axis)

        if __name__ == "__main__":
            print(weft.launch(my_rank, 4))
    """
    _leave_if_importing()
    job = _pickled_job(fn, args)  # before anything starts
    with ProcessWorld(ranks) as world:
        return world._run(job)


NO_GUARD = (
    "launch: ranks import the script that starts them, and it called launch again; put the call under "
    '`if __name__ == "__main__":`'
)


def _leave_if_importing() -> None:
    """A rank that imports the user's script must not start ranks: end it, and let the one who started it say why."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        os._exit(UNGUARDED)


def _pickled_job(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """What is sent to ranks; a TypeError for what cannot be, or what they could not find."""
    name = getattr(fn, "__qualname__", repr(fn))
    file = getattr(sys.modules["__main__"], "__file__", None)
    # Without a file (a notebook, -c) ranks start, but cannot know what was defined there; of <stdin> they cannot start.
    if (getattr(fn, "__module__", None) == "__main__") if file is None else not os.path.exists(file):
        raise TypeError(
            f"launch: {name} is called from a notebook or from standard input, which ranks cannot import; put it into "
            f"a file, or run it in a weft.world.VirtualWorld"
        )
    try:
        return pickle.dumps((fn, args))
    except Exception as error:  # whatever an argument's own pickling raises
        raise TypeError(
            f"launch: {name} and its arguments are sent to the ranks by pickle: {error}; functions must be defined at "
            f"the top level of a file"
        ) from None


def _loaded_job(job: bytes) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    try:
        return pickle.loads(job)
    except (AttributeError, ImportError) as error:
        raise TypeError(
            f"launch: a rank cannot import what it was sent: {error}; functions and classes must be defined at the top "
            f"level of a file that it can import"
        ) from None


def collect(axis: Axis, value: T) -> list[T]:
    """Everybody's value on every rank, for reports; values are pickled."""
    return [pickle.loads(data) for data in gather_bytes(axis, "collect", pickle.dumps(value))]


def _serve(pipe: Connection, rank: int, size: int, port: int, timeout: timedelta) -> None:
    """A rank: take functions from the pipe until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=_follow_parent, name="weft parent", daemon=True).start()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    with gloo_world(open_store(port, timeout), rank, size, timeout) as axis:
        while True:
            try:
                job = pipe.recv_bytes()
            except (EOFError, OSError):
                return
            try:
                fn, args = _loaded_job(job)
                answer: tuple[bool, Any] = (True, fn(axis, *args))
            except BaseException as error:
                answer = (False, (error, traceback.format_exc()))
            try:
                pipe.send_bytes(_pickled(answer))
            except OSError:  # nobody waits for it any more
                return


def _follow_parent() -> None:
    """End with the process that started this rank, however it ends and whatever this rank waits for."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _pickled(answer: tuple[bool, Any]) -> bytes:
    try:
        data = pickle.dumps(answer)
        pickle.loads(data)  # some exceptions pickle but do not come back
        return data
    except Exception as error:
        ok, value = answer
        words = f"the result cannot be pickled: {error}" if ok else f"{value[0]!r}"
        return pickle.dumps((False, (RankError(words), words if ok else value[1])))
