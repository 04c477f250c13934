"""How a benchmark runs: on torchrun's ranks or local processes, with a report whose rows are kept as they come."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.bench.report import Layout, Report, describe_machine
from weft.parallel.rendezvous import joined_world
from weft.world.launch import ProcessWorld, collect


@dataclass(frozen=True)
class RankPool:
    """``run(fn, *args)`` is ``fn(axis, *args)`` on every rank, results in rank order, for the process that reports."""

    size: int
    reports: bool
    run: Callable[..., list[Any]]


@contextmanager
def rank_pool(ranks: int | None) -> Iterator[RankPool]:
    """``ranks`` local Gloo processes, or under torchrun the ranks it started."""
    with joined_world() as axis:
        if axis is not None:
            if ranks is not None and ranks != axis.size:
                raise ValueError(f"--ranks {ranks} does not fit the {axis.size} ranks torchrun started; leave it out")
            yield RankPool(axis.size, axis.rank == 0, lambda fn, *args: collect(axis, fn(axis, *args)))
            return
    count = 4 if ranks is None else ranks
    print(f"starting {count} ranks", file=sys.stderr)
    with ProcessWorld(count) as world:
        yield RankPool(count, True, world.run)


def run_on_ranks(
    name: str, ranks: int | None, json: Path | None, facts: dict[str, Any],
    layouts: Callable[[int], dict[str, Layout]], run: Callable[[RankPool, Report], None],
) -> None:  # fmt: skip
    """``run`` on local ranks or torchrun's; ``layouts`` of a number of ranks, ``facts`` are for the header."""
    with rank_pool(ranks) as pool:
        header = {"ranks": pool.size, **facts}
        run_here(name, json, header, layouts(pool.size), lambda report: run(pool, report), shown=pool.reports)


def run_here(
    name: str, json: Path | None, facts: dict[str, Any], layouts: dict[str, Layout], run: Callable[[Report], None],
    shown: bool = True,
) -> None:  # fmt: skip
    """``run`` in this process, and show what there is, also when the user stops it."""
    report = Report(layouts, json, shown, describe_machine(bench=name, **facts))
    try:
        run(report)
    except KeyboardInterrupt:
        print("stopped: the rows measured so far follow", file=sys.stderr)
    report.show()


def take_samples(
    pool: RankPool, measure: Callable[..., dict[str, float]], args: Sequence[Any], repeats: int,
    advance: Callable[[], None],
) -> Iterator[dict[str, float]]:  # fmt: skip
    """``measure(axis, *args, turn)`` again and again: seconds of each case on the slowest rank. The first warms up."""
    for turn in range(repeats + 1):
        seconds = pool.run(measure, *args, turn)
        if turn:
            # Of the ranks that took part.
            yield {name: max(sample[name] for sample in seconds if sample) for name in seconds[0]}
            advance()  # by now whoever asked has kept the sample


def by_case(samples: Sequence[dict[str, float]]) -> dict[str, list[float]]:
    """The samples of each case."""
    return {name: [sample[name] for sample in samples] for name in (samples[0] if samples else ())}
