"""Real local ranks: Gloo processes of this machine, started once and sent functions."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

import torch

from weft.comm.axis import Axis
from weft.comm.rendezvous import gloo_world, open_store
from weft.errors import RankError, name_failing_rank

T = TypeVar("T")

GRACE = 10.0  # seconds the other ranks have to end by themselves after one has failed


class ProcessWorld:
    """``ranks`` Gloo processes, kept between calls of `run`. Use it as a context manager.

    The processes are forked from a server that has already imported torch, so that a rank starts in
    milliseconds. The rendezvous store lives in this process, on a port of the loopback that the system chooses.
    """

    def __init__(self, ranks: int, timeout: timedelta = timedelta(minutes=5)) -> None:
        if ranks < 1:
            raise ValueError(f"launch: ranks must be at least 1, got {ranks}")
        self.size = ranks
        self._store = open_store()
        context: Any = multiprocessing.get_context("forkserver" if os.name == "posix" else "spawn")
        if os.name == "posix":
            context.set_forkserver_preload(["weft"])
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
        job = pickle.dumps((fn, args))
        for pipe in self._pipes:
            pipe.send_bytes(job)
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
        raise name_failing_rank(error, failed, self.size) from RankError(f"rank {failed} failed:\n{text}")

    def _read(self, rank: int) -> tuple[bool, Any]:
        try:
            return pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, OSError):
            self._processes[rank].join(timeout=1)
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
    with ProcessWorld(ranks) as world:
        return world.run(fn, *args)


def collect(axis: Axis, value: T) -> list[T]:
    """Everybody's value on every rank, for reports; values are pickled."""
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    call = axis.begin("collect", tell=(len(data),))
    told = call.told.wait()
    parts = call.all_gather(data, [size for (size,) in told]).wait()
    return [pickle.loads(bytes(part.tolist())) for part in parts]


def _serve(pipe: Connection, rank: int, size: int, port: int, timeout: timedelta) -> None:
    """A rank: take functions from the pipe until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=_follow_parent, name="weft parent", daemon=True).start()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    with gloo_world(open_store(port, timeout), rank, size, timeout) as axis:
        while True:
            try:
                fn, args = pickle.loads(pipe.recv_bytes())
                answer: tuple[bool, Any] = (True, fn(axis, *args))
            except (EOFError, OSError):
                return
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
