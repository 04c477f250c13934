"""`weft train`, `weft sample` and `weft report` as a user calls them: settings, files, errors of one line."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small_run import SMALL, small_config

import weft
from weft.train.command import read_defaults
from weft.train.config import TrainConfig, fit_mesh, read_config
from weft.train.metrics import FAMILIES, MetricsFile
from weft.train.model import Place
from weft.train.run_folder import list_checkpoints, read_lines
from weft.train.sample import generate, load_model


def test_a_run_and_its_files(call, tmp_path: Path) -> None:
    status, printed, said = call("train", small_config(tmp_path), "--steps", "5")
    assert status == 0, said
    run = tmp_path / "run"
    assert json.loads(printed) == {"run": "run", "report": "run/report.html"} and (run / "report.html").is_file()
    assert read_config(run / "config.json").steps == 5
    lines = list(read_lines(run / "metrics.jsonl"))
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert ["valid_loss" in line for line in lines] == [False, True, False, True, True]
    assert all(set(line["bytes"]) == set(line["exposed"]) == set(FAMILIES) for line in lines)
    assert json.loads((run / "timeline.json").read_text())["step"] == 2
    assert "loss" in said and "tokens/s" in said and "exposed" in said and "REKLS" in said


def test_going_on(call, tmp_path: Path) -> None:
    """--resume takes the run's own settings and folder; flags come after them."""
    assert call("train", small_config(tmp_path))[0] == 0
    before = list(read_lines(tmp_path / "run" / "metrics.jsonl"))
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "loss": 1.0}\n{"st')  # of a life that ended after its last checkpoint
    status, _, said = call("train", "--resume", "run", "--steps", "6")
    assert status == 0 and "from step=4" in said
    lines = list(read_lines(tmp_path / "run" / "metrics.jsonl"))
    assert lines[:4] == before and [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6] and lines[4]["loss"] != 1.0
    assert call("train", "--resume", "run/checkpoints/step-00000006", "--out", "other", "--steps", "7")[0] == 0
    assert [line["step"] for line in read_lines(tmp_path / "other" / "metrics.jsonl")] == [7]


def test_another_mesh_when_going_on(tmp_path: Path) -> None:
    """--cp 4 means 4 ranks, whatever the mesh was; without flags it is the mesh that was."""
    (tmp_path / "config.json").write_text(replace(SMALL, dp=2, cp=2).as_json())
    same = read_defaults(["--resume", str(tmp_path)])
    assert (same.dp, same.cp, same.tp, same.out) == (2, 2, 1, tmp_path)
    other = read_defaults([f"--resume={tmp_path}", "--cp", "4"])
    assert (other.dp, other.cp, other.tp) == (None, 1, 1) and other.width == SMALL.width


def test_a_toml_file(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('steps = 7\nlr = 1\ndata = "text"\ndp = 2\n')
    config = read_config(tmp_path / "a.toml")
    assert config == replace(TrainConfig(), steps=7, lr=1.0, data=Path("text"), dp=2)


WRONG = {
    "a mesh that does not divide the batch": (["--dp", "4"], r"--batch 6 must be a multiple of --dp 4"),
    "no such data": (["--data", "nowhere"], "--data nowhere does not exist"),
    "an empty folder": (["--data", "empty"], "--data empty "),
    "a .bin of the wrong size": (["--data", "odd.bin"], r"--data odd.bin .*7 bytes"),
    "no checkpoint": (["--resume", "empty"], "--resume empty is neither a run with a checkpoint nor a checkpoint"),
    "heads that cannot be cut": (["--tp", "4"], "--tp 4 must divide --kv-heads 2"),
    "a negative rate": (["--lr", "-1"], "--lr must be finite and not negative"),
    "ddp of cut weights": (["--tp", "2", "--wrap", "ddp"], "--wrap ddp takes whole weights"),
    "a file as folder": (["--out", "small.json"], "--out small.json is a file"),
    "a pattern": (["--pattern", "lx"], "--pattern must be made of l, s and d, got 'lx'"),
    "no pattern": (["--pattern", ""], "--pattern must be made of l, s and d, got ''"),
    "no ranks": (["--cp", "0"], "--dp, --cp and --tp must be at least 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input(call, tmp_path: Path, name: str) -> None:
    """One line that says what to change, status 2, nothing written."""
    arguments, words = WRONG[name]
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd.bin").write_bytes(b"1234567")
    path = small_config(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    status, printed, said = call("train", path, *arguments)
    assert status == 2 and printed == "" and len(said.splitlines()) == 1 and said.startswith("train: "), said
    assert re.search(words, said), said
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"stepz": 3}', "'stepz', which is no setting"),
        ('{"steps": "3"}', "steps must be int, got '3'"),
        ('{"dtype": "fp8"}', "dtype must be"),
        ("[1]", "must be an object of settings"),
        ("{", "is not json"),
    ],
)
def test_a_wrong_config(call, tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "bad.json").write_text(text)
    status, _, said = call("train", "bad.json")
    assert status == 2 and words in said and len(said.splitlines()) == 1, said
    assert call("train", "missing.json")[0] == 2


def test_a_run_is_not_overwritten(call, tmp_path: Path) -> None:
    assert call("train", small_config(tmp_path))[0] == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    status, _, said = call("train", small_config(tmp_path))
    assert status == 2 and "--out run holds a run already; --resume run goes on with it" in said
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before


def test_meshes_that_fit() -> None:
    assert fit_mesh(None, 2, 1, 6) == (3, 2, 1) and fit_mesh(2, 2, 1, None) == (2, 2, 1)
    with pytest.raises(ValueError, match="needs a multiple of 4 ranks, but there are 6"):
        fit_mesh(None, 2, 2, 6)
    with pytest.raises(ValueError, match="--dp 2 x --cp 2 x --tp 1 needs 4 ranks, but there are 3"):
        fit_mesh(2, 2, 1, 3)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learned a little, in fp64."""
    from weft.parallel.mesh import make_mesh
    from weft.train.trainer import Trainer

    folder = tmp_path_factory.mktemp("trained") / "run"
    config = replace(SMALL, out=folder, steps=30, pattern="lsd", layers=3)
    for _ in Trainer(config, make_mesh((1, 1, 1))):
        pass
    return folder


def test_decoding_is_the_forward(trained: Path) -> None:
    """Token by token, and in pieces, with state and cache: the logits of the whole at once."""
    model = load_model(trained)
    tokens = torch.tensor([[0, *b"import os\nfor name in os.listdir('.'):\n"]])
    length = tokens.shape[1]
    place = Place(weft.sequence(length), torch.arange(length)[None])
    wanted = model(tokens, model.bigrams.rows_of(tokens), place)
    for cuts in ([1] * length, [length], [7, 1, 1, length - 9]):
        state = model.start_decoding()
        found = torch.cat([model.decode(piece, state) for piece in tokens.split(cuts, 1)], 1)
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
        linear, _, delta = state.caches  # what is kept, and so the cost of a token, does not grow
        assert linear.state.shape == delta.state.shape == (1, 2, 8, 8) and delta.window.shape == (1, 3 * 16, 3)


def test_sampling(call, trained: Path) -> None:
    status, printed, _ = call("sample", str(trained), "--prompt", "def ", "--tokens", "20", "--seed", "3")
    assert status == 0 and printed.startswith("def ")
    assert call("sample", str(trained), "--prompt", "def ", "--tokens", "20", "--seed", "3")[1] == printed
    model = load_model(trained)
    greedy = list(generate(model, list(b"def "), 5, 0.0, 1, 0))
    assert greedy == list(generate(model, list(b"def "), 5, 1.0, 1, 9))  # among one there is nothing to draw
    step_by_step = list(b"def ")
    for token in greedy:
        state = model.start_decoding()
        assert int(model.decode(torch.tensor([[0, *step_by_step]]), state)[0, -1].argmax()) == token
        step_by_step.append(token)


def test_what_cannot_be_sampled(call, trained: Path) -> None:
    status, _, said = call("sample", "nowhere")
    assert status == 2 and "sample: nowhere is neither a run with a checkpoint nor a checkpoint" in said
    assert call("sample", str(trained), "--top-k", "0")[0] == 2
    status, _, said = call("report", "nowhere")
    assert status == 2 and "nowhere" in said


def test_help_names_every_setting(call) -> None:
    status, printed, _ = call("train", "--help")
    assert status == 0 and all("--" + name.replace("_", "-") in printed for name in vars(TrainConfig()))
    assert all(name in call("--help")[1] for name in ("train", "sample", "report", "bench"))


def test_tensorboard_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scalars of every step; families one by one."""
    written: list[tuple[str, float, int]] = []

    class Board:
        def __init__(self, folder: str, purge_step: int) -> None:
            written.append((Path(folder).name, 0.0, purge_step))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, value, step))

        def close(self) -> None:
            written.append(("closed", 0.0, 0))

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Board))
    metrics = MetricsFile(tmp_path, 3)
    metrics.write({"step": 4, "loss": 2.5, "bytes": {"REKLS": 7}})
    metrics.close()
    assert written == [("tensorboard", 0.0, 4), ("loss", 2.5, 4), ("bytes/REKLS", 7, 4), ("closed", 0.0, 0)]


def test_checkpoints_are_kept_by_number(call, tmp_path: Path) -> None:
    assert call("train", small_config(tmp_path), "--steps", "7", "--keep", "1")[0] == 0
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["step-00000007"]
