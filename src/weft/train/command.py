"""`weft train`: read settings, start local ranks or join torchrun's, train, and say what went wrong in one line."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from weft.errors import CommError
from weft.parallel.checkpoint import find_format_fault
from weft.parallel.mesh import make_mesh
from weft.parallel.rendezvous import LocalRank, joined_world
from weft.report.page import write_report
from weft.train.config import TrainConfig, fit_mesh, read_config
from weft.train.metrics import MetricsFile, read_lines
from weft.train.progress import ProgressLine, show_config, traffic_table
from weft.train.run_folder import (
    CHECKPOINTS,
    CONFIG,
    RunLock,
    check_new,
    check_resumable,
    is_run,
    list_checkpoints,
    remove_partial,
    run_of,
    saved_settings,
    step_folder,
    was_begun_by_this_job,
)
from weft.train.run_state import say_what_is_whole
from weft.train.small_file import write_whole
from weft.train.stop_request import StopRequest, status_of
from weft.train.trainer import Trainer, open_data
from weft.world.local_ranks import check_count, run_ranks

T = TypeVar("T")
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
        print(f"train: {words}", file=sys.stderr)


def read_defaults(arguments: Sequence[str]) -> TrainConfig:
    """The settings that flags start from: those of the run to resume, under those of the config file."""
    file = Path(arguments[0]) if arguments and not arguments[0].startswith("-") else None
    given = TrainConfig() if file is None else read_config(file)
    resume, out = _value_of("--resume", arguments) or given.resume, _value_of("--out", arguments) or given.out
    if resume is None or resume == "None":
        return given
    path = Path(out if resume == "auto" else resume)
    with _worded_paths():
        saved = saved_settings(path)
    if saved is None:
        return given
    saved = dataclasses.replace(saved, resume=None)
    if resume == "auto" or is_run(run_of(path)):  # else a checkpoint that lies apart from its run
        saved = dataclasses.replace(saved, out=run_of(path))
    names = {argument.partition("=")[0] for argument in arguments}
    if names & {"--dp", "--cp", "--tp"} or (given.dp, given.cp, given.tp) != (None, 1, 1):
        saved = dataclasses.replace(saved, dp=None, cp=1, tp=1)  # another mesh, not a part of the old one
    if "RANK" in os.environ:
        saved = dataclasses.replace(saved, dp=None)  # as many as there are now
    return saved if file is None else read_config(file, saved)


def _value_of(name: str, arguments: Sequence[str]) -> str | None:
    """What follows a flag, the last time it is there."""
    found = None
    for at, argument in enumerate(arguments):
        if argument.startswith(f"{name}="):
            found = argument.removeprefix(f"{name}=")
        elif argument == name and at + 1 < len(arguments):
            found = arguments[at + 1]
    return found


def start(config: TrainConfig, arguments: Sequence[str]) -> None:
    """Check what can be checked, then train on the ranks there are, or on new local ones."""
    logging.basicConfig(format="%(message)s")
    if int(os.environ.get("RANK", "0")) == 0 and LocalRank.of_environment() is None:
        logging.getLogger("weft.train").setLevel(logging.INFO)  # "reading data", which who started local ranks has said
    config.check()
    if fault := find_format_fault():
        raise fault
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
            _start_ranks(count, arguments, config.grace)
    config = dataclasses.replace(config, dp=shape[0])
    with joined_world(timedelta(seconds=config.timeout)):
        _train(config, shape)


def _start_ranks(count: int, arguments: Sequence[str], grace: float) -> None:
    """Run this same command as ``count`` local ranks, and end as they do."""
    command = [sys.executable, "-P", "-m", "weft.train", *arguments]
    sys.exit(run_ranks(command, count, "train", patience=grace + _SLACK))


def _check_folders(config: TrainConfig) -> None:
    """Nothing of another run or of anybody else is overwritten, and what is resumed is there."""
    if _is_restart(config):
        return
    own = config.resume == "auto" or (config.resume is not None and _same(run_of(config.resume), config.out))
    with _worded_paths():
        if isinstance(config.resume, Path) and not (own and is_run(config.resume)):
            check_resumable(config.resume)
        if not own or not is_run(config.out):
            check_new(config.out)


@contextmanager
def _worded_paths() -> Iterator[None]:
    """A path that cannot be looked at (too long, not allowed) is wrong input."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"train: {error.filename} cannot be read: {error.strerror}; give another path") from None


def _same(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()


def _is_restart(config: TrainConfig) -> bool:
    """Whether torchrun has started the ranks again, after a life that had begun the run."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" and was_begun_by_this_job(config.out)


def _train(config: TrainConfig, shape: tuple[int, int, int]) -> None:
    mesh = make_mesh(shape)
    lock, fault, again = None, None, False
    if mesh.world.rank == 0:
        try:
            _check_folders(config)
            again = _is_restart(config) and bool(list_checkpoints(config.out))
            lock = RunLock(config.out)
        except ValueError as error:
            fault = error
    told = mesh.world.begin("train.folder", metadata=[int(again)], fault=fault).metadata.wait()
    begun = dataclasses.replace(config, resume="auto") if told[0][0] else config  # by another life of the ranks
    try:
        with StopRequest(config.grace) as stop:
            try:
                trainer = Trainer(begun, mesh, lambda: stop.signal)
            except BaseException:
                if lock is not None:
                    lock.undo()
                raise
            try:
                _run(config, trainer)
            finally:
                trainer.close()
    finally:
        if lock is not None:
            lock.close()
    if trainer.ended_by:
        sys.exit(status_of(trainer.ended_by))


def _run(config: TrainConfig, trainer: Trainer) -> None:
    """Take the steps; rank 0 writes and tells of them."""
    if trainer.mesh.world.rank:
        for _ in trainer:
            pass
        return
    try:
        _write_steps(config, trainer)
    except OSError as error:
        path, why = error.filename or config.out, error.strerror or error
        raise RuntimeError(f"train: {path} could not be written: {why}; {say_what_is_whole(config.out)}") from error
    if trainer.ended_by:
        name, saved = signal.Signals(trainer.ended_by).name, step_folder(config.out, trainer.done)
        _say(f"{name}: stopped after step {trainer.done}, saved as {saved}; --resume {config.out} goes on")
        return
    lines, ranks = read_lines(config.out / "metrics.jsonl"), trainer.mesh.world.size
    Console(stderr=True).print(traffic_table(lines, ranks))
    try:
        report = write_report(config.out)
    except (ValueError, OSError) as error:
        raise RuntimeError(
            f"train: all steps are done and saved, but the report could not be written: {error}"
        ) from None
    print(json.dumps({"run": str(config.out), "report": str(report)}))


def _write_steps(config: TrainConfig, trainer: Trainer) -> None:
    (config.out / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
    remove_partial(config.out)
    write_whole(config.out / CONFIG, config.as_json())
    weights = sum(parameter.numel() for name, parameter in trainer.model.named_parameters() if "bigrams" not in name)
    table = config.table_rows * config.width
    facts = {"mesh": f"{trainer.mesh}", "data": trainer.corpus.name, "tokens": len(trainer.corpus.tokens)}
    show_config(config, {**facts, "weights": f"{weights:,} and a table of {table:,}", "from step": trainer.done})
    if trainer.done == config.steps:
        _say(f"step {trainer.done} of {config.steps} is done already; --steps N goes on")
        return
    metrics, line = MetricsFile(config.out, trainer.done), ProgressLine(config, trainer.done)
    try:
        for result in trainer:
            metrics.write(result.line())
            line.show(result)
    finally:
        line.close()
        metrics.close()
