"""Under torchrun: ranks that are killed, and hosts that are apart."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from small_run import SMALL, furthest, train_alone

from weft.train.run_folder import list_checkpoints, read_lines
from weft.train.sample import load_model

pytestmark = pytest.mark.processes
HERE = Path(__file__).parent
RUN = replace(SMALL, steps=12, checkpoint_every=4, validate_every=6, timeout=60.0)
SECONDS = 240.0  # until a command is given up


@pytest.fixture
def config(tmp_path: Path) -> Path:
    values = json.loads(RUN.as_json())
    path = tmp_path / "config.json"
    path.write_text(json.dumps({name: value for name, value in values.items() if name not in ("out", "dp")}))
    return path


def torchrun(ranks: int, *program: str, restarts: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["--max-restarts", str(restarts), "--monitor-interval", "0.1", *program]
    return subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1", **environment}, capture_output=True, text=True,
        timeout=SECONDS,
    )  # fmt: skip


def losses_in(folder: Path) -> list[tuple[int, float, float | None]]:
    return [(line["step"], line["loss"], line.get("valid_loss")) for line in read_lines(folder / "metrics.jsonl")]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float, float | None]]:
    """On two context ranks that the command starts by itself."""
    folder = tmp_path_factory.mktemp("whole")
    values = json.loads(RUN.as_json())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in values.items() if k not in ("out", "dp")}))
    weft = [sys.executable, "-c", "from weft.cli import main; main()", "train", str(folder / "config.json")]
    done = subprocess.run([*weft, "--cp", "2", "--out", str(folder / "run")], capture_output=True, text=True,
                          timeout=SECONDS)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (folder / "run" / "report.html").is_file() and "mesh=dp 1 x cp 2 x tp 1" in done.stderr
    found = losses_in(folder / "run")
    assert furthest([loss for _, loss, _ in found], train_alone(steps=12)) < 1e-6
    return found


def places() -> Iterator[str]:
    """Where to kill: anywhere in a step, and at both ends of a write."""
    source = random.Random(os.environ.get("WEFT_SEED", "11"))
    yield f"step,{source.randrange(2)},{source.randrange(5, 12)},{source.random() * 0.2:.3f}"
    yield "write,1,8,0"
    yield "name,0,8,0"
    for _ in range(6):
        yield f"step,{source.randrange(2)},{source.randrange(2, 12)},{source.random() * 0.2:.3f}"


PLACES = [pytest.param(place, marks=pytest.mark.slow) for place in places()]


@pytest.mark.parametrize("place", PLACES)
def test_a_rank_that_is_killed(
    tmp_path: Path, config: Path, place: str, uninterrupted: list[tuple[int, float, float | None]]
) -> None:
    """torchrun starts the ranks again; the losses are those of a run that nobody killed, to the bit."""
    done = torchrun(
        2, str(HERE / "killed_run.py"), str(config), "--cp", "2", "--out", str(tmp_path / "run"), restarts=2, KILL=place
    )
    assert done.returncode == 0, done.stderr
    assert "SIGKILL" in done.stderr or "-9" in done.stderr, "nobody was killed"
    assert losses_in(tmp_path / "run") == uninterrupted
    if place.startswith(("write", "name")):
        assert "from step=4" in done.stderr  # the one before
    assert not list((tmp_path / "run" / "checkpoints").glob("*.partial"))
    for folder in list_checkpoints(tmp_path / "run"):
        load_model(folder)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [["--cp", "3"], ["--data", "/nowhere"], ["--resume", "/nowhere"]], ids=str)
def test_wrong_input_to_ranks_that_are_there(tmp_path: Path, config: Path, wrong: list[str]) -> None:
    """One line, from one rank; nothing is written."""
    out = tmp_path / "run"
    done = torchrun(2, "-m", "weft.train", str(config), *wrong, "--out", str(out))
    lines = [line for line in done.stderr.splitlines() if line.startswith("train: ")]
    assert done.returncode != 0 and len(lines) == 1 and wrong[1] in lines[0], done.stderr
    assert "exitcode  : 2" in done.stderr and not out.exists()


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Two network namespaces that a cable joins: 10.77.0.1 and 10.77.0.2."""
    names = [f"weft{os.getpid()}{side}" for side in "ab"]
    ip = shutil.which("ip")
    if os.geteuid() or ip is None or subprocess.run([ip, "netns", "add", names[0]], capture_output=True).returncode:
        pytest.skip("no network namespaces can be made here: two hosts were not tried")
    subprocess.run([ip, "netns", "add", names[1]], check=True)
    try:
        pair = [ip, "link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable"]
        subprocess.run([*pair, "netns", names[1]], check=True)
        for number, name in enumerate(names, 1):
            for words in (f"addr add 10.77.0.{number}/24 dev cable", "link set cable up", "link set lo up"):
                subprocess.run([ip, "-n", name, *words.split()], check=True)
        yield names
    finally:
        for name in names:
            subprocess.run([ip, "netns", "del", name], check=True)


@pytest.mark.slow
def test_two_hosts(tmp_path: Path, config: Path, hosts: list[str]) -> None:
    """Two ranks on each; the losses are those of one process."""
    common = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2",
              "--master-addr", "10.77.0.1", "--master-port", "29501"]  # fmt: skip
    program = ["-m", "weft.train", str(config), "--cp", "2", "--out", str(tmp_path / "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "cable"}
    running = [
        subprocess.Popen(
            ["ip", "netns", "exec", host, *common, "--node-rank", str(rank), *program], env=environment,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank, host in enumerate(hosts)
    ]  # fmt: skip
    try:
        printed = [process.communicate(timeout=SECONDS)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], printed
    found = [loss for _, loss, _ in losses_in(tmp_path / "run")]
    assert furthest(found, train_alone(steps=12)) < 1e-6
