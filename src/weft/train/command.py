"""`weft train`: read settings, start local ranks or join torchrun's, train, and say what went wrong in one line."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from weft.comm.checkpoint import find_format_fault
from weft.comm.mesh import make_mesh
from weft.comm.rendezvous import joined_world
from weft.errors import CommError
from weft.train.config import TrainConfig, fit_mesh, read_config
from weft.train.metrics import MetricsFile, read_lines
from weft.train.progress import ProgressLine, show_config, traffic_table
from weft.train.report import write_report
from weft.train.run_folder import CHECKPOINTS, find_checkpoint, forget_halves, list_checkpoints
from weft.train.trainer import Trainer, open_data
from weft.world.local_ranks import run_ranks

T = TypeVar("T")
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
    base = TrainConfig()
    names = {argument.partition("=")[0] for argument in arguments}
    for at, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == "--resume" and (equals or at + 1 < len(arguments)):
            run = run_of(Path(value if equals else arguments[at + 1]))
            if (run / "config.json").is_file():
                base = dataclasses.replace(read_config(run / "config.json"), out=run, resume=None)
                if names & {"--dp", "--cp", "--tp"}:  # another mesh, not a part of the old one
                    base = dataclasses.replace(base, dp=None, cp=1, tp=1)
    if arguments and not arguments[0].startswith("-"):
        base = read_config(Path(arguments[0]), base)
    return base


def run_of(path: Path) -> Path:
    """The folder of a run, of which ``path`` may be a checkpoint."""
    return path.parent.parent if path.parent.name == CHECKPOINTS else path


def start(config: TrainConfig, arguments: Sequence[str]) -> None:
    """Check what can be checked, then train on the ranks there are, or on new local ones."""
    logging.basicConfig(format="%(message)s")
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
        _check_folders(config)
        open_data(config)
        count = shape[0] * shape[1] * shape[2]
        if count > 1:
            _start_ranks(count, arguments)
    config = dataclasses.replace(config, dp=shape[0])
    with joined_world(timedelta(seconds=config.timeout)):
        _train(config, shape)


def _start_ranks(count: int, arguments: Sequence[str]) -> None:
    """Run this same command as ``count`` local ranks, and end as they do."""
    sys.exit(run_ranks([sys.executable, "-P", "-m", "weft.train", *arguments], count, "train"))


def _check_folders(config: TrainConfig) -> None:
    """Nothing of another run is overwritten, and what is resumed is there."""
    if config.resume is not None:
        find_checkpoint(config.resume)
        if run_of(config.resume).resolve() == config.out.resolve():
            return
    if config.out.exists() and not config.out.is_dir():
        raise ValueError(f"train: --out {config.out} is a file; give another folder")
    if (config.out / "config.json").exists() or list_checkpoints(config.out):
        raise ValueError(
            f"train: --out {config.out} holds a run already; --resume {config.out} goes on with it, another --out "
            f"leaves it alone"
        )


def _was_restarted() -> bool:
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def _restarted(config: TrainConfig) -> TrainConfig:
    """After torchrun has started the ranks again: go on with the newest checkpoint of the run itself."""
    if _was_restarted() and list_checkpoints(config.out):
        return dataclasses.replace(config, resume=config.out)
    return config


def _train(config: TrainConfig, shape: tuple[int, int, int]) -> None:
    mesh = make_mesh(shape)
    first, fault = mesh.world.rank == 0, None
    if first and not _was_restarted():
        try:
            _check_folders(config)
        except ValueError as error:
            fault = error
    mesh.world.begin("train.folder", tell=[], fault=fault).told.wait()
    trainer = Trainer(_restarted(config), mesh)
    if not first:
        for _ in trainer:
            pass
        return
    (config.out / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
    forget_halves(config.out)
    (config.out / "config.json").write_text(config.as_json())
    weights = sum(parameter.numel() for name, parameter in trainer.model.named_parameters() if "bigrams" not in name)
    table = config.table_rows * config.width
    facts = {"mesh": f"{mesh}", "data": trainer.corpus.name, "tokens": len(trainer.corpus.tokens)}
    show_config(config, {**facts, "weights": f"{weights:,} and a table of {table:,}", "from step": trainer.done})
    metrics, line = MetricsFile(config.out, trainer.done), ProgressLine(config, trainer.done)
    try:
        for result in trainer:
            metrics.write(result.line())
            line.show(result)
    finally:
        line.close()
        metrics.close()
    Console(stderr=True).print(traffic_table(read_lines(config.out / "metrics.jsonl"), mesh.world.size))
    print(json.dumps({"run": str(config.out), "report": str(write_report(config.out))}))
