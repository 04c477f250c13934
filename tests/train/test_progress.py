"""What a person sees of a run that takes long."""

from __future__ import annotations

import io
import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest

from weft.train import corpus
from weft.train.config import TrainConfig
from weft.train.metrics import FAMILIES, ProgressLine, StepResult, traffic_table

FIGURES = (dict.fromkeys(FAMILIES, 1), dict.fromkeys(FAMILIES, 0.01), 2.0)


def show_steps(config: TrainConfig, done: int, seconds: float) -> None:
    """Steps that take ``seconds`` each, with a validation loss at every fiftieth."""
    now = [1000.0]
    line = ProgressLine(config, done, lambda: now[0])
    for step in range(done + 1, config.steps + 1):
        now[0] += seconds
        result = StepResult(step, 3.0, 1.0, 100, *FIGURES)
        line.show(result if step % 50 else replace(result, valid_loss=2.5))
    line.close()


def test_lines_by_time(capsys: pytest.CaptureFixture[str]) -> None:
    """The first step, then one every ten seconds, validation losses and the last step; with the time that is left."""
    show_steps(TrainConfig(steps=103), 2, 2.0)
    lines = capsys.readouterr().err.splitlines()
    steps = [int(re.match(r"step (\d+)/103  loss 3.0000  50 tokens/s", line)[1]) for line in lines]  # type: ignore[index]
    assert steps == [3, *range(8, 49, 5), 50, *range(55, 96, 5), 100, 103]
    assert [line for line in lines if "validation loss 2.5000" in line] == [lines[steps.index(50)], lines[-2]]
    assert lines[0].endswith("ETA 0:03:20") and lines[-1].endswith("ETA 0:00:00")


def test_quick_steps_say_little(capsys: pytest.CaptureFixture[str]) -> None:
    show_steps(TrainConfig(steps=49), 0, 0.001)
    assert [line.split()[1] for line in capsys.readouterr().err.splitlines()] == ["1/49", "49/49"]


def test_validation_losses_stay_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "200")
    show_steps(TrainConfig(steps=100), 0, 1.0)
    kept = [line for line in screen.getvalue().splitlines() if "validation loss 2.5000" in line]
    assert ["step 50/100" in line for line in kept] == [True, False] and "step 100/100" in kept[1]


def test_reading_is_said_before_it_is_done(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text").write_text("text")
    (tmp_path / "a.bin").write_bytes(bytes(64))
    seen: list[int] = []
    append = corpus._append_text

    def look(*arguments: object) -> object:
        seen.append(len(caplog.records))
        return append(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(corpus, "_append_text", look)
    with caplog.at_level(logging.INFO, logger="weft.train"):
        for name in ("text", "a.bin", "."):
            corpus.open_corpus(tmp_path / name)
    assert [record.getMessage() for record in caplog.records] == [
        f"train: reading data {tmp_path / name}" for name in ("text", "a.bin", ".")
    ]
    assert seen == [1, 3, 3]


def test_a_table_of_lines_that_are_not_whole() -> None:
    assert traffic_table([{"step": 1, "loss": 1.0}, {"step": 2, "seconds": "x"}], 1).row_count == len(FAMILIES)
