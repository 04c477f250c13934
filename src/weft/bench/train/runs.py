"""The training steps that `weft bench train` measures, on the ranks of a pool."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weft.bench.timing import busy_seconds, line_up, sent_bytes
from weft.bench.train.plain import PlainTrainer, bytes_by_family
from weft.bench.train.replay import ReplayTrainer
from weft.comm import Axis, record
from weft.parallel.mesh import make_mesh
from weft.train.config import TrainConfig
from weft.train.trainer import Trainer

WEFT, PLAIN, NO_MESSAGES = "weft", "plain pieces", "messages already there"
KINDS: dict[str, type[Trainer]] = {WEFT: Trainer, PLAIN: PlainTrainer, NO_MESSAGES: ReplayTrainer}
_made: dict[str, Trainer] = {}  # of this rank


@dataclass(frozen=True)
class Sample:
    """One step on one rank: seconds, seconds of CPU, seconds it stood waiting, bytes by family and by the kernel.

    ``machine``: seconds of CPU that all processes of the machine used meanwhile.
    """

    wall: float
    cpu: float
    waited: float
    sent: dict[str, int]
    kernel_sent: int | None
    machine: float | None


def make_config(shape: tuple[int, int, int], **settings: Any) -> TrainConfig:
    """The settings of a run that only steps: nothing is written, and rates are as in the middle of a run."""
    dp, cp, tp = shape
    return TrainConfig(
        out=Path("not written"), steps=1_000_000, dp=dp, cp=cp, tp=tp, held_out=0.0, timeline_step=0, **settings
    )


def prepare(axis: Axis, kinds: tuple[str, ...], config: TrainConfig, warm_steps: int) -> None:
    """Make the trainers, and step them for a while; those made before are given up."""
    gc.freeze()  # what is here already, modules above all, need not be looked through whenever a model is given up
    give_up(axis)
    assert config.dp is not None
    mesh = make_mesh((config.dp, config.cp, config.tp))
    for kind in kinds:
        _made[kind] = trainer = KINDS[kind](config, mesh)
        for _ in range(warm_steps):
            trainer.take_step()
        if isinstance(trainer, ReplayTrainer):
            trainer.record_step()


def give_up(axis: Axis) -> None:
    """Forget the trainers of this rank."""
    for trainer in _made.values():
        trainer.close()
    _made.clear()
    gc.collect()


def set_threads(axis: Axis, threads: int) -> None:
    """Of this rank."""
    torch.set_num_threads(threads)


def sample(axis: Axis, kinds: tuple[str, ...]) -> dict[str, Sample]:
    """One step of each, in this order."""
    return {kind: _measure(axis, _made[kind]) for kind in kinds}


def sample_modes(axis: Axis, modes: tuple[str, ...]) -> dict[str, Sample]:
    """A step on the same batch in each mode of `ReplayTrainer`, the second in it: the first has rows from before."""
    trainer, found = _made[NO_MESSAGES], {}
    assert isinstance(trainer, ReplayTrainer)
    for mode in modes:
        for _ in range(2):
            line_up(axis)
            trainer.recording.begin_step(mode)
            found[mode] = _measure(axis, trainer)
    return found


def _measure(axis: Axis, trainer: Trainer) -> Sample:
    line_up(axis)
    before, busy = sent_bytes(), busy_seconds()
    with record() as ledger:
        cpu, wall = time.process_time(), time.perf_counter()
        trainer.take_step()
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    line_up(axis)
    after, used = sent_bytes(), busy_seconds()
    waited = sum(end - start for operation, start, end in ledger.exposed if operation != "train.metrics")
    sent = trainer.sent_bytes(ledger) if isinstance(trainer, PlainTrainer) else bytes_by_family(ledger)
    kernel = None if before is None or after is None else after - before
    return Sample(wall, cpu, waited, sent, kernel, None if busy is None or used is None else used - busy)
