"""`weft bench train`: training steps of the hybrid model beside one process, no communication and plain pieces."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from weft.bench.report import Column, Layout, Report
from weft.bench.train import runs
from weft.bench.train.replay import LIVE, REPLAY
from weft.bench.train.runs import NO_MESSAGES, PLAIN, WEFT, Sample, make_config, prepare
from weft.bench.world import RankPool
from weft.train.metrics import FAMILIES
from weft.world.launch import ProcessWorld

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
        pool.run(runs.give_up)


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
                world.run(runs.set_threads, threads)
                found[case] = [rank[WEFT] for rank in world.run(runs.sample, (WEFT,))]
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

    take_turns((LIVE, REPLAY), lambda modes: _by_case(pool.run(runs.sample_modes, modes)), add_rows)


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

    take_turns((WEFT, PLAIN), lambda kinds: _by_case(pool.run(runs.sample, kinds)), add_rows)


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
