"""Damage and wrong input: named in one line; the checkpoint before is used; what is whole stays."""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from small_run import SMALL, find_checkpoint, small_config

import weft
from weft.parallel import checkpoint
from weft.parallel.mesh import make_mesh
from weft.train.config import TrainConfig
from weft.train.metrics import MetricsFile
from weft.train.run_folder import read_lines, step_folder
from weft.train.sample import load_model
from weft.train.trainer import Trainer
from weft.world.launch import ProcessWorld

SAVING = replace(SMALL, steps=6, checkpoint_every=2, keep=3)


def train(config: TrainConfig) -> list[float]:
    return [result.loss for result in Trainer(config, make_mesh((1, 1, 1)))]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("made") / "run"
    train(replace(SAVING, out=folder))
    return folder


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "run")
    (tmp_path / "run" / "config.json").write_text(replace(SAVING, out=tmp_path / "run").as_json())
    return tmp_path / "run"


def file_of(folder: Path) -> Path:
    (file,) = folder.glob("*.safetensors")
    return file


def zero_half(run: Path) -> None:
    file = file_of(step_folder(run, 6))
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2] + bytes(len(content) - len(content) // 2))


def flip_a_bit(run: Path) -> None:
    file = file_of(step_folder(run, 6))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def take_another_step(run: Path) -> None:
    assert file_of(step_folder(run, 4)).stat().st_size == file_of(step_folder(run, 6)).stat().st_size
    shutil.copy(file_of(step_folder(run, 4)), file_of(step_folder(run, 6)))


def change_a_number(run: Path) -> None:
    path = step_folder(run, 6) / checkpoint.MANIFEST
    path.write_text(path.read_text().replace('"step": 6', '"step": 7'))


def make_a_pipe(run: Path) -> None:
    path = step_folder(run, 6) / checkpoint.MANIFEST
    path.unlink()
    os.mkfifo(path)


def drop(key: str) -> Callable[[Path], None]:
    """A manifest without digests, as an older weft wrote it, that lacks something."""

    def damage(run: Path) -> None:
        write_old(step_folder(run, 6), lambda manifest: manifest.pop(key))

    return damage


def write_old(folder: Path, change: Callable[[dict], object]) -> None:
    path = folder / checkpoint.MANIFEST
    manifest = json.loads(path.read_text())
    del manifest["sha256"]
    manifest["files"] = {name: facts["bytes"] for name, facts in manifest["files"].items()}
    change(manifest)
    path.write_text(json.dumps(manifest))


def other_tensors(run: Path) -> None:
    """Whole by its manifest, but of nothing that can be loaded."""
    folder = step_folder(run, 6)
    file = file_of(folder)
    save_file({"model.tokens.weight": torch.zeros(3)}, file)
    write_old(folder, lambda manifest: manifest["files"].update({file.name: file.stat().st_size}))


def no_tensors(run: Path) -> None:
    folder = step_folder(run, 6)
    file = file_of(folder)
    file.write_bytes(b"\xff" * 100)
    write_old(folder, lambda manifest: manifest["files"].update({file.name: 100}))


DAMAGES = {
    "half zeroes": zero_half, "one bit": flip_a_bit, "another step's": take_another_step,
    "another number": change_a_number, "a pipe": make_a_pipe, "no step": drop("step"), "no groups": drop("groups"),
    "no config": drop("config"), "no vocabulary": drop("vocabulary"), "no position": drop("position"),
    "no data": drop("data"), "no files": drop("files"), "other tensors": other_tensors, "no tensors": no_tensors,
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_the_one_before_is_used(run: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """The damaged one is named, kept aside, and its step made again."""
    DAMAGES[name](run)
    with caplog.at_level(logging.WARNING):
        model = load_model(run)
        assert str(step_folder(run, 6)) in caplog.text and "the one before it is used" in caplog.text
        caplog.clear()
        trainer = Trainer(replace(SAVING, out=run, resume=run, steps=6), make_mesh((1, 1, 1)))
        assert trainer.done == 4
        for _ in trainer:
            pass
    assert str(step_folder(run, 6)) in caplog.text and "the one before it is used" in caplog.text
    assert (run / "checkpoints" / "abandoned-1" / "step-00000006").is_dir()
    assert find_checkpoint(run)[0] == step_folder(run, 6)
    assert model.vocabulary == 256


@pytest.mark.parametrize("name", DAMAGES)
def test_asked_for_itself_it_is_refused(run: Path, name: str) -> None:
    DAMAGES[name](run)
    with pytest.raises(ValueError, match=r"step-00000006") as refusal:
        Trainer(replace(SAVING, out=run, resume=step_folder(run, 6), steps=8), make_mesh((1, 1, 1)))
    assert "\n" not in str(refusal.value)
    with pytest.raises(ValueError, match=r"step-00000006"):
        load_model(step_folder(run, 6))


def test_only_listed_files_are_read(run: Path, tmp_path: Path) -> None:
    """An extra file, with tensors of the same names and of others, is not looked at."""
    extra = step_folder(run, 6) / "shard-00009-model-00001-of-00001.safetensors"
    save_file({"model.head.weight": torch.full((256, 16), 7.0, dtype=torch.float64), "more": torch.ones(2)}, extra)
    os.mkfifo(step_folder(run, 6) / "a.safetensors")
    trainer = Trainer(replace(SAVING, out=tmp_path / "other", resume=run, steps=7), make_mesh((1, 1, 1)))
    trainer.close()
    assert trainer.done == 6 and not (trainer.model.head.weight == 7.0).any()
    assert not (load_model(run).head.weight == 7.0).any()


def test_a_checkpoint_without_digests_is_loaded_with_a_warning(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_old(step_folder(run, 6), lambda manifest: None)
    with caplog.at_level(logging.WARNING):
        assert find_checkpoint(run)[0] == step_folder(run, 6)
    assert "step-00000006 has no digests" in caplog.text


@pytest.mark.processes
def test_ranks_fall_back_together(two: ProcessWorld, run: Path) -> None:
    """The file that only one of two ranks needs is of another run, with right digests: both take the one before."""
    other_tensors(run)
    config = replace(SAVING, out=run, resume=run, steps=6, cp=2, dp=1)
    assert two.run(where_it_begins, config) == [4, 4]


def where_it_begins(axis: weft.Axis, config: TrainConfig) -> int:
    trainer = Trainer(config, make_mesh((1, 2, 1)))
    trainer.close()
    return trainer.done


SIZES = {"width": 2**40, "table_rows": 2**50, "hidden": 2**45, "layers": 10**9, "heads": 0, "length": -1}


@pytest.mark.parametrize("name", [*SIZES, "vocabulary"])
def test_a_manifest_with_impossible_sizes(call, run: Path, name: str) -> None:
    """Nothing of that size is made; one line."""
    for step in (2, 4, 6):
        change = {"vocabulary": 2**60} if name == "vocabulary" else {}

        def widen(manifest: dict, change: dict = change) -> None:
            manifest.update(change)
            manifest["config"].update({name: SIZES[name]} if not change else {})

        write_old(step_folder(run, step), widen)
    status, printed, said = call("sample", str(run))
    assert status == 2 and printed == "" and len(said.splitlines()) == 1, said


def test_another_vocabulary_and_other_data(call, run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "tokens.bin").write_bytes(torch.randint(0, 1000, (4000,)).short().numpy().tobytes())
    for arguments in (["--vocabulary", "300"], ["--data", "tokens.bin"]):
        status, _, said = call("train", "--resume", str(run), "--steps", "8", *arguments)
        assert status == 2 and "was made with a vocabulary of 256" in said and len(said.splitlines()) == 1, said
    (tmp_path / "text").write_text("all the same\n" * 1000)
    with caplog.at_level(logging.WARNING):
        assert call("train", "--resume", str(run), "--steps", "7", "--data", "text")[0] == 0
    assert "was made with other data" in caplog.text


def test_a_broken_line_of_the_metrics_breaks_nothing_else(tmp_path: Path) -> None:
    lines = [json.dumps({"step": step, "loss": 1.0}).encode() for step in range(1, 9)]
    broken = [b'{"step": 3, "lo', b"\xff\xfe\x00", b"[3]", b'{"step": "x"}', b"{" * 100_000]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([*lines[:2], *broken, *lines[2:], b'{"step": 9, "lo']))
    metrics = MetricsFile(tmp_path, 6)
    metrics.write({"step": 7, "loss": 2.0})
    metrics.close()
    found = list(read_lines(tmp_path / "metrics.jsonl"))
    assert [(line["step"], line["loss"]) for line in found] == [(step, 1.0) for step in range(1, 7)] + [(7, 2.0)]
    assert all(line in (tmp_path / "metrics.jsonl").read_bytes().split(b"\n") for line in broken)
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_going_on_after_a_broken_line(call, tmp_path: Path) -> None:
    assert call("train", small_config(tmp_path))[0] == 0
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.write_text('{"step": 1, "lo\n' + metrics.read_text())
    assert call("train", "--resume", "run", "--steps", "5")[0] == 0
    assert [line["step"] for line in read_lines(metrics)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--timeout", "inf"], "--timeout must be > 0 and at most"),
        (["--timeout", "nan"], "--timeout must be > 0 and at most"),
        (["--timeout", "1e300"], "--timeout must be > 0 and at most"),
        (["--grace", "0"], "--grace must be > 0"),
        (["--dp", "1000000", "--batch", "1000000"], "at most 512 on one machine, got 1000000"),
        (["--seed", str(10**30)], "--seed must be an integer of 64 bits"),
        (["--steps", "100000000"], "--steps must be at most 99,999,999"),
        (["--data", "pipe"], "--data pipe is neither a file nor a folder"),
        (["--data", "pipe.bin"], "--data pipe.bin is not a file"),
        (["--data", "socket"], "--data socket is neither a file nor a folder"),
        (["--data", "/dev/zero"], "--data /dev/zero is neither a file nor a folder"),
        (["--out", "small.json/run"], "--out small.json/run cannot be written"),
        (["--out", "x" * 300], "cannot be read: File name too long"),
        (["--resume", "x" * 300], "cannot be read: File name too long"),
    ],
    ids=str,
)
def test_input_that_cannot_be_meant(call, tmp_path: Path, arguments: list[str], words: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    os.mkfifo(tmp_path / "pipe.bin")
    with socket.socket(socket.AF_UNIX) as one:
        one.bind("socket")
        path = small_config(tmp_path)
        before = sorted(tmp_path.rglob("*"))
        status, printed, said = call("train", path, *arguments)
        assert sorted(tmp_path.rglob("*")) == before
    assert status == 2 and printed == "" and len(said.splitlines()) == 1 and words in said, said


def test_a_config_that_is_no_file(call, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    (tmp_path / "huge.json").write_text('{"lr": 1' + "0" * 400 + "}")
    for name, words in (("pipe.json", "is not a file"), ("bytes.json", "is not text"), ("huge.json", "lr must be")):
        status, _, said = call("train", name)
        assert status == 2 and words in said and len(said.splitlines()) == 1, said


def test_reports_to_places_that_cannot_be(call, run: Path, tmp_path: Path) -> None:
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0, "seconds": 1.0}\n')
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "pipe")
    for out in ("file/report.html", "/proc/nowhere/report.html", ".", "pipe", "x" * 300):
        status, printed, said = call("report", str(run), "--out", out)
        assert status == 2 and printed == "" and len(said.splitlines()) == 1 and "report: " in said, said
    assert call("report", str(run), "--out", "new/report.html")[0] == 0
