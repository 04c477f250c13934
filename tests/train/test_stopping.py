"""SIGTERM and Ctrl-C: the step is finished and saved, on every rank, and the command ends with a known status."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from small_run import SMALL, find_checkpoint, virtual_mesh
from worlds import virtual_world

import weft
from weft.parallel.mesh import make_mesh
from weft.train import command
from weft.train.command import StopRequest
from weft.train.config import TrainConfig
from weft.train.run_folder import list_checkpoints, read_lines
from weft.train.trainer import Trainer
from weft.world.launch import ProcessWorld

HERE = Path(__file__).parent
SECONDS = 250.0  # until a command is given up
# A step and a checkpoint take long where many others compute: the bound itself is tested by itself.
ENDLESS = replace(SMALL, steps=100_000, warmup=4, lr=0.0, lr_adamw=0.0, lr_rows=0.0, grace=200.0)
BOTH = [pytest.param(signal.SIGTERM, 143, id="SIGTERM"),
        pytest.param(signal.SIGINT, 130, id="SIGINT", marks=pytest.mark.slow)]  # fmt: skip


def write_config(folder: Path, config: TrainConfig) -> str:
    values = json.loads(config.as_json())
    path = folder / "config.json"
    path.write_text(json.dumps({name: value for name, value in values.items() if name not in ("out", "dp")}))
    return str(path)


@contextmanager
def started(*command: str) -> Iterator[subprocess.Popen[str]]:
    """It hears SIGINT, also where these tests run in the background of a shell, which ignores it."""
    process = subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for_steps(process: subprocess.Popen[str], run: Path, steps: int) -> None:
    end = time.monotonic() + SECONDS
    while len(list(read_lines(run / "metrics.jsonl"))) < steps:
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < end, "no steps"
        time.sleep(0.05)


def check_saved(run: Path) -> int:
    """The last line of the metrics and the newest checkpoint are of the same step."""
    step = find_checkpoint(run)[1]["step"]
    assert [line["step"] for line in read_lines(run / "metrics.jsonl")] == list(range(1, step + 1))
    assert not list((run / "checkpoints").glob("*.partial"))
    return int(step)


@pytest.mark.processes
@pytest.mark.parametrize(("number", "status"), BOTH)
def test_one_process(tmp_path: Path, number: signal.Signals, status: int) -> None:
    run = tmp_path / "run"
    with started("-m", "weft.train", write_config(tmp_path, ENDLESS), "--out", str(run)) as process:
        wait_for_steps(process, run, 3)
        process.send_signal(number)
        printed, said = process.communicate(timeout=SECONDS)
    assert process.returncode == status and printed == ""
    step = check_saved(run)
    (line,) = [line for line in said.splitlines() if line.startswith("train: ") and "reading data" not in line]
    saved = run / "checkpoints" / f"step-{step:08d}"
    assert line == f"train: {number.name}: stopped after step {step}, saved as {saved}; --resume {run} goes on"


@pytest.mark.processes
@pytest.mark.parametrize(
    "again",
    [pytest.param(True, id="a second signal"), pytest.param(False, id="the bound", marks=pytest.mark.slow)],
)
def test_what_does_not_end(tmp_path: Path, again: bool) -> None:
    """A second signal ends a process at once, and so does the end of --grace, whatever its main thread stands in."""
    command = [str(HERE / "stuck_run.py"), write_config(tmp_path, ENDLESS), "--out", str(tmp_path / "run")]
    with started(*command, "--grace", "500" if again else "0.5") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "stuck\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "noted\n"
        if again:
            process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=SECONDS)
    assert process.returncode == (130 if again else 143)
    assert ("SIGINT again" if again else "not done after 0.5 s (--grace)") in said.splitlines()[-1], said


def test_all_ranks_hear_of_it_at_the_same_step() -> None:
    """One of four is signalled in the middle of a run."""

    def program(axis: weft.Axis) -> list[int]:
        trainer = Trainer(
            replace(SMALL, dp=2, cp=2), virtual_mesh(axis, 2, 2),
            lambda: signal.SIGTERM if axis.rank == 2 and trainer.done >= 2 else 0,
        )  # fmt: skip
        try:
            return [trainer.take_step().signal for _ in range(3)]
        finally:
            trainer.close()

    assert virtual_world(4).run(program).results == [[0, 15, 15]] * 4


@pytest.mark.processes
def test_ranks_end_together_and_go_on(two: ProcessWorld, tmp_path: Path) -> None:
    """Rank 1 alone is signalled: both save that step, and a resumed run has the losses of one that was left alone."""
    config = replace(SMALL, steps=9, cp=2, dp=1, validate_every=4, checkpoint_every=4)
    wanted = two.run(losses, replace(config, out=tmp_path / "whole"), 99)
    found = two.run(losses, replace(config, out=tmp_path / "run"), 5)
    assert [(done, by) for _, done, by in found] == [(6, 15)] * 2
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["step-00000006", "step-00000004"]
    again = two.run(losses, replace(config, out=tmp_path / "run", resume="auto"), 99)
    for one, two_, whole in zip(found, again, wanted, strict=True):
        assert one[0] + two_[0] == whole[0] and (two_[1], two_[2]) == (9, 0)


def losses(axis: weft.Axis, config: TrainConfig, stop_after: int) -> tuple[list[float], int, int]:
    trainer = Trainer(
        config, make_mesh((1, 2, 1)), lambda: signal.SIGTERM if axis.rank == 1 and trainer.done > stop_after else 0
    )
    return [result.loss for result in trainer], trainer.done, trainer.ended_by


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(("number", "status"), BOTH)
def test_local_ranks(tmp_path: Path, number: signal.Signals, status: int) -> None:
    run = tmp_path / "run"
    command = ["-c", "from weft.cli import main; main()", "train", write_config(tmp_path, ENDLESS), "--cp", "2"]
    with started(*command, "--out", str(run)) as process:
        wait_for_steps(process, run, 3)
        process.send_signal(number)
        _, said = process.communicate(timeout=SECONDS)
    assert process.returncode == status, said
    assert f"{number.name}: stopped after step {check_saved(run)}" in said


@pytest.mark.slow
@pytest.mark.processes
def test_torchrun_is_preempted(tmp_path: Path) -> None:
    """It passes SIGTERM on and waits; the same command goes on afterwards."""
    run = tmp_path / "run"
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "weft.train",
               write_config(tmp_path, ENDLESS), "--cp", "2", "--out", str(run), "--resume", "auto"]  # fmt: skip
    steps = 0
    for _ in range(2):
        with started(*command) as process:
            wait_for_steps(process, run, steps + 3)
            process.send_signal(signal.SIGTERM)
            _, said = process.communicate(timeout=SECONDS)
        assert process.returncode, said
        found = check_saved(run)
        assert found >= steps + 3 and f"SIGTERM: stopped after step {found}" in said, said
        steps = found


def test_handlers_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "TOGETHER", 600.0)
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    fd = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(fd)
    with StopRequest(60.0) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)  # together with the first, so it is one
        end = time.monotonic() + 30
        while not stop.signal and time.monotonic() < end:
            time.sleep(0.01)
        assert stop.signal in (signal.SIGTERM, signal.SIGINT)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    assert signal.set_wakeup_fd(fd) == fd
