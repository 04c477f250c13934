"""`weft check-device`: right on the simulated device, and wrong where an operation is."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from worlds import on_simulated_device

import weft
from weft.check import command, training
from weft.check.case import TOLERANCES, Case
from weft.check.command import FAMILIES, Ranks, check, list_cases
from weft.check.measure import Outcome, relative_error
from weft.cli import main
from weft.world.launch import ProcessWorld, collect

ROOT = Path(__file__).parents[2]
Check = Callable[..., tuple[int, str, list[dict[str, Any]]]]


@pytest.fixture
def run_check(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Check:
    """(status, what is printed, rows of the file) of the command."""

    def run(*words: str) -> tuple[int, str, list[dict[str, Any]]]:
        file = tmp_path / "rows.json"
        monkeypatch.setattr("sys.argv", ["weft", "check-device", *words, "--json", str(file)])
        status = 0
        try:
            main()
        except SystemExit as end:
            status = int(end.code or 0)
        said = capsys.readouterr()
        return status, said.err + said.out, json.loads(file.read_text())["rows"] if file.exists() else []

    return run


@on_simulated_device
def test_operations_over_a_sequence_are_right(run_check: Check) -> None:
    """Each has a row; in attention and scans the host never waits, and messages have streams of their own."""
    status, said, rows = run_check("--device", "sim", "--only", "scan", "attention")
    assert status == 0, said
    assert (
        len(rows) == 6 * 2 + 3 * 2 * 3 + 3 * 2
        and "verdict: right: 36 operations: 2 ranks on sim" in said.splitlines()[-1]
    )
    for row in rows:
        assert row["verdict"] == "right" and row["error"] <= row["tolerance"] and row["operation"] in said
        assert row["syncs"] == 0 and row["streams"] > 1 and row["milliseconds"] is None


@on_simulated_device
def test_every_operation_has_a_row(run_check: Check) -> None:
    """Whatever one of them does, the others are checked, on a world of one too."""
    names = [case.name for case in list_cases(torch.device("cpu"))]
    assert len(set(names)) == len(names) and {case.family for case in list_cases(torch.device("cpu"))} == set(FAMILIES)
    status, said, rows = run_check("--device", "sim", "--ranks", "1")
    assert [row["operation"] for row in rows] == names
    assert status == 0 and {row["verdict"] for row in rows} == {"right"} and "1 rank on sim" in said, said


@on_simulated_device
@pytest.mark.parametrize(
    "families", [("sequence", "rows", "optimizers", "model"), pytest.param(FAMILIES, marks=pytest.mark.slow)], ids=len
)
def test_the_table_of_host_syncs(run_check: Check, families: tuple[str, ...]) -> None:
    """The command that counts them: on two ranks no operation waits more often than docs/devices.md says."""
    status, said, rows = run_check("--device", "sim", "--only", *families)
    assert status == 0 and {row["family"] for row in rows} == set(families), said
    for row in rows:
        assert row["verdict"] == "right" and row["syncs"] <= row["syncs_allowed"] and row["streams"] > 1, row


@on_simulated_device
def test_an_operation_that_is_wrong_on_one_rank(run_check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named with the rank, and the status is 1; the others are right."""
    scan = weft.exclusive_scan

    def broken(state: torch.Tensor, *, group: weft.Axis, method: str, **options: Any) -> torch.Tensor:
        out = scan(state, group=group, method=method, **options)
        on_device = state.device.type == "sim"
        return out + 0.01 * out.detach() if method == "tree" and group.rank == 1 and on_device else out

    monkeypatch.setattr(weft, "exclusive_scan", broken)
    status, said, rows = run_check("--device", "sim", "--only", "scan")
    wrong = [row for row in rows if row["verdict"] != "right"]
    assert status == 1 and [row["operation"] for row in wrong] == [
        f"exclusive_scan (tree, {d})" for d in ("vector", "dense")
    ]
    assert {(row["verdict"], row["rank"]) for row in wrong} == {("wrong", 1)}
    assert "exclusive_scan (tree, vector): wrong on rank 1: tolerance 1e-03" in said
    assert said.splitlines()[-1].startswith("verdict: wrong: 2 of 12 operations")


@on_simulated_device
def test_what_raises_mixes_devices_or_waits_is_a_row(run_check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    scan = weft.exclusive_scan

    def broken(state: torch.Tensor, *, method: str, **options: Any) -> torch.Tensor:
        if state.device.type != "cpu" and method == "ring":
            raise RuntimeError("out of order\nand more")
        if state.device.type != "cpu" and method == "gather":
            state = state + torch.ones(state.shape)
        if state.device.type != "cpu" and method == "tree":
            state.sum().item()
        return scan(state, method=method, **options)

    monkeypatch.setattr(weft, "exclusive_scan", broken)
    status, said, rows = run_check("--device", "sim", "--only", "scan")
    verdicts = {row["operation"].split("(")[1].split(",")[0]: row["verdict"] for row in rows}
    assert status == 1 and verdicts == {
        "ring": "failed", "gather": "failed", "pipeline": "right", "tree": "host waits", "doubling": "right",
        "transpose": "right",
    }  # fmt: skip
    assert "(ring, dense): failed on rank 0: RuntimeError: out of order" in said and "and more" not in said
    assert "(tree, dense): host waits on rank 0: 1 x item at test_check_device.py" in said


def test_nonsense_is_told_in_a_line(run_check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    for words, wanted in {
        (): "no accelerator found; weft check-device --device sim runs on a simulated one",
        ("--device", "cpu"): "no accelerator found",
        ("--device", "toaster"): "'toaster' is no device",
        ("--device", "sim", "--ranks", "0"): "--ranks must be from 1 to 8, got 0",
        ("--ranks", "2"): "--ranks is for --device sim",
        ("--device", "sim", "--only", "cooking"): "--only cooking is not one of scan, linear-attention",
    }.items():
        status, said, rows = run_check(*words)
        assert status == 2 and wanted in said and len(said.splitlines()) == 1 and not rows, said


def check_on_cpu(axis: weft.Axis, file: Path, wrong_on: int | None) -> bool:
    """As torchrun's ranks do it, on the device that is here."""
    cpu = torch.device("cpu")
    pool = Ranks(axis.size, cpu, axis.rank == 0, lambda fn: collect(axis, fn(axis)))
    if wrong_on is not None and axis.rank == wrong_on:
        measure = command.measure
        command.measure = lambda *args: replace(measure(*args), error=1.0)
    try:
        return check(pool, ["scan", "optimizers"], file)
    finally:
        if wrong_on is not None and axis.rank == wrong_on:
            command.measure = measure


@pytest.mark.processes
def test_real_ranks(two: ProcessWorld, tmp_path: Path) -> None:
    """They agree on the verdict, whoever is wrong; times are taken."""
    file = tmp_path / "rows.json"
    assert two.run(check_on_cpu, file, None) == [True] * 2
    rows = json.loads(file.read_text())["rows"]
    names = [case.name for case in list_cases(torch.device("cpu")) if case.family in ("scan", "optimizers")]
    assert [row["operation"] for row in rows] == names
    assert all(row["milliseconds"] > 0 and row["syncs"] is None for row in rows)
    assert two.run(check_on_cpu, file, 1) == [False] * 2
    assert {(row["verdict"], row["rank"]) for row in json.loads(file.read_text())["rows"]} == {("wrong", 1)}


@pytest.mark.processes
def test_python_m_weft() -> None:
    found = subprocess.run([sys.executable, "-m", "weft", "check-device", "--help"], capture_output=True, text=True)
    assert found.returncode == 0 and "--only" in found.stdout


@pytest.mark.parametrize(
    ("outcome", "verdict"),
    [
        (Outcome(0.0, syncs=1, streams=2), "right"),
        (Outcome(2e-3, syncs=0, streams=2), "wrong"),
        (Outcome(float("inf")), "wrong"),
        (Outcome(0.0, syncs=2, streams=2), "host waits"),
        (Outcome(0.0, syncs=0, streams=1), "not overlapped"),
        (Outcome(fault="no"), "failed"),
    ],
)
def test_verdicts(outcome: Outcome, verdict: str) -> None:
    case = Case("scan", "one", training._overlapped_step, torch.float32, 1)
    assert outcome.verdict(case, 2) == verdict
    assert Outcome(TOLERANCES[torch.float32], streams=1).verdict(case, 1) == "right"


def test_what_is_not_finite_is_wrong() -> None:
    one, none = torch.ones(2), torch.tensor([1.0, float("nan")])
    assert relative_error([none], [one]) == relative_error([one / 0], [one]) == float("inf")
    assert relative_error([one, one], [one, 2 * one]) == 0.5


def test_the_page_says_what_is_checked() -> None:
    """The limits of docs/devices.md are those of the cases, and what it names is there."""
    page = (ROOT / "docs" / "devices.md").read_text()
    limits = {name: int(number) for name, number in re.findall(r"^\| ([^|]+) \| (\d) \|", page, re.MULTILINE)}
    words = {
        "exclusive_scan": "`weft.exclusive_scan`", "linear_attention": "`weft.linear_attention`",
        "mamba2": "`weft.mamba2`", "selective_scan": "`weft.selective_scan`", "delta_rule": "`weft.delta_rule`",
        "short_conv": "`weft.short_conv`", "attention": "`weft.attention`",
        "unshard": "`weft.unshard`", "mean_loss": "`weft.mean_loss`",
        **{name: f"`weft.optim.{name}`" for name in ("ShardedAdamW", "REKLS", "SOAP", "Muon", "NorMuon")},
        "OverlappedStep": "`weft.optim.OverlappedStep` with `clip`",
        "the model of weft train": "a step of `weft train`",
    }  # fmt: skip
    found = {}
    for case in list_cases(torch.device("cpu")):
        name, _, options = case.name.partition(" (")
        of_rows = f"tables with `RowAdam`, ids on the {'host' if 'host' in options else 'device'}"
        found[of_rows if name == "RowAdam" else words[name]] = case.syncs
    assert limits == found
    for path in re.findall(r"`(src/weft/[\w/.]+)`", page):
        assert (ROOT / path).exists(), path
    for family in re.findall(r"--only ([\w ]+)`", page)[0].split():
        assert family in FAMILIES
