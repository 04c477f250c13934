"""`weft demo`: the trainer on local ranks and in one process, the same curve, and what plain pieces would have sent."""

from __future__ import annotations

import dataclasses
import json
import sys
from itertools import chain, count
from pathlib import Path
from textwrap import indent

from rich.console import Console

import weft
from weft.bench.train.plain import count_plain_bytes
from weft.report.page import write_report
from weft.train.config import TrainConfig
from weft.train.metrics import compare_table
from weft.train.run_folder import read_lines
from weft.train.sample import generate, load_model
from weft.world.local_ranks import run_ranks


def run_demo(out: Path, steps: int, ranks: int) -> None:
    """What `weft demo` does; the flags are described there."""
    if ranks not in (2, 4):
        raise ValueError(f"demo: --ranks must be 2 or 4, got {ranks}")
    folder = free_folder(out)
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ValueError(f"demo: --out {folder} cannot be made: {error.strerror}") from None
    config = TrainConfig(
        steps=steps, cp=2, dp=ranks // 2, length=2048, batch=2, checkpoint_every=0, validate_every=max(1, steps // 4)
    )
    shared, alone = folder / f"{ranks}-ranks", folder / "one-process"
    _say(f"1. {ranks} ranks: {config.dp} data-parallel x {config.cp} context-parallel")
    _train(dataclasses.replace(config, out=shared))
    _say("2. the same run in one process")
    _train(dataclasses.replace(config, out=alone, cp=1, dp=1))
    _say(f"3. what plain pieces send in a step: they run once, on {ranks} ranks")
    plain = weft.launch(count_plain_bytes, ranks, config)[0]
    (shared / "plain.json").write_text(json.dumps(plain))
    lines = list(read_lines(shared / "metrics.jsonl"))
    console = Console()
    console.print(compare_table(lines, plain["bytes"], plain["methods"], ranks))
    beside = list(read_lines(alone / "metrics.jsonl"))
    apart = max(abs(one["loss"] - other["loss"]) / other["loss"] for one, other in zip(lines, beside, strict=True))
    print(
        f"loss {lines[0]['loss']:.3f} -> {lines[-1]['loss']:.3f}; the two runs are at most {apart:.1e} apart (relative)"
    )
    written = bytes(generate(load_model(shared), list(b"def "), 160, 0.6, 40, 0)).decode(errors="replace")
    print(f"the model writes:\n{indent('def ' + written, '    ', lambda line: True)}")
    print(f"report: {write_report(shared, beside=alone, out=folder / 'report.html').resolve()}")


def free_folder(wanted: Path) -> Path:
    """``wanted``, or the first of wanted-2, wanted-3, ... that is not there."""
    numbered = (wanted.with_name(f"{wanted.name}-{number}") for number in count(2))
    return next(folder for folder in chain([wanted], numbered) if not folder.exists())


def _train(config: TrainConfig) -> None:
    """By the command itself, whose progress is shown; the settings go through a file, as a user's would."""
    config.out.mkdir()
    path = config.out.with_suffix(".json")
    path.write_text(config.as_json())
    command = [sys.executable, "-P", "-m", "weft.train", str(path)]
    status = run_ranks(command, (config.dp or 1) * config.cp, "demo", quiet=True)
    if status:
        _say(f"demo: `weft train {path}` ended with status {status}")
        sys.exit(status)


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)
