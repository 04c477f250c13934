"""Faults of flags: one line and status 2, before ranks start or anything is measured or written."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from weft.bench.flags import check_file
from weft.bench.train import demo
from weft.cli import main
from weft.world import VirtualWorld
from weft.world.launch import ProcessWorld


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """What a command says that is refused; nothing is left in the folder it ran in, and no rank is started."""
    monkeypatch.chdir(tmp_path)

    def no_ranks(*_: object, **__: object) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(ProcessWorld, "_start", no_ranks)
    monkeypatch.setattr(VirtualWorld, "run", no_ranks)
    monkeypatch.setattr(demo, "run_ranks", no_ranks)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()

    def run(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["weft", *words])
        with pytest.raises(SystemExit) as end:
            main()
        said = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("starting ")]
        assert end.value.code == 2 and len(said) == 1, said
        assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder"]
        return said[0]

    return run


PATHS = {
    "nowhere/x.json": "No such file or directory",
    "file/x.json": "Not a directory",
    "folder": "is a folder; give a file",
    "x" * 300: "File name too long",
    "/dev/null": "is no regular file; give a file",
}
WRITERS = {
    "--out": ["trace", "scan"],
    "--json": ["bench", "scan", "--ranks", "2"],
}
NETWORK = ["bench", "network", "--latency", "0", "--bandwidth", "1"]
MORE_WRITERS = [["bench", name] for name in ("linear-attention", "delta-rule", "attention", "rows", "matrix", "step")]
MORE_WRITERS += [["bench", "train"], ["bench", "matrix", "--quality"], NETWORK, ["kernels"]]


@pytest.mark.parametrize("flag", WRITERS)
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path[:20])
def test_files_that_cannot_be_written(refused, flag: str, path: str) -> None:
    said = refused(*WRITERS[flag], flag, path)
    assert said.startswith(f"weft: {flag} {path} ") and said.endswith(PATHS[path]), said


@pytest.mark.parametrize("words", MORE_WRITERS, ids=" ".join)
def test_every_command_looks_at_its_file_first(refused, words: list[str]) -> None:
    assert refused(*words, "--json", "folder") == "weft: --json folder is a folder; give a file"


@pytest.fixture
def theirs() -> Iterator[Path]:
    """A folder that this process may not write to: who is root is somebody else meanwhile."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "kept").touch(mode=0o444)
        folder.chmod(0o555)
        root = os.geteuid() == 0
        if root:
            os.seteuid(65534)
        try:
            yield folder
        finally:
            if root:
                os.seteuid(0)
            folder.chmod(0o755)


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
@pytest.mark.parametrize("name", ["new", "kept"])
def test_files_that_are_not_ours(theirs: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"--out {theirs / name} cannot be written: Permission denied"):
        check_file("--out", theirs / name)


def test_a_file_that_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text("before")
    check_file("--json", tmp_path / "rows.json")
    check_file("--json", tmp_path / "other.json")
    assert [path.name for path in tmp_path.iterdir()] == ["rows.json"]
    assert (tmp_path / "rows.json").read_text() == "before"


NUMBERS = {
    "trace scan --out x --ranks -3": "--ranks must be at least 1, got -3",
    "trace scan --out x --ranks 1000000": "--ranks must be at most 4096, got 1000000",
    "trace scan --out x --heads 0": "--heads must be at least 1, got 0",
    "trace scan --out x --keys -1": "--keys must be at least 1, got -1",
    "trace scan --out x --latency inf": "latency must be a finite number of seconds >= 0, got inf",
    "trace scan --out x --latency nan": "latency must be a finite number of seconds >= 0, got nan",
    "trace scan --out x --bandwidth nan": "bandwidth must be > 0 a second",
    "bench scan --ranks -1": "ranks must be at least 1 and at most 512 on one machine, got -1",
    "bench scan --ranks 1000000": "ranks must be at least 1 and at most 512 on one machine, got 1000000",
    "bench scan --repeats 0": "--repeats must be at least 1, got 0",
    "bench scan --calls -1": "--calls must be at least 1, got -1",
    "bench attention --tokens -4": "--tokens must be at least 1, got -4",
    "bench linear-attention --h100-ranks 4 0": "--h100-ranks must be at least 1, got 0",
    "bench delta-rule --heads 0": "--heads must be at least 1, got 0",
    "bench rows --smaller 0": "--smaller must be at least 1, got 0",
    "bench matrix --widths 8 -8": "--widths must be at least 1, got -8",
    "bench step --warm-steps -1": "--warm-steps must be at least 0, got -1",
    "bench network --latency -1 --bandwidth 1": "latency must be a finite number of seconds >= 0, got -1",
    "bench network --latency 0 --bandwidth 0": "bandwidth must be > 0 a second",
    "bench train --rows 1": "--rows must be at least 2, got 1",
    "kernels --dims 0": "--dims must be at least 1, got 0",
    "kernels --tokens -1": "--tokens must be at least 1, got -1",
    "demo --steps 0": "--steps must be at least 1, got 0",
    "demo --ranks -2": "--ranks must be 2 or 4, got -2",
    "demo --out file/demo": "--out file/demo cannot be made: Not a directory",
    "trane": "'trane' is not one of train, demo, sample, report, bench, check-device, trace, layouts, kernels",
    "bench scam": "'scam' is not one of scan, linear-attention, ",
}


@pytest.mark.parametrize("words", NUMBERS)
def test_values_that_make_no_sense(refused, words: str) -> None:
    said = refused(*words.split())
    assert NUMBERS[words] in said, said
