"""Nothing of a local run listens where other hosts can reach it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from listeners import addresses_of, beyond_loopback, watch
from small_run import SMALL

import weft
from weft.parallel.mesh import make_mesh
from weft.world.launch import ProcessWorld

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="sockets are looked up as Linux shows them"),
]
WEFT = [sys.executable, "-c", "from weft.cli import main; main()"]


def train(folder: Path) -> list[str]:
    values = json.loads(replace(SMALL, steps=3, checkpoint_every=0, validate_every=0).as_json())
    (folder / "c.json").write_text(json.dumps({**values, "out": str(folder / "run")}))
    return ["train", str(folder / "c.json"), "--dp", "2", "--cp", "1"]


RUNS: dict[str, Callable[[Path], list[str]]] = {
    "train": train,
    "bench": lambda folder: ["bench", "scan", "--ranks", "2", "--repeats", "1", "--calls", "1"],
    "demo": lambda folder: ["demo", "--steps", "2", "--ranks", "2", "--out", str(folder / "demo")],
}


@pytest.mark.parametrize("name", ["train", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bench", "demo"))])
def test_a_command_listens_on_loopback_only(tmp_path: Path, name: str) -> None:
    """Also where the environment names another interface for Gloo."""
    run = f"{name}-{os.getpid()}"
    seen, status, said = watch([*WEFT, *RUNS[name](tmp_path)], run, 280, GLOO_SOCKET_IFNAME="eth0")
    assert status == 0, said
    assert len(seen) >= 3, "the store and both ranks should have been seen"
    assert beyond_loopback(seen) == set()


def make_groups(axis: weft.Axis) -> int:
    make_mesh((2, 1, 1))
    return os.getpid()


def test_launched_ranks_listen_on_loopback_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    with ProcessWorld(2) as world:
        processes = [os.getpid(), *world.run(make_groups)]
        seen = addresses_of(processes)
    assert set(seen) == set(processes) and beyond_loopback(seen) == set()
