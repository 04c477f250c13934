"""How a benchmark runs: on torchrun's ranks or local processes, with a report whose rows are kept as they come."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

from weft.bench.flags import check_file
from weft.bench.report import Layout, Report, describe_machine
from weft.bench.timing import Sample
from weft.comm import Ledger
from weft.parallel.rendezvous import joined_world
from weft.world.launch import ProcessWorld, collect

P = ParamSpec("P")


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
    run: Callable[Concatenate[RankPool, Report, P], None], *args: P.args, **kwargs: P.kwargs,
) -> None:  # fmt: skip
    """``run`` on local ranks or torchrun's; ``facts`` are for the header."""
    check_file("--json", json)
    with rank_pool(ranks) as pool:
        header = {"ranks": pool.size, **facts}
        run_here(name, json, header, {}, lambda report: run(pool, report, *args, **kwargs), shown=pool.reports)


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


@dataclass(frozen=True)
class Measured:
    """One case of a table, and the samples of all: ``turns[turn][rank][case]``, where the case has work for a rank."""

    case: str
    turns: Sequence[Sequence[dict[str, Sample]]]

    def of(self, case: str | None = None) -> list[list[Sample]]:
        """[turn][rank] of this case, or of another."""
        name = self.case if case is None else case
        return [[rank[name] for rank in turn if name in rank] for turn in self.turns]

    def wall(self, case: str | None = None) -> list[float]:
        """Seconds of the slowest rank in each turn."""
        return [max(rank.wall for rank in turn) for turn in self.of(case) if turn]

    def cpu(self, case: str | None = None) -> list[float]:
        """Seconds of CPU of all ranks in each turn."""
        return [sum(rank.cpu for rank in turn) for turn in self.of(case) if turn]

    def times(self, base: str) -> float | None:
        """How many times as long as ``base`` it takes."""
        return ratio(self.wall(), self.wall(base))

    def faster_than(self, base: str) -> float | None:
        """How many times as long ``base`` takes."""
        return ratio(self.wall(base), self.wall())

    @property
    def milliseconds(self) -> float:
        return 1e3 * statistics.median(self.wall())

    @property
    def cpu_milliseconds(self) -> float:
        return 1e3 * statistics.median(self.cpu())

    @property
    def megabytes(self) -> float:
        """Of the rank that sends most, by the ledger."""
        return max(rank.ledger.bytes_sent for rank in self.of()[-1]) / 1e6

    @property
    def samples(self) -> int:
        return len(self.turns)


def ratio(ones: Sequence[float], others: Sequence[float]) -> float | None:
    """Turn by turn: what else the machine did then slowed both. None if one of them was not measured."""
    return statistics.median(one / other for one, other in zip(ones, others, strict=True)) if ones and others else None


def take_samples(
    take: Callable[[int], Sequence[dict[str, Sample]]], repeats: int, advance: Callable[[], None],
    add_rows: Callable[[dict[str, Measured]], None], warm_ups: int = 1,
) -> None:  # fmt: skip
    """Measure cases that take turns, and ``add_rows`` of what there is, also when the user stops.

    ``take(turn)`` is a sample of every case on each rank; what the first turns give is not kept, they warm up.
    """
    turns: list[Sequence[dict[str, Sample]]] = []
    try:
        for turn in range(1 - warm_ups, repeats + 1):
            taken = take(turn)
            if turn > 0:
                turns.append(taken)
                advance()
    finally:
        if turns:
            add_rows({case: Measured(case, turns) for case in turns[0][0]})


def fill_table(
    report: Report, table: str, take: Callable[[int], Sequence[dict[str, Sample]]], repeats: int,
    advance: Callable[[], None], facts: Mapping[str, Mapping[str, Any]], warm_ups: int = 1,
) -> None:  # fmt: skip
    """`take_samples`, and a row for each case, whose values the columns of the table find.

    ``facts[case]`` is what is known of a case already, by column; cases that are not there have no rows.
    """

    def add_rows(found: dict[str, Measured]) -> None:
        for case in [case for case in facts if case in found]:
            values = {column.key: column.find(found[case], facts[case]) for column in report.tables[table].columns}
            report.add(table, values)

    take_samples(take, repeats, advance, add_rows, warm_ups)


def describe_cases(ranks: Sequence[Mapping[str, tuple[Ledger, int | None]]]) -> dict[str, dict[str, Any]]:
    """What `examine` found on every rank, by case: bytes of the rank that sends most, rounds, peak memory."""
    return {
        case: {
            **describe_ledgers([rank[case][0] for rank in ranks]),
            "peak_megabytes": highest_megabytes(rank[case][1] for rank in ranks),
        }
        for case in ranks[0]
    }


def describe_ledgers(ledgers: Sequence[Ledger]) -> dict[str, int]:
    """What was sent: bytes of the rank that sends most, and rounds."""
    return {"bytes_sent": max(one.bytes_sent for one in ledgers), "rounds": Ledger.merge(ledgers).rounds}


def highest_megabytes(sizes: Iterable[int | None]) -> float | None:
    """Of the ranks that know theirs."""
    return max((size / 1e6 for size in sizes if size is not None), default=None)
