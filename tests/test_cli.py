"""The command line as a user starts it: in processes of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from weft.bench.matrix.methods import OPTIMIZERS
from weft.bench.matrix.quality import RATES
from weft.bench.step.cases import methods_on
from weft.bench.step.runs import Run, Sizes
from weft.cli import main
from weft.comm import Axis
from weft.ops.fused.ahead import Shape, compile_for
from weft.ops.fused.tiling import KERNELS
from weft.ops.linear_attention.fused.ahead import launches
from weft.ops.scan import METHODS
from weft.world.launch import launch

pytestmark = pytest.mark.processes
QUICK = ["--repeats", "1", "--calls", "1"]


# A shell starts background jobs with Ctrl-C ignored, and Python keeps it so: these tests must not depend on it.
PROGRAM = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from weft.cli import main
main()
"""


def weft_command(*words: str) -> list[str]:
    return [sys.executable, "-c", PROGRAM, *words]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(weft_command(*words), capture_output=True, text=True, timeout=240)


def test_bench_scan_writes_a_table_and_rows_with_a_header(tmp_path: Path) -> None:
    result = run("bench", "scan", "--ranks", "3", "--json", str(tmp_path / "rows.json"), *QUICK)
    assert result.returncode == 0, result.stderr
    kept = json.loads((tmp_path / "rows.json").read_text())
    assert {"processor", "torch", "commit", "ranks", "when"} <= set(kept["header"]) and kept["header"]["ranks"] == 3
    assert [row["method"] for row in kept["rows"]] == list(METHODS) * 3
    for row in kept["rows"]:
        assert row["error"] < 1e-6 and row["milliseconds"] > 0 and row["to_handwritten"] > 0
        assert row["method"] in result.stdout and row["state"] in result.stdout
    rounds = {row["method"]: row["rounds"] for row in kept["rows"]}
    assert rounds.items() >= {"ring": 2, "pipeline": 2, "gather": 1, "doubling": 2, "transpose": 2, "tree": 3}.items()


@pytest.mark.slow
def test_bench_linear_attention_compares_with_the_baselines(tmp_path: Path) -> None:
    words = ["bench", "linear-attention", "--tokens", "64", "--repeats", "1", "--json", str(tmp_path / "rows.json")]
    result = run(*words, "--virtual-ranks", "32", "--h100-ranks", "16")
    assert result.returncode == 0, result.stderr
    assert torch.cuda.is_available() or "no CUDA device" in result.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    by_case = {(row["table"], row["case"]): row for row in rows}
    assert ("kernel", "weft, scalar gate") in by_case
    ours, lasp2 = by_case["ranks", "weft auto"], by_case["ranks", "LASP-2: blocking all-gather"]
    assert 0 < ours["bytes_sent"] < lasp2["bytes_sent"] and by_case["ranks", "no communication"]["bytes_sent"] == 0
    # In virtual time on many ranks the scan is nearly hidden, and every baseline is behind.
    for wanted, least in (("virtual", 1.5), ("h100, 16 ranks", 1.0)):
        virtual = {case: row["to_weft"] for (table, case), row in by_case.items() if table == wanted}
        assert len(virtual) == 5
        assert all(virtual[name] > least for name in virtual if name.split(":")[0] in ("LASP", "LASP-2", "ZeCO"))


@pytest.mark.slow
def test_bench_attention_counts_what_the_baselines_send(tmp_path: Path) -> None:
    rows_file = tmp_path / "rows.json"
    result = run("bench", "attention", "--tokens", "256", "--repeats", "1", "--json", str(rows_file))
    assert result.returncode == 0, result.stderr
    rows = {row["case"]: row for row in json.loads(rows_file.read_text())["rows"]}
    assert rows["one process, 2 threads"]["bytes_sent"] == 0
    ours = rows["weft gather, zigzag"]["bytes_sent"]
    assert 0 < ours < rows["zigzag ring"]["bytes_sent"] and "strided all-gather" in result.stdout
    bad = run("bench", "attention", "--tokens", "257")
    assert bad.returncode == 2 and "--tokens 257 must be a multiple of twice the 2 ranks" in bad.stderr


@pytest.mark.slow
def test_bench_rows_counts_what_travels(tmp_path: Path) -> None:
    kept = tmp_path / "rows.json"
    result = run("bench", "rows", "--smaller", "250", "--repeats", "1", "--warm-steps", "1", "--json", str(kept))
    assert result.returncode == 0, result.stderr
    rows = [row for row in json.loads(kept.read_text())["rows"] if row["table"] == "rows"]
    assert len({row["case"] for row in rows}) == 4
    for case in {row["case"] for row in rows}:
        sent = {row["method"]: row["megabytes"] for row in rows if row["case"] == case}
        assert sent["weft exact"] < sent["push + dense Adam + dense gather"] < sent["dense reduce-scatter + gather"]
        assert sent["weft exact"] < sent["all-gather of sparse gradients"]


@pytest.mark.slow
def test_under_torchrun_the_bench_joins_its_world(tmp_path: Path) -> None:
    script = tmp_path / "bench.py"
    script.write_text("from weft.cli import main\nmain()\n")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    rows = tmp_path / "rows.json"
    good = subprocess.run(
        [*torchrun, "bench", "scan", "--json", str(rows), *QUICK], capture_output=True, text=True, timeout=240
    )
    assert good.returncode == 0, good.stderr
    assert good.stdout.count("exclusive scan on 2 ranks") == 1
    assert json.loads(rows.read_text())["header"]["ranks"] == 2
    bad = subprocess.run([*torchrun, "bench", "scan", "--ranks", "5"], capture_output=True, text=True, timeout=240)
    assert bad.returncode != 0 and "--ranks 5 does not fit the 2 ranks torchrun started" in bad.stderr


def interrupt(line: str, *words: str) -> tuple[int, str, str]:
    """Start the command, press Ctrl-C when it has said ``line``: its exit code, output and errors."""
    process = subprocess.Popen(weft_command(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        said = []
        while line not in (said[-1:] or [""])[0]:
            said.append(process.stderr.readline())
            assert said[-1], said
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, "".join(said) + err
    finally:
        process.kill()


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    rows = tmp_path / "rows.json"
    words = ("bench", "scan", "--ranks", "2", "--repeats", "100000", "--calls", "1", "--json", str(rows))
    code, out, err = interrupt("scan: measuring", *words)
    assert code == 0, err
    assert "stopped: the rows measured so far follow" in err and "doubling" in out
    assert all(row["samples"] > 0 for row in json.loads(rows.read_text())["rows"])
    assert "Traceback" not in err


@pytest.mark.parametrize("line", [pytest.param("starting 2 ranks", marks=pytest.mark.slow), "scan: warming up"])
def test_ctrl_c_before_the_first_sample_ends_it_too(line: str) -> None:
    code, _, err = interrupt(line, "bench", "scan", "--ranks", "2", "--repeats", "100000")
    assert code in (0, 130), err  # 0 if the table could be shown all the same


@pytest.fixture
def call_main(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The command in this process, where torch is already imported: its exit code."""

    def call(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["weft", *words])
        try:
            main()
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    return call


def test_trace_writes_a_timeline_and_refuses_an_unknown_method(
    tmp_path: Path, call_main: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert call_main("trace", "scan", "--out", str(tmp_path / "t.json"), "--method", "ring", "--ranks", "5") == 0
    said = capsys.readouterr().out
    assert "ring on 5 ranks" in said and "4 rounds" in said
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert call_main("trace", "scan", "--out", str(tmp_path / "u.json"), "--method", "bush") == 2
    assert "method 'bush' is not one of ring" in capsys.readouterr().err
    assert not (tmp_path / "u.json").exists()


def test_kernels_are_compiled_and_described(
    tmp_path: Path, call_main: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "rows.json"
    words = ("kernels", "--decays", "none", "--dims", "64", "--capabilities", "90", "--json", str(kept))
    assert call_main(*words) == 0
    tables = json.loads(kept.read_text())["rows"]
    rows = [row for row in tables if row["table"] == "kernels"]
    back = {"chunk_states (q, do)", "scan_pieces (back)", "output_intra (dv)", "output_inter (dv)"}
    assert {row["kernel"] for row in rows} == {*KERNELS, *back}
    said = capsys.readouterr().out
    for row in rows:
        assert row["kernel"].split()[0] in said and row["spilled"] == 0 and 0 < row["percent_of_roof"] <= 100
        # A kernel without products has no intensity; none of these reaches the rate of the tensor cores.
        assert (row["intensity"] == 0) == row["kernel"].startswith("scan_pieces") and row["percent_of_peak"] < 50
    counted = {row["phase"]: row for row in tables if row["table"] == "phases"}
    for way, reads_and_writes in (("forward", 4), ("backward", 7)):
        parts = [counted[way], counted[f"{way}.intra"], counted[f"{way}.finish"]]
        whole = counted[f"{way}, all"]
        for key, least in (("bytes", "least_with_states"), ("kiloflops", "least_kiloflops")):
            assert sum(part[key] for part in parts) == pytest.approx(whole[key]) and whole[key] > whole[least] > 0
        assert whole["least_bytes"] == reads_and_writes * 64 * 2
    assert call_main("kernels", "--decays", "dense") == 2 and "decay 'dense' is not one of" in capsys.readouterr().err
    assert call_main("kernels", "--decays", "none", "--capabilities", "70") == 2
    assert "compute capability 70 is not one of 80, 90, 100" in capsys.readouterr().err
    spills = replace(compile_for(launches(Shape("none", 64, 64))[0].launch, 90), spilled=12)
    ahead = sys.modules[compile_for.__module__]
    monkeypatch.setattr(ahead, "compile_for", lambda launch, capability: spills)
    assert call_main(*words) == 1 and "12 bytes of registers are spilled" in capsys.readouterr().err


def test_help_is_there(call_main: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--help"], ["bench", "--help"], ["bench", "scan", "--help"]):
        assert call_main(*words) == 0 and "bench" in capsys.readouterr().out


def test_a_wrong_number_of_ranks_is_refused(call_main: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert call_main("bench", "scan", "--ranks", "0", *QUICK) == 2
    assert "ranks must be at least 1" in capsys.readouterr().err


@pytest.mark.slow
def test_bench_matrix_compares_with_the_replicated_algorithm(
    tmp_path: Path, call_main: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.bench.matrix.virtual.STEPS", 5)
    kept = tmp_path / "rows.json"
    words = ["bench", "matrix", "--widths", "8", "--blocks", "1", "--repeats", "1", "--warm-steps", "1"]
    assert call_main(*words, "--json", str(kept)) == 0
    shown = capsys.readouterr().out
    rows = {row["method"]: row for row in json.loads(kept.read_text())["rows"]}
    assert len(rows) == 36 and all(name in shown for name in ("replicated, tensor 4", "exact, data 2 x tensor 2"))
    for name in OPTIMIZERS:  # in virtual time: 12 blocks of h = 768 on 8 H100s
        assert 1 < rows[name]["to_bound"] < 1.065 and rows[name]["to_bound_in_order"] < 1.12, name
    for ranks in (2, 4):
        replicated = rows[f"replicated, tensor {ranks}"]
        # All of every gradient's shards, and of both factors' rows, to each of the others.
        elements = sum(m * n + m * m + n * n for m, n in ((24, 8), (8, 8), (32, 8), (8, 32)))
        assert replicated["megabytes"] == (ranks - 1) * 4 * elements / ranks / 1e6
        for name in OPTIMIZERS:
            ours = rows[f"{name}, tensor {ranks}"]
            assert 0 < ours["megabytes"] < replicated["megabytes"] and ours["to_one_thread"] > 0
            assert (ours["less_cpu"] is not None) == (name in ("exact", "stable", "stable, every step"))
    alone = rows["exact, serial, 1 thread"]
    assert alone["megabytes"] == 0 and alone["busiest"] == 1 and 0 < alone["eigh_share"] < 1
    # Moments, factors, bases and eigenvalues of all matrices, and a count of steps for each.
    floats = sum(2 * m * n + 2 * m * m + 2 * n * n + m + n + 1 for m, n in ((24, 8), (8, 8), (32, 8), (8, 32)))
    assert alone["state_megabytes"] == 4 * floats / 1e6


@pytest.mark.slow
def test_bench_step_steps_alike_and_sends_less_than_ddp_and_zero(
    tmp_path: Path, call_main: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "rows.json"
    words = ["bench", "step", "--width", "16", "--blocks", "1", "--rows", "4000", "--vocabulary", "64"]
    words += ["--tokens", "256", "--repeats", "2", "--warm-steps", "4", "--json", str(kept)]
    assert call_main(*words) == 0
    shown = capsys.readouterr().out
    rows = {(row["case"], row["method"]): row for row in json.loads(kept.read_text())["rows"]}
    assert len(rows) == 12 and all(name in shown for _, name in rows)
    elements = 16 * (4000 + 64 + 12 * 16 + 3)
    for ranks in (2, 4):
        of = {method: row for (case, method), row in rows.items() if case == str(ranks)}
        for row in of.values():
            assert row["milliseconds"] > 0 and row["cpu_milliseconds"] > 0 and row["samples"] == 2
            assert row["to_zero"] > 0 and row["peak_megabytes"] >= 0
        for parts in ("REKLS", "AdamW"):
            alike = [of[f"{parts}, {way}"] for way in ("in sequence", "overlapped")]
            assert len({tuple(row["weights"]) for row in alike}) == 1 and len(alike[0]["weights"]) == ranks
            for row in alike:  # the kernel counts what the ledger counts, and what Gloo puts around it
                assert row["ledger_megabytes"] <= row["megabytes"] < 1.5 * row["ledger_megabytes"] + 0.02
                assert row["exposed_milliseconds"] > 0 and row["to_sequence"] > 0
                assert row["megabytes"] < of["DDP + AdamW"]["megabytes"] < of["DDP + ZeRO AdamW"]["megabytes"]
        assert of["REKLS, overlapped"]["weights"] != of["AdamW, overlapped"]["weights"]
        assert len({*of["DDP + AdamW"]["weights"], *of["DDP + ZeRO AdamW"]["weights"]}) == 1
        # An all-reduce of all gradients sends at least this, if it is counted as one that is spread over the ranks.
        assert of["DDP + AdamW"]["megabytes"] >= 2 * (ranks - 1) / ranks * 4 * elements / 1e6
    assert call_main("bench", "step", "--ranks", "1") == 2
    assert "bench step compares steps over 2 and 4 ranks, got 1" in capsys.readouterr().err


def test_bench_step_takes_weft_and_ddp_to_the_same_weights() -> None:
    found = launch(train_both, 2)
    for rank, (ours, torchs) in enumerate(found):
        torchs[0] = torchs[0][rank::2]  # the rows of the table that this rank owns
        for mine, other in zip(ours, torchs, strict=True):
            assert mine.shape == other.shape and mine.abs().sum() > 0
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def train_both(axis: Axis) -> list[list[torch.Tensor]]:
    sizes, found = Sizes(width=16, blocks=1, rows=100, vocabulary=32, tokens=24), []
    for name in ("AdamW, overlapped", "DDP + AdamW"):
        run = Run(axis, next(method for method in methods_on(2) if method.name == name), sizes)
        for step in range(4):
            run.step(run.draw(step))
        found.append([weight.detach().clone() for weight in run.weights()])
    return found


@pytest.mark.slow
def test_bench_matrix_quality_takes_the_best_rate_of_each_method(
    tmp_path: Path, call_main: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for (task, method), rates in RATES.items():
        monkeypatch.setitem(RATES, (task, method), rates[:2] if task == "teacher-student" else rates[:1])
    kept = tmp_path / "rows.json"
    assert call_main("bench", "matrix", "--quality", "--seeds", "3", "--steps", "4", "--json", str(kept)) == 0
    shown, rows = capsys.readouterr().out, json.loads(kept.read_text())["rows"]
    trained = [row for row in rows if row["table"] == "quality"]
    assert [(row["case"], row["method"]) for row in trained] == list(RATES)
    for row in trained:
        assert row["case"] in shown and set(row["losses"]) == {str(rate) for rate in RATES[row["case"], row["method"]]}
        medians = {float(rate): sorted(losses)[1] for rate, losses in row["losses"].items()}
        assert row["loss"] == min(medians.values()) == medians[row["rate"]] and row["cpu_milliseconds"] > 0
        assert len(set(row["losses"][str(row["rate"])])) == 3  # every seed is another run
    losses = {(row["case"], row["method"]): row["loss"] for row in trained}
    assert all(row["to_adamw"] == row["loss"] - losses[row["case"], "AdamW"] for row in trained if row["to_adamw"])
    moved = {row["method"]: row for row in rows if row["table"] == "conditioning"}
    assert moved["stable"]["even"] < 1e-4 and moved["stable"]["partly_zero"] < 1e-4 and moved["exact"]["even"] > 0.1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seeds", "2"], "--seeds needs --quality"),
        (["--quality", "--warm-steps", "2"], "--warm-steps cannot be combined with --quality"),
    ],
)
def test_bench_matrix_refuses_what_it_would_ignore(
    words: list[str], said: str, call_main: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert call_main("bench", "matrix", *words) == 2
    assert said in capsys.readouterr().err
