"""Checkpoints: the mesh may change, what is damaged is refused by name, what fails leaves the one before as it was."""

from __future__ import annotations

import json
import logging
import os
import pickle
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_run import SMALL, find_checkpoint, furthest, small_config

import weft
from weft.parallel import checkpoint
from weft.parallel.mesh import make_mesh
from weft.train.config import TrainConfig
from weft.train.run_folder import list_checkpoints, step_folder
from weft.train.trainer import Trainer
from weft.world.launch import ProcessWorld

Shape = tuple[int, int, int]
SAVING = replace(SMALL, steps=8, checkpoint_every=3)


def run(axis: weft.Axis | None, shape: Shape, config: TrainConfig) -> list[float]:
    """A run with its checkpoints, on real ranks or alone; the losses of its steps."""
    config = replace(config, dp=shape[0], cp=shape[1], tp=shape[2])
    return [result.loss for result in Trainer(config, make_mesh(shape))]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("dtype", "pattern"),
    [("fp64", "ls"), *(pytest.param(*one, marks=pytest.mark.slow) for one in (("fp64", "d"), ("fp32", "ls")))],
)
def test_the_mesh_may_change(two: ProcessWorld, four: ProcessWorld, tmp_path: Path, dtype: str, pattern: str) -> None:
    """Saved on dp 2 x cp 2; on the same mesh the losses are the same to the bit."""
    config = replace(SAVING, out=tmp_path / "run", dtype=dtype, keep=3, pattern=pattern)
    wanted = four.run(run, (2, 2, 1), config)[0]
    again = replace(config, resume=step_folder(config.out, 3))
    tolerance = 1e-6 if dtype == "fp64" else 1e-3
    for number, (world, shape) in enumerate(
        [(four, (2, 2, 1)), (four, (1, 4, 1)), (two, (1, 1, 2)), (None, (1, 1, 1))]
    ):
        one = replace(again, out=tmp_path / str(number))
        found = [run(None, shape, one)] if world is None else world.run(run, shape, one)
        for losses in found:
            assert furthest(losses, wanted[3:]) < (tolerance if number else 1e-300), shape


@pytest.fixture
def saved(tmp_path: Path) -> TrainConfig:
    """A run in one process with checkpoints of steps 6 and 8."""
    config = replace(SAVING, out=tmp_path / "run")
    run(None, (1, 1, 1), config)
    return config


def test_only_the_newest_are_kept(saved: TrainConfig) -> None:
    assert [path.name for path in list_checkpoints(saved.out)] == ["step-00000008", "step-00000006"]
    assert not list((saved.out / "checkpoints").glob("*.partial"))


def test_a_truncated_one_is_named_and_the_one_before_is_used(
    saved: TrainConfig, caplog: pytest.LogCaptureFixture
) -> None:
    newest = step_folder(saved.out, 8)
    file = next(newest.glob("*.safetensors"))
    os.truncate(file, file.stat().st_size - 100)
    with caplog.at_level(logging.WARNING):
        folder, facts = find_checkpoint(saved.out)
    assert folder == step_folder(saved.out, 6) and facts["step"] == 6
    assert str(newest) in caplog.text and file.name in caplog.text
    with pytest.raises(ValueError, match=r"step-00000008 is damaged: .*safetensors has \d+ bytes, \d+ were written"):
        find_checkpoint(newest)
    assert len(run(None, (1, 1, 1), replace(saved, resume=saved.out))) == 2  # it replaces the damaged one
    assert find_checkpoint(saved.out)[0] == newest


def test_what_is_half_there_is_no_checkpoint(saved: TrainConfig) -> None:
    """What a killed write leaves is passed over; a folder without one is refused."""
    newest = step_folder(saved.out, 8)
    newest.rename(checkpoint.partial_name(newest))
    assert find_checkpoint(saved.out)[0] == step_folder(saved.out, 6)
    (step_folder(saved.out, 6) / checkpoint.MANIFEST).write_text("{")
    with pytest.raises(ValueError, match=r"has no whole checkpoint; its newest, .*step-00000006, is damaged"):
        find_checkpoint(saved.out)
    with pytest.raises(ValueError, match="neither a run with a checkpoint nor a checkpoint"):
        find_checkpoint(saved.out / "nothing")


def test_another_model_is_refused(saved: TrainConfig) -> None:
    with pytest.raises(ValueError, match="was made with --width 16, not 32; leave it as it was"):
        run(None, (1, 1, 1), replace(saved, resume=saved.out, width=32))
    other = replace(saved, resume=saved.out, wrap="ddp")  # in one process the same model, stepped by other parts
    assert len(run(None, (1, 1, 1), replace(other, steps=9))) == 1


def test_nothing_is_unpickled(saved: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a checkpoint was unpickled")

    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, ("touch trapped",)

    newest = step_folder(saved.out, 8)
    for name in (".metadata", "extra.distcp"):
        (newest / name).write_bytes(pickle.dumps(Trap()))
    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, refuse)
    trainer = Trainer(replace(saved, resume=saved.out), make_mesh((1, 1, 1)))
    trainer.close()
    assert trainer.done == 8 and not Path("trapped").exists()
    kinds = {path.suffix for path in newest.iterdir()} - {"", ".distcp"}
    assert kinds == {".safetensors", ".json"} and json.loads((newest / checkpoint.MANIFEST).read_text())["step"] == 8


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB: room for a few checkpoints."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True)
    if made.returncode:
        pytest.skip("no file system can be mounted here: a full disk was not tried")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.processes
def test_a_full_disk(two: ProcessWorld, small_disk: Path) -> None:
    """The error is on every rank and says why; the checkpoint before is whole, and training can go on from it."""
    config = replace(SAVING, out=small_disk / "run", keep=3)
    found = two.run(fill_up, (1, 2, 1), config, str(small_disk / "ballast"))
    for words in found:
        assert "step-00000006 could not be written" in words and "No space left on device" in words, words
        assert f"{step_folder(config.out, 3)} is whole" in words
    assert not list((config.out / "checkpoints").glob("*.partial"))
    (small_disk / "ballast").unlink()
    assert find_checkpoint(config.out)[1]["step"] == 3
    assert len(two.run(run, (1, 2, 1), replace(config, resume=config.out, keep=1))[0]) == 5


def test_a_disk_that_is_full_for_small_files(call, small_disk: Path, tmp_path: Path) -> None:
    """The file is named, and the checkpoint that is whole; no temporary file is left, and the run can go on."""
    out = small_disk / "run"
    settings = small_config(tmp_path, out=str(out), steps=4, timeline_step=0)
    assert call("train", settings)[0] == 0
    left = os.statvfs(out)
    (small_disk / "ballast").write_bytes(bytes(left.f_bavail * left.f_bsize))
    status, _, said = call("train", "--resume", str(out), "--steps", "6")
    assert status == 1, said
    line = said.splitlines()[-1]
    assert line.startswith("train: ") and "No space left on device" in line and "Traceback" not in said
    assert f"{out}/" in line and f"{step_folder(out, 4)} is whole" in line
    assert not [path for path in small_disk.rglob("*") if path.name.endswith(".partial")]
    assert json.loads((out / "config.json").read_text())["steps"] in (4, 6)  # never empty
    (small_disk / "ballast").unlink()
    assert call("train", "--resume", str(out), "--steps", "6")[0] == 0


def fill_up(axis: weft.Axis, shape: Shape, config: TrainConfig, ballast: str) -> str:
    trainer = Trainer(replace(config, dp=shape[0], cp=shape[1]), make_mesh(shape))
    try:
        for result in trainer:
            if result.step == 5 and axis.rank == 0:
                left = os.statvfs(config.out)
                Path(ballast).write_bytes(bytes(left.f_bavail * left.f_bsize - 20_000))
    except RuntimeError as error:
        return str(error)
    return "no error"
