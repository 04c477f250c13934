"""`weft bench train`: training steps of the hybrid model beside one process, no communication and plain pieces."""

from __future__ import annotations

import gc
import os
import statistics
import sys
from dataclasses import replace
from functools import partial
from operator import truediv
from pathlib import Path
from typing import Any

import torch

from weft.bench.ranks import Measured, RankPool, take_samples
from weft.bench.report import Column, Layout, Report
from weft.bench.timing import Sample, in_turn, line_up, measure
from weft.bench.train.plain import PlainTrainer, bytes_by_family
from weft.bench.train.replay import LIVE, REPLAY, ReplayTrainer
from weft.comm import Axis, Ledger
from weft.parallel.mesh import make_mesh
from weft.train.config import TrainConfig
from weft.train.metrics import FAMILIES
from weft.train.trainer import Trainer
from weft.world.launch import ProcessWorld

WEFT, PLAIN, NO_MESSAGES = "weft", "plain pieces", "messages already there"
ONE, TWO, FOUR = (1, 1, 1), (1, 2, 1), (2, 2, 1)
ONE_PROCESS, ONE_THREAD, TWO_RANKS = "one process, 2 threads", "one process, 1 thread", "cp 2"
RUNNING = "as it runs"
_TIMES = (
    Column("milliseconds", "ms", "{:,.0f}"),
    Column("cpu_milliseconds", "CPU ms", "{:,.0f}"),
    Column("wait_percent", "waits %", "{:.1f}"),
    Column("idle_percent", "not used %", "{:.1f}"),
    Column("others_percent", "others %", "{:.1f}"),
)
COLUMNS = {
    "two ranks": (
        Column("case", "a step"), *_TIMES, Column("ratio", "x 2 threads", "{:.2f}"),
        Column("to_thread", "x 1 thread", "{:.2f}"), Column("megabytes", "MB sent", "{:,.1f}"),
    ),
    "exposed": (
        Column("case", "a step on dp 2 x cp 2"), *_TIMES, Column("percent", "communication %", "{:.1f}"),
    ),
    "plain": (
        Column("case", "a step on dp 2 x cp 2"), *_TIMES, Column("ratio", "x slower", "{:.2f}"),
        Column("megabytes", "MB sent", "{:,.1f}"), Column("more", "x more", "{:.1f}"),
        Column("kernel_megabytes", "MB, kernel", "{:,.1f}"),
    ),
    "families": (
        Column("case", "MB of a step, all ranks"),
        *(Column(name, name, "{:,.3f}") for name in FAMILIES),
    ),
}  # fmt: skip


def run(pool: RankPool, report: Report, repeats: int, warm_steps: int, settings: dict[str, Any], rows: int) -> None:
    """Measure; a table's rows are kept as far as they were measured."""
    if pool.size != 4:
        raise ValueError(f"bench train compares steps over 4 ranks (dp 2 x cp 2), got {pool.size}")
    if warm_steps < 1:
        raise ValueError(f"bench train needs at least 1 of warm_steps, not {warm_steps}: the first compares the ranks")
    make_config(FOUR, **settings).check()
    shape = (
        f"{settings['layers']} blocks of width {settings['width']}, {settings['batch']} x {settings['length']} tokens"
    )
    titles = {
        "two ranks": f"2 ranks beside one process: {shape}",
        "exposed": f"4 local ranks beside the same step without communication: {shape}",
        "plain": f"4 local ranks beside plain pieces, a table of {rows:,} rows: {shape}",
        "families": f"what is sent, a table of {rows:,} rows",
    }
    report.tables |= {name: Layout(titles[name], columns) for name, columns in COLUMNS.items()}
    joined = "RANK" in os.environ
    if joined and pool.reports:
        print("train: 2 ranks beside one process are left out under torchrun", file=sys.stderr)
    with report.progress((2 if joined else 3) * repeats, "train") as advance:
        if not joined:
            with ProcessWorld(1) as one, ProcessWorld(2) as two:
                for world, cut in ((one, ONE), (two, TWO)):
                    world.run(prepare, (WEFT,), make_config(cut, **settings), warm_steps)
                take = partial(_take_two_ranks, {ONE_PROCESS: (one, 2), ONE_THREAD: (one, 1), TWO_RANKS: (two, 1)})
                take_samples(take, repeats, advance, partial(_add_two_ranks, report), warm_ups=0)
        pool.run(prepare, (NO_MESSAGES,), make_config(FOUR, **settings), warm_steps)
        take_samples(partial(pool.run, sample_modes), repeats, advance, partial(_add_exposed, report), warm_ups=0)
        pool.run(prepare, (WEFT, PLAIN), make_config(FOUR, **settings, table_rows=rows), warm_steps)
        take_samples(partial(pool.run, sample), repeats, advance, partial(_add_plain, report), warm_ups=0)
        pool.run(drop_trainers)


def _take_two_ranks(worlds: dict[str, tuple[ProcessWorld, int]], turn: int) -> list[dict[str, Sample]]:
    """One process and two ranks are worlds of their own, which take turns; who has none waits and uses no processor.

    One thread stands beside two: where a second thread does not help, two ranks are compared with little.
    """
    found: dict[str, list[Sample]] = {}
    for case in in_turn(list(worlds), turn):
        world, threads = worlds[case]
        world.run(set_threads, threads)
        found[case] = [rank[WEFT] for rank in world.run(sample, turn)]
    return [{case: found[case][rank] for case in worlds if rank < len(found[case])} for rank in range(2)]


def _add_two_ranks(report: Report, found: dict[str, Measured]) -> None:
    for case, measured in found.items():
        ratios = {"ratio": measured.times(ONE_PROCESS), "to_thread": measured.times(ONE_THREAD)}
        report.add("two ranks", {"case": case, **_times(measured), **ratios})


def _add_exposed(report: Report, found: dict[str, Measured]) -> None:
    share = statistics.median(map(truediv, found[REPLAY].wall(), found[LIVE].wall()))
    report.add("exposed", {"case": RUNNING, **_times(found[LIVE]), "percent": 100 * (1 - share)})
    report.add("exposed", {"case": NO_MESSAGES, **_times(found[REPLAY])})


def _add_plain(report: Report, found: dict[str, Measured]) -> None:
    ours = _times(found[WEFT])
    for kind, measured in found.items():
        times = _times(measured)
        report.add("plain", {
            "case": kind, **times, "ratio": measured.times(WEFT), "more": times["megabytes"] / ours["megabytes"],
            # What a plain rank stands waiting for in DDP is not in a ledger.
            "wait_percent": None if kind == PLAIN else times["wait_percent"],
        })  # fmt: skip
    for kind, measured in found.items():
        sent = {name: sum(rank.result[name] for rank in measured.of()[-1]) / 1e6 for name in FAMILIES}
        report.add("families", {"case": kind, **sent})


def _times(measured: Measured) -> dict[str, Any]:
    turns, walls, cpus = measured.of(), measured.wall(), measured.cpu()
    last = turns[-1]
    cores = min(max(2, len(last)), os.cpu_count() or 1)  # one process has 2 threads
    waited = [statistics.mean(_waited(rank.ledger) for rank in turn) for turn in turns]
    others = [
        max(0.0, turn[0].machine - cpu) / wall
        for turn, cpu, wall in zip(turns, cpus, walls, strict=True)
        if turn[0].machine is not None
    ]
    kernel = [rank.kernel_sent for rank in last if rank.kernel_sent is not None]
    return {
        "milliseconds": measured.milliseconds,
        "cpu_milliseconds": measured.cpu_milliseconds,
        "wait_percent": 100 * statistics.mean(map(truediv, waited, walls)),
        "idle_percent": 100 * (1 - statistics.mean(map(truediv, cpus, walls)) / cores),
        "others_percent": 100 * statistics.mean(others) / cores if others else None,
        "megabytes": sum(sum(rank.result.values()) for rank in last) / 1e6,
        "kernel_megabytes": sum(kernel) / 1e6 if kernel else None,
        "samples": measured.samples,
    }


def _waited(ledger: Ledger) -> float:
    """Seconds that the rank stood waiting in its step."""
    return sum(end - start for operation, start, end in ledger.exposed if not operation.startswith("train.metrics"))


# What runs on the ranks.

KINDS: dict[str, type[Trainer]] = {WEFT: Trainer, PLAIN: PlainTrainer, NO_MESSAGES: ReplayTrainer}
_made: dict[str, Trainer] = {}  # of this rank


def make_config(shape: tuple[int, int, int], **settings: Any) -> TrainConfig:
    """The settings of a run that only steps: nothing is written, and rates are as in the middle of a run."""
    dp, cp, tp = shape
    return TrainConfig(
        out=Path("not written"),
        steps=1_000_000,
        device="cpu",
        dp=dp,
        cp=cp,
        tp=tp,
        held_out=0.0,
        timeline_step=0,
        **settings,
    )


def prepare(axis: Axis, kinds: tuple[str, ...], config: TrainConfig, warm_steps: int) -> None:
    """Make the trainers, and step them for a while; those made before are given up."""
    gc.freeze()  # what is here already, modules above all, need not be looked through whenever a model is given up
    drop_trainers(axis)
    assert config.dp is not None
    mesh = make_mesh((config.dp, config.cp, config.tp))
    for kind in kinds:
        _made[kind] = trainer = KINDS[kind](config, mesh)
        for _ in range(warm_steps):
            trainer.take_step()
        if isinstance(trainer, ReplayTrainer):
            trainer.record_step()


def drop_trainers(axis: Axis) -> None:
    """Forget the trainers of this rank."""
    for trainer in _made.values():
        trainer.close()
    _made.clear()
    gc.collect()


def set_threads(axis: Axis, threads: int) -> None:
    """Of this rank."""
    torch.set_num_threads(threads)


def sample(axis: Axis, turn: int) -> dict[str, Sample]:
    """One step of each trainer."""
    found = {kind: _measure(axis, _made[kind]) for kind in in_turn(list(_made), turn)}
    return {kind: found[kind] for kind in _made}


def sample_modes(axis: Axis, turn: int) -> dict[str, Sample]:
    """A step on the same batch in each mode of `ReplayTrainer`, the second in it: the first has rows from before."""
    trainer, found = _made[NO_MESSAGES], {}
    assert isinstance(trainer, ReplayTrainer)
    for mode in in_turn([LIVE, REPLAY], turn):
        for _ in range(2):
            line_up(axis)
            trainer.recording.begin_step(mode)
            found[mode] = _measure(axis, trainer)
    return found


def _measure(axis: Axis, trainer: Trainer) -> Sample:
    """One step; the result is what this rank sent, by family."""
    taken = measure(axis, trainer.take_step)
    count = trainer.sent_bytes if isinstance(trainer, PlainTrainer) else bytes_by_family
    return replace(taken, result=count(taken.ledger))
