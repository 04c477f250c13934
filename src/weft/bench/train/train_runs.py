"""The training steps that `weft bench train` measures, on the ranks of a pool."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weft.bench.timing import busy_seconds, line_up
from weft.bench.train.message_replay import Tape, with_replay
from weft.bench.train.plain_train import PlainTrainer
from weft.bench.train.sockets import sent_bytes
from weft.comm import Axis, Ledger, record
from weft.parallel.mesh import ParallelMesh, make_mesh
from weft.train.batches import Batch
from weft.train.config import TrainConfig
from weft.train.metrics import FAMILIES, family_of
from weft.train.trainer import Trainer

WEFT, PLAIN, REPLAY = "weft", "plain pieces", "messages already there"


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


class _Again:
    """One batch, again and again."""

    position = 0

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def __next__(self) -> Batch:
        return self._batch

    def peek(self) -> Batch:
        return self._batch

    def close(self) -> None:
        pass


class ReplayedTrainer(Trainer):
    """A trainer whose steps, all on one batch, can be taken without communication: see `Tape`."""

    def __init__(self, config: TrainConfig, mesh: ParallelMesh) -> None:
        self.tape = Tape()
        # Ranks tell each other the rates, and what they told must be right again: they stay the same.
        super().__init__(replace(config, warmup=0, lr_end=1.0), with_replay(mesh, self.tape))
        batches: Any = self._batches
        self._batches: Any = _Again(next(batches))
        batches.close()


KINDS: dict[str, type[Trainer]] = {WEFT: Trainer, PLAIN: PlainTrainer, REPLAY: ReplayedTrainer}
_made: dict[str, Trainer] = {}  # of this rank


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
        if isinstance(trainer, ReplayedTrainer):
            for mode in ("recording", "through"):  # what began in the recorded step ends in the next
                trainer.tape.wind(mode)
                trainer.take_step()


def give_up(axis: Axis) -> None:
    """Forget the trainers of this rank."""
    for trainer in _made.values():
        trainer.close()
    _made.clear()
    gc.collect()


def sample(axis: Axis, kinds: tuple[str, ...]) -> dict[str, Sample]:
    """One step of each, in this order."""
    return {kind: _measure(axis, _made[kind]) for kind in kinds}


def sample_replay(axis: Axis, modes: tuple[str, ...]) -> dict[str, Sample]:
    """A step on the same batch in each mode of a `Tape`, the second in it: a step begins with rows fetched before."""
    trainer, found = _made[REPLAY], {}
    assert isinstance(trainer, ReplayedTrainer)
    for mode in modes:
        for _ in range(2):
            line_up(axis)
            trainer.tape.wind(mode)
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
    waited = sum(end - start for operation, start, end in ledger.exposed if not operation.startswith("train.metrics"))
    sent = trainer.sent_bytes(ledger) if isinstance(trainer, PlainTrainer) else _by_family(ledger)
    kernel = None if before is None or after is None else after - before
    return Sample(wall, cpu, waited, sent, kernel, None if busy is None or used is None else used - busy)


def _by_family(ledger: Ledger) -> dict[str, int]:
    sent = dict.fromkeys(FAMILIES, 0)
    for event in ledger.events:
        sent[family_of(event.operation)] += event.bytes_sent
    return sent
