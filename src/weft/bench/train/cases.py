"""`weft bench train`: training steps of the hybrid model beside one process, no communication and plain pieces."""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from weft.bench.ranks import RankPool
from weft.bench.report import Column, Layout, Report
from weft.bench.timing import busy_seconds, line_up, sent_bytes
from weft.bench.train.plain import PlainTrainer, bytes_by_family
from weft.bench.train.replay import LIVE, REPLAY, ReplayTrainer
from weft.comm import Axis, record
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
        Column("case", "a step", "{}"), *_TIMES, Column("ratio", "x 2 threads", "{:.2f}"),
        Column("to_thread", "x 1 thread", "{:.2f}"), Column("megabytes", "MB sent", "{:,.1f}"),
    ),
    "exposed": (
        Column("case", "a step on dp 2 x cp 2", "{}"), *_TIMES, Column("percent", "communication %", "{:.1f}"),
    ),
    "plain": (
        Column("case", "a step on dp 2 x cp 2", "{}"), *_TIMES, Column("ratio", "x slower", "{:.2f}"),
        Column("megabytes", "MB sent", "{:,.1f}"), Column("more", "x more", "{:.1f}"),
        Column("kernel_megabytes", "MB, kernel", "{:,.1f}"),
    ),
    "families": (
        Column("case", "MB of a step, all ranks", "{}"),
        *(Column(name, name, "{:,.3f}") for name in FAMILIES),
    ),
}  # fmt: skip


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


Turns = list[list[Sample]]  # [turn][rank] of one case
TakeTurns = Callable[..., None]  # see `_take_turns`


def layouts(settings: dict[str, Any], rows: int) -> dict[str, Layout]:
    """The tables of this benchmark."""
    shape = (
        f"{settings['layers']} blocks of width {settings['width']}, {settings['batch']} x {settings['length']} tokens"
    )
    titles = {
        "two ranks": f"2 ranks beside one process: {shape}",
        "exposed": f"4 local ranks beside the same step without communication: {shape}",
        "plain": f"4 local ranks beside plain pieces, a table of {rows:,} rows: {shape}",
        "families": f"what is sent, a table of {rows:,} rows",
    }
    return {name: Layout(titles[name], columns) for name, columns in COLUMNS.items()}


def run(pool: RankPool, report: Report, repeats: int, warm_steps: int, settings: dict[str, Any], rows: int) -> None:
    """Measure; a table's rows are kept as far as they were measured."""
    if pool.size != 4:
        raise ValueError(f"bench train compares steps over 4 ranks (dp 2 x cp 2), got {pool.size}")
    if warm_steps < 1:
        raise ValueError(f"bench train needs at least 1 of warm_steps, not {warm_steps}: the first compares the ranks")
    make_config(FOUR, **settings).check()
    joined = "RANK" in os.environ
    if joined and pool.reports:
        print("train: 2 ranks beside one process are left out under torchrun", file=sys.stderr)
    with report.progress((2 if joined else 3) * repeats, "train") as advance:
        take_turns = partial(_take_turns, repeats, advance)
        if not joined:
            _two_ranks(report, take_turns, warm_steps, settings)
        _exposed(pool, report, take_turns, warm_steps, settings)
        _plain(pool, report, take_turns, warm_steps, settings | {"table_rows": rows})
        pool.run(give_up)


def _take_turns(
    repeats: int, advance: Callable[[], None], cases: tuple[str, ...],
    measure: Callable[[tuple[str, ...]], Mapping[str, list[Sample]]], add_rows: Callable[[dict[str, Turns]], None],
) -> None:  # fmt: skip
    """``measure`` the cases in turn, forth and back, and ``add_rows`` of what there is, also when the user stops."""
    found: dict[str, Turns] = {case: [] for case in cases}
    try:
        for turn in range(repeats):
            for case, ranks in measure(cases[:: -1 if turn % 2 else 1]).items():
                found[case].append(ranks)
            advance()
    finally:
        if found[cases[-1]]:
            add_rows(found)


def _by_case(taken: list[dict[str, Sample]]) -> dict[str, list[Sample]]:
    return {case: [rank[case] for rank in taken] for case in taken[0]}


def _two_ranks(report: Report, take_turns: TakeTurns, warm_steps: int, settings: dict[str, Any]) -> None:
    """One process and two ranks are worlds of their own, which take turns; who has none waits and uses no processor.

    One thread stands beside two: where a second thread does not help, two ranks are compared with little.
    """
    with ProcessWorld(1) as one, ProcessWorld(2) as two:
        worlds = {ONE_PROCESS: (one, 2), ONE_THREAD: (one, 1), TWO_RANKS: (two, 1)}
        for world, shape in ((one, ONE), (two, TWO)):
            world.run(prepare, (WEFT,), make_config(shape, **settings), warm_steps)

        def measure(cases: tuple[str, ...]) -> dict[str, list[Sample]]:
            found = {}
            for case in cases:
                world, threads = worlds[case]
                world.run(set_threads, threads)
                found[case] = [rank[WEFT] for rank in world.run(sample, (WEFT,))]
            return found

        def add_rows(found: dict[str, Turns]) -> None:
            for case, turns in found.items():
                ratios = {"ratio": _ratio(turns, found[ONE_PROCESS]), "to_thread": _ratio(turns, found[ONE_THREAD])}
                report.add("two ranks", {"case": case, **_times(turns), **ratios})

        take_turns(tuple(worlds), measure, add_rows)


def _exposed(pool: RankPool, report: Report, take_turns: TakeTurns, warm_steps: int, settings: dict[str, Any]) -> None:
    pool.run(prepare, (NO_MESSAGES,), make_config(FOUR, **settings), warm_steps)

    def add_rows(found: dict[str, Turns]) -> None:
        spent = 100 * (1 - _ratio(found[REPLAY], found[LIVE]))
        report.add("exposed", {"case": RUNNING, **_times(found[LIVE]), "percent": spent})
        report.add("exposed", {"case": NO_MESSAGES, **_times(found[REPLAY])})

    take_turns((LIVE, REPLAY), lambda modes: _by_case(pool.run(sample_modes, modes)), add_rows)


def _plain(pool: RankPool, report: Report, take_turns: TakeTurns, warm_steps: int, settings: dict[str, Any]) -> None:
    pool.run(prepare, (WEFT, PLAIN), make_config(FOUR, **settings), warm_steps)

    def add_rows(found: dict[str, Turns]) -> None:
        ours = _times(found[WEFT])
        for kind, turns in found.items():
            times = _times(turns)
            report.add("plain", {
                "case": kind, **times, "ratio": _ratio(turns, found[WEFT]),
                "more": times["megabytes"] / ours["megabytes"],
                # What a plain rank stands waiting for in DDP is not in a ledger.
                "wait_percent": None if kind == PLAIN else times["wait_percent"],
            })  # fmt: skip
        for kind, turns in found.items():
            sent = {name: sum(rank.sent[name] for rank in turns[-1]) / 1e6 for name in FAMILIES}
            report.add("families", {"case": kind, **sent})

    take_turns((WEFT, PLAIN), lambda kinds: _by_case(pool.run(sample, kinds)), add_rows)


def _wall(turns: Turns) -> list[float]:
    """Of the slowest rank."""
    return [max(rank.wall for rank in turn) for turn in turns]


def _ratio(turns: Turns, base: Turns) -> float:
    """Turn by turn: what else the machine did slowed both."""
    return statistics.median(one / other for one, other in zip(_wall(turns), _wall(base), strict=True))


def _times(turns: Turns) -> dict[str, Any]:
    last = turns[-1]
    kernel = [rank.kernel_sent for rank in last if rank.kernel_sent is not None]
    cores = min(max(2, len(last)), os.cpu_count() or 1)  # one process has 2 threads
    busy = (sum(rank.cpu for rank in turn) / max(rank.wall for rank in turn) for turn in turns)
    others = [
        max(0.0, turn[0].machine - sum(rank.cpu for rank in turn)) / max(rank.wall for rank in turn)
        for turn in turns
        if turn[0].machine is not None
    ]
    shares = (statistics.mean(rank.waited for rank in turn) / max(rank.wall for rank in turn) for turn in turns)
    return {
        "milliseconds": 1e3 * statistics.median(_wall(turns)),
        "cpu_milliseconds": 1e3 * statistics.median(sum(rank.cpu for rank in turn) for turn in turns),
        "wait_percent": 100 * statistics.mean(shares),
        "idle_percent": 100 * (1 - statistics.mean(busy) / cores),
        "others_percent": 100 * statistics.mean(others) / cores if others else None,
        "megabytes": sum(sum(rank.sent.values()) for rank in last) / 1e6,
        "kernel_megabytes": sum(kernel) / 1e6 if kernel else None,
        "samples": len(turns),
    }


# What runs on the ranks.

KINDS: dict[str, type[Trainer]] = {WEFT: Trainer, PLAIN: PlainTrainer, NO_MESSAGES: ReplayTrainer}
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
    waited = sum(end - start for operation, start, end in ledger.exposed if not operation.startswith("train.metrics"))
    sent = trainer.sent_bytes(ledger) if isinstance(trainer, PlainTrainer) else bytes_by_family(ledger)
    kernel = None if before is None or after is None else after - before
    return Sample(wall, cpu, waited, sent, kernel, None if busy is None or used is None else used - busy)
