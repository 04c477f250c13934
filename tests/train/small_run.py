"""A small run for tests: a few thousand weights, text of the standard library's `os` module."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import weft
from weft.parallel.mesh import ParallelMesh, make_mesh
from weft.train.config import TrainConfig
from weft.train.run_folder import whole_checkpoints
from weft.train.trainer import Trainer

# 6 sequences of 31 tokens: neither their ends nor those of documents are where ranks' slices end.
SMALL = TrainConfig(
    steps=20, length=31, batch=6, width=16, layers=2, heads=2, kv_heads=2, hidden=32, table_rows=257, dtype="fp64",
    warmup=4, device="cpu", validate_every=0, checkpoint_every=0, timeline_step=0, held_out=0.1, data=Path(os.__file__),
)  # fmt: skip


def small_config(folder: Path, **changes: object) -> str:
    """A file of settings for the command: 4 steps, checkpoints at 2 and 4."""
    values = json.loads(replace(SMALL, steps=4, checkpoint_every=2, timeline_step=2, validate_every=2).as_json())
    path = folder / "small.json"
    path.write_text(json.dumps({**values, "out": "run", **changes}))
    return str(path)


def find_checkpoint(path: Path) -> tuple[Path, dict[str, Any]]:
    """(folder, what it says of itself) of the newest whole checkpoint of a run, or of the checkpoint ``path``."""
    return next(whole_checkpoints(path))


def virtual_mesh(axis: weft.Axis, dp: int, cp: int) -> ParallelMesh:
    """The mesh of virtual ranks; tensor parallelism is torch's, and needs processes."""
    row, column = divmod(axis.rank, cp)
    data = axis.subset([other * cp + column for other in range(dp)])
    context = axis.subset([row * cp + other for other in range(cp)])
    return ParallelMesh(data, context, axis.subset([axis.rank]), axis, axis, None)


def losses_of(trainer: Trainer) -> list[float]:
    """Of all steps, with nothing written."""
    try:
        return [trainer.take_step().loss for _ in range(trainer.config.steps)]
    finally:
        trainer.close()


def train_on_mesh(axis: weft.Axis, shape: tuple[int, int, int], config: TrainConfig) -> list[float]:
    """On real ranks."""
    return losses_of(Trainer(replace(config, dp=shape[0], cp=shape[1], tp=shape[2]), make_mesh(shape)))


def train_alone(**changes: Any) -> list[float]:
    return losses_of(Trainer(replace(SMALL, **changes), make_mesh((1, 1, 1))))


def furthest(losses: list[float], wanted: list[float]) -> float:
    """The largest relative difference of two curves."""
    return max(abs(one - other) / other for one, other in zip(losses, wanted, strict=True))
