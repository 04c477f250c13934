"""Which checkpoints are of one line of training, and whose files are touched."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import signal
from pathlib import Path

import pytest
from small_run import small_config

from weft.train.run_folder import list_checkpoints, read_lines


def steps_in(run: Path) -> list[int]:
    return [line["step"] for line in read_lines(run / "metrics.jsonl")]


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_going_back_keeps_the_new_work_and_the_old(call, tmp_path: Path) -> None:
    """From step 4 of 12: what comes later is moved aside; only new checkpoints count, and are kept."""
    assert call("train", small_config(tmp_path), "--steps", "12", "--keep", "9", "--checkpoint-every", "4")[0] == 0
    run = tmp_path / "run"
    old = list(read_lines(run / "metrics.jsonl"))
    held = {
        path: (run / "checkpoints" / path / "checkpoint.json").read_bytes()
        for path in ("step-00000008", "step-00000012")
    }
    back = ["--resume", "run/checkpoints/step-00000004", "--keep", "1", "--lr", "0.1", "--steps"]
    assert call("train", *back, "6")[0] == 0
    assert names_in(run / "checkpoints") == ["abandoned-1", "step-00000006"]
    aside = run / "checkpoints" / "abandoned-1"
    assert names_in(aside) == ["metrics.jsonl", "step-00000008", "step-00000012"]
    assert {path: (aside / path / "checkpoint.json").read_bytes() for path in held} == held
    assert list(read_lines(aside / "metrics.jsonl")) == old[4:]
    lines = list(read_lines(run / "metrics.jsonl"))
    assert lines[:4] == old[:4] and [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert lines[4]["loss"] == old[4]["loss"] and lines[5]["loss"] != old[5]["loss"]
    said = call("train", "--resume", "run", "--steps", "7")[2]
    assert "from step=6" in said  # not 12
    assert call("train", "--resume", str(aside / "step-00000012"), "--steps", "13")[0] == 2  # beside another line
    assert call("train", "--resume", str(aside / "step-00000012"), "--steps", "13", "--out", "other")[0] == 0
    assert steps_in(tmp_path / "other") == [13]


def test_going_back_twice(call, tmp_path: Path) -> None:
    assert call("train", small_config(tmp_path), "--keep", "9")[0] == 0
    for number in (1, 2):
        assert call("train", "--resume", "run/checkpoints/step-00000002")[0] == 0
        assert names_in(tmp_path / f"run/checkpoints/abandoned-{number}") == ["metrics.jsonl", "step-00000004"]


def test_looking_at_an_older_step_moves_nothing(call, tmp_path: Path) -> None:
    """With no step to take there is nothing to go back to."""
    assert call("train", small_config(tmp_path), "--keep", "9")[0] == 0
    assert call("train", "--resume", "run/checkpoints/step-00000002", "--steps", "2")[0] == 0
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["step-00000004", "step-00000002"]
    assert steps_in(tmp_path / "run") == [1, 2, 3, 4]


def test_names_that_weft_does_not_write_are_left_alone(call, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    assert call("train", small_config(tmp_path))[0] == 0
    own = ["step-00000002-best", "step-7", "step-00000003.bak", "notes.partial", "step-00000001x.partial", "my.partial"]
    for name in own:
        (folder / name).mkdir()
        (folder / name / "mine").write_text("mine")
    (folder / "step-00000009.partial").mkdir()  # a killed write
    assert call("train", "--resume", "run", "--steps", "8", "--keep", "1")[0] == 0
    assert names_in(folder) == sorted([*own, "step-00000008"])
    assert all((folder / name / "mine").read_text() == "mine" for name in own)


@pytest.mark.parametrize("resume", [[], ["--resume", "auto"]], ids=["new", "auto"])
def test_a_folder_that_is_no_run_is_refused(call, tmp_path: Path, resume: list[str]) -> None:
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    for name in ("report.html", "thesis.partial", "metrics.jsonl", "checkpoints/a.partial", "config.json"):
        (folder / name).write_text("mine")
    before = {path: path.read_text() for path in folder.rglob("*") if path.is_file()}
    status, _, said = call("train", small_config(tmp_path), *resume)
    assert status == 2 and "--out run is not empty and not a run" in said and len(said.splitlines()) == 1, said
    assert {path: path.read_text() for path in folder.rglob("*") if path.is_file()} == before


def test_an_empty_folder_is_taken(call, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert call("train", small_config(tmp_path))[0] == 0


def hold(path: str, ready: multiprocessing.synchronize.Event) -> None:
    with open(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        ready.set()
        signal.pause()


def test_one_run_in_a_folder_at_a_time(call, tmp_path: Path) -> None:
    """A live process keeps others out; one that was killed does not."""
    assert call("train", small_config(tmp_path))[0] == 0
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    other = context.Process(target=hold, args=(str(tmp_path / "run" / "run.lock"), ready))
    other.start()
    try:
        assert ready.wait(30)
        before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
        status, _, said = call("train", "--resume", "run", "--steps", "6")
        assert status == 2 and "--out run is being written by another run" in said and len(said.splitlines()) == 1
        assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before
    finally:
        other.kill()
        other.join()
    assert call("train", "--resume", "run", "--steps", "6")[0] == 0


def test_a_run_that_died_before_its_first_checkpoint(call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One command begins, begins again and goes on; --resume RUN does so too."""
    from weft.train.trainer import Trainer

    take_step = Trainer.take_step

    def die(self: Trainer) -> object:
        if self.done == 1:
            raise RuntimeError("train: dead")
        return take_step(self)

    auto = ["train", small_config(tmp_path), "--resume", "auto"]
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "take_step", die)
        assert call(*auto)[0] == 1
        assert steps_in(tmp_path / "run") == [1] and not list_checkpoints(tmp_path / "run")
        assert call("train", "--resume", "run")[0] == 1
    status, _, said = call("train", small_config(tmp_path))
    assert status == 2 and "--resume run goes on with it" in said
    assert call("train", "--resume", "run", "--steps", "3")[0] == 0
    assert steps_in(tmp_path / "run") == [1, 2, 3]
    status, _, said = call(*auto)
    assert status == 0 and "from step=3" in said and steps_in(tmp_path / "run") == [1, 2, 3, 4]
    status, _, said = call(*auto)
    assert status == 0 and "step 4 of 4 is done already" in said and steps_in(tmp_path / "run") == [1, 2, 3, 4]


def test_auto_takes_the_settings_of_the_run(call, tmp_path: Path) -> None:
    """Under those that are given, as --resume RUN does; a folder that is called auto has a path."""
    assert call("train", small_config(tmp_path, out="auto"), "--resume", "auto")[0] == 0
    assert call("train", "--resume", "auto", "--out", "auto", "--steps", "5")[0] == 0
    assert call("train", "--resume", "./auto", "--steps", "6")[0] == 0
    assert steps_in(tmp_path / "auto") == [1, 2, 3, 4, 5, 6]


def test_an_empty_config_is_no_dead_end(call, tmp_path: Path) -> None:
    """As a full disk left it; settings come from the flags, or from a checkpoint."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("")
    assert call("train", small_config(tmp_path), "--resume", "auto")[0] == 0
    for broken in ("", "{", None):
        (tmp_path / "run" / "config.json").unlink()
        if broken is not None:
            (tmp_path / "run" / "config.json").write_text(broken)
        steps = str(steps_in(tmp_path / "run")[-1] + 1)
        status, _, said = call("train", "--resume", "run", "--steps", steps)
        assert status == 0, said
        assert json.loads((tmp_path / "run" / "config.json").read_text())["width"] == 16


def test_nothing_is_left_of_a_run_that_could_not_begin(call, tmp_path: Path) -> None:
    assert call("train", small_config(tmp_path, out="a/b/run", length=10**7))[0] == 2
    assert not (tmp_path / "a").exists()
    os.mkdir(tmp_path / "empty")
    assert call("train", small_config(tmp_path, out="empty", length=10**7))[0] == 2
    assert names_in(tmp_path / "empty") == []


def test_a_restart_is_no_way_around_a_refusal(call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun --max-restarts starts again what was refused: only a run that it has begun itself is gone on with."""
    assert call("train", small_config(tmp_path))[0] == 0
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "report.html").write_text("mine")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    assert call("train", small_config(tmp_path), "--steps", "6")[0] == 2
    assert call("train", small_config(tmp_path), "--out", "mine")[0] == 2
    assert names_in(tmp_path / "mine") == ["report.html"] and steps_in(tmp_path / "run") == [1, 2, 3, 4]
    assert call("train", small_config(tmp_path), "--out", "new")[0] == 0
    status, _, said = call("train", small_config(tmp_path), "--out", "new", "--steps", "6")
    assert status == 0 and "from step=4" in said
