"""`weft train`: read settings, start ranks or join torchrun's, train until done or stopped, say what went wrong."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from weft.errors import CommError
from weft.parallel.checkpoint import check_format
from weft.parallel.mesh import make_mesh
from weft.parallel.rendezvous import LocalRank, device_of_rank, joined_world
from weft.report.page import write_report
from weft.train import run_folder
from weft.train.config import TrainConfig, fit_mesh, read_config
from weft.train.metrics import MetricsFile, ProgressLine, show_config, traffic_table
from weft.train.trainer import Trainer, open_data
from weft.world.local_ranks import check_count, run_ranks

T = TypeVar("T")
SIGNALS = (signal.SIGTERM, signal.SIGINT)
TOGETHER = 1.0  # seconds within which signals are one: `timeout` sends to a process and to its group
_SLACK = 10.0  # seconds that ranks have beyond their own --grace
WORDED = ("train: ", "OverlappedStep: ")  # errors that say what went wrong and what was kept


def or_exit(action: Callable[[], T]) -> T:
    """Do it; what goes wrong is one line of rank 0, and a status: 2 for wrong input, 1 for the rest."""
    try:
        return action()
    except KeyboardInterrupt:
        _say("stopped; --resume goes on with the newest checkpoint, if there is one")
        sys.exit(130)
    except (ValueError, RuntimeError, OSError) as error:
        if not isinstance(error, ValueError | OSError | CommError) and not f"{error}".startswith(WORDED):
            raise  # a fault of ours or of torch's: the traceback is what helps
        _say(f"{error}".removeprefix("train: "))
        sys.exit(2 if isinstance(error, ValueError) else 1)


def _say(words: str) -> None:
    """A line of rank 0."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"train: {words}", file=sys.stderr, flush=True)


def read_defaults(arguments: Sequence[str]) -> TrainConfig:
    """The settings that flags start from: those of the run to resume, under those of the config file."""
    file = Path(arguments[0]) if arguments and not arguments[0].startswith("-") else None
    given = TrainConfig() if file is None else read_config(file)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--resume", "--out"):
        parser.add_argument(name, nargs="?")
    flags = parser.parse_known_args(arguments)[0]
    resume, out = flags.resume or given.resume, flags.out or given.out
    if resume is None or resume == "None":
        return given
    path = Path(out if resume == "auto" else resume)
    with _worded_paths():
        saved = run_folder.saved_settings(path)
    if saved is None:
        return given
    saved = dataclasses.replace(saved, resume=None)
    if resume == "auto" or run_folder.is_run(run_folder.run_of(path)):  # else a checkpoint that lies apart from its run
        saved = dataclasses.replace(saved, out=run_folder.run_of(path))
    names = {argument.partition("=")[0] for argument in arguments}
    if names & {"--dp", "--cp", "--tp"} or (given.dp, given.cp, given.tp) != (None, 1, 1):
        saved = dataclasses.replace(saved, dp=None, cp=1, tp=1)  # another mesh, not a part of the old one
    if "RANK" in os.environ:
        saved = dataclasses.replace(saved, dp=None)  # as many as there are now
    return saved if file is None else read_config(file, saved)


def start(config: TrainConfig, arguments: Sequence[str]) -> None:
    """Check what can be checked, then train on the ranks there are, or on new local ones."""
    logging.basicConfig(format="%(message)s")
    if int(os.environ.get("RANK", "0")) == 0 and LocalRank.of_environment() is None:
        logging.getLogger("weft.train").setLevel(logging.INFO)  # "reading data", which who started local ranks has said
    config.check()
    check_format()
    if config.device == "sim":
        _use_simulated_device(config)
    ranks = int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else None
    shape = fit_mesh(config.dp, config.cp, config.tp, ranks)
    if config.batch % shape[0]:
        raise ValueError(f"train: --batch {config.batch} must be a multiple of the {shape[0]} data ranks (--dp)")
    if config.wrap == "ddp" and config.tp > 1:
        raise ValueError("train: --wrap ddp takes whole weights, so --tp 1; --wrap fsdp2 takes both")
    if ranks is None:
        count = shape[0] * shape[1] * shape[2]
        check_count(count, "train: --dp x --cp x --tp")
        _check_folders(config)
        if count > 1:
            open_data(config)
            command = [sys.executable, "-P", "-m", "weft.train", *arguments]
            sys.exit(run_ranks(command, count, "train", patience=config.grace + _SLACK))  # and end as they do
    config = dataclasses.replace(config, dp=shape[0])
    with joined_world(timedelta(seconds=config.timeout), config.device):
        _train(config, shape)


def _use_simulated_device(config: TrainConfig) -> None:
    simulated = importlib.import_module("weft.world.simulated")  # it stands on private names of one torch
    if "RANK" in os.environ or (config.dp or 1) * config.cp * config.tp > 1:
        raise ValueError("train: --device sim is for one process; virtual ranks have it in weft.world.VirtualWorld")
    if (why := simulated.misfit()) is not None:
        raise ValueError(f"train: --device sim: {why}")
    simulated.install(whole_process=True)


def _check_folders(config: TrainConfig) -> None:
    """Nothing of another run or of anybody else is overwritten, and what is resumed is there."""
    if _is_restart(config):
        return
    own = config.resume == "auto" or (
        config.resume is not None and run_folder.run_of(config.resume).resolve() == config.out.resolve()
    )
    with _worded_paths():
        if isinstance(config.resume, Path) and not (own and run_folder.is_run(config.resume)):
            run_folder.check_resumable(config.resume)
        if not own or not run_folder.is_run(config.out):
            run_folder.check_new(config.out)


@contextmanager
def _worded_paths() -> Iterator[None]:
    """A path that cannot be looked at (too long, not allowed) is wrong input."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"train: {error.filename} cannot be read: {error.strerror}; give another path") from None


def _is_restart(config: TrainConfig) -> bool:
    """Whether torchrun has started the ranks again, after a life that had begun the run."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" and run_folder.was_begun_by_this_job(config.out)


def _train(config: TrainConfig, shape: tuple[int, int, int]) -> None:
    mesh = make_mesh(shape, device_of_rank(config.device).type)
    lock, fault, again = None, None, False
    if mesh.world.rank == 0:
        try:
            _check_folders(config)
            again = _is_restart(config) and bool(run_folder.list_checkpoints(config.out))
            lock = run_folder.RunLock(config.out)
        except ValueError as error:
            fault = error
    restarts = mesh.world.begin("train.folder", metadata=[int(again)], fault=fault).metadata.wait()
    begun = dataclasses.replace(config, resume="auto") if restarts[0][0] else config  # by another life of the ranks
    with ExitStack() as at_end:
        if lock is not None:
            at_end.callback(lock.close)
        stop = at_end.enter_context(StopRequest(config.grace))
        try:
            trainer = Trainer(begun, mesh, lambda: stop.signal)
        except BaseException:
            if lock is not None:
                lock.undo()
            raise
        at_end.callback(trainer.close)
        _run(config, trainer)
    if trainer.ended_by:
        sys.exit(128 + trainer.ended_by)


def _run(config: TrainConfig, trainer: Trainer) -> None:
    """Take the steps; rank 0 writes and shows them."""
    if trainer.mesh.world.rank:
        for _ in trainer:
            pass
        return
    try:
        _write_steps(config, trainer)
    except OSError as error:
        path, why = error.filename or config.out, error.strerror or error
        whole = run_folder.say_what_is_whole(config.out)
        raise RuntimeError(f"train: {path} could not be written: {why}; {whole}") from error
    if trainer.ended_by:
        name, saved = signal.Signals(trainer.ended_by).name, run_folder.step_folder(config.out, trainer.done)
        _say(f"{name}: stopped after step {trainer.done}, saved as {saved}; --resume {config.out} goes on")
        return
    lines, ranks = run_folder.read_lines(config.out / "metrics.jsonl"), trainer.mesh.world.size
    Console(stderr=True).print(traffic_table(lines, ranks))
    try:
        report = write_report(config.out)
    except (ValueError, OSError) as error:
        words = "train: all steps are done and saved, but the report could not be written"
        raise RuntimeError(f"{words}: {error}") from None
    print(json.dumps({"run": str(config.out), "report": str(report)}))


def _write_steps(config: TrainConfig, trainer: Trainer) -> None:
    (config.out / run_folder.CHECKPOINTS).mkdir(parents=True, exist_ok=True)
    run_folder.remove_partial(config.out)
    run_folder.write_whole(config.out / run_folder.CONFIG, config.as_json())
    weights = sum(parameter.numel() for name, parameter in trainer.model.named_parameters() if "bigrams" not in name)
    table = config.table_rows * config.width
    facts = {"mesh": f"{trainer.mesh}", "data": trainer.corpus.name, "tokens": len(trainer.corpus.tokens)}
    show_config(config, {**facts, "weights": f"{weights:,} and a table of {table:,}", "from step": trainer.done})
    if trainer.done == config.steps:
        _say(f"step {trainer.done} of {config.steps} is done already; --steps N goes on")
        return
    with closing(MetricsFile(config.out, trainer.done)) as metrics, closing(ProgressLine(config, trainer.done)) as line:
        for result in trainer:
            metrics.write(result.line())
            line.show(result)


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
        # Handlers do nothing: signals wake the thread.
        taken = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]  # by a shell or nohup
        self._before: dict[int, Any] = {number: signal.signal(number, lambda *_: None) for number in taken}
        self._fd_before = signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="weft-signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
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
                _end_now(
                    self.signal, f"{name}: not done after {self._seconds:g} s (--grace); ended without a checkpoint"
                )
            received = self._woken.recv(64)
            if not received:
                return
            for number in (one for one in received if one in SIGNALS):
                if not self.signal:
                    self.signal, first = number, time.monotonic()
                elif time.monotonic() - first > TOGETHER:
                    _end_now(number, f"{signal.Signals(number).name} again: ended without a checkpoint")


def _end_now(number: int, words: str) -> None:
    _say(words)
    os._exit(128 + number)
