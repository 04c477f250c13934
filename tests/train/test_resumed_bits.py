"""A run that was saved and resumed has the losses and weights of one that was not, to the bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_run import SMALL
from torch import Tensor

import weft
from weft.parallel.mesh import make_mesh
from weft.train.config import TrainConfig
from weft.train.run_folder import read_lines, step_folder
from weft.train.trainer import Trainer
from weft.world.launch import ProcessWorld

HERE = Path(__file__).parent
# Many more rows than a batch touches: rows rest for several steps, before the checkpoint and across it.
RUN = replace(
    SMALL, steps=30, length=64, batch=4, table_rows=65_537, lr_rows=0.003, warmup=20, checkpoint_every=10, keep=9,
    dtype="fp32",
)  # fmt: skip
SAVED_AT = 10


def train(config: TrainConfig, shape: tuple[int, int, int]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, and all that a rank holds at the end, rows up to date."""
    trainer = Trainer(config, make_mesh(shape))
    losses = [result.loss for result in trainer]
    trainer.step.state_dict()
    return losses, {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}


def both(axis: weft.Axis | None, out: str, shape: tuple[int, int, int], pattern: str = "ls") -> None:
    config = replace(RUN, out=Path(out) / "whole", dp=shape[0], cp=shape[1], pattern=pattern)
    losses, weights = train(config, shape)
    again = replace(config, out=Path(out) / "again", resume=step_folder(config.out, SAVED_AT))
    found, same = train(again, shape)
    assert len(found) == 20 and found == losses[SAVED_AT:]
    assert all(torch.equal(same[name], weights[name]) for name in weights)


@pytest.mark.parametrize("pattern", ["ls", "d"])
def test_in_one_process(tmp_path: Path, pattern: str) -> None:
    both(None, str(tmp_path), (1, 1, 1), pattern)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("shape", "pattern"), [((2, 1, 1), "ls"), ((1, 2, 1), "ls"), ((1, 2, 1), "d")], ids=["dp 2", "cp 2", "cp 2, d"]
)
def test_on_two_ranks(two: ProcessWorld, tmp_path: Path, shape: tuple[int, int, int], pattern: str) -> None:
    two.run(both, str(tmp_path), shape, pattern)


@pytest.mark.slow
@pytest.mark.processes
def test_after_a_restart_by_torchrun(tmp_path: Path) -> None:
    """A rank is killed in step 14; the ranks start again from step 10, and have the losses of a run without that."""
    values = json.loads(replace(RUN, timeout=60.0).as_json())
    path = tmp_path / "config.json"
    path.write_text(json.dumps({name: value for name, value in values.items() if name not in ("out", "dp")}))
    found = {}
    for name, kill in (("whole", "step,0,999,0"), ("killed", "step,1,14,0")):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                   "--max-restarts", "1", "--monitor-interval", "0.1", str(HERE / "killed_run.py"), str(path),
                   "--dp", "2", "--out", str(tmp_path / name)]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "KILL": kill}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        assert ("from step=10" in done.stderr) == (name == "killed")
        found[name] = [(line["step"], line["loss"]) for line in read_lines(tmp_path / name / "metrics.jsonl")]
    assert found["killed"] == found["whole"] and len(found["whole"]) == 30
