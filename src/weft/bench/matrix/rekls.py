"""`weft bench rekls`: steps of a matrix optimizer on transformer blocks, beside the replicated algorithm."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from weft.bench.matrix.rekls_runs import Method, Sample, inspect, prepare, sample
from weft.bench.report import Column, Layout, Report
from weft.bench.world import RankPool

COLUMNS = (
    Column("case", "width", "{}"),
    Column("method", "method", "{}"),
    Column("cpu_milliseconds", "CPU ms", "{:,.0f}"),
    Column("less_cpu", "x less CPU", "{:.2f}"),
    Column("milliseconds", "wall ms", "{:,.0f}"),
    Column("to_one_thread", "x 1 thread", "{:.2f}"),
    Column("to_two_threads", "x 2 threads", "{:.2f}"),
    Column("megabytes", "MB sent", "{:,.2f}"),
    Column("state_megabytes", "MB state", "{:,.1f}"),
    Column("eigh_share", "eigh", "{:.0%}"),
    Column("busiest", "busiest", "{:.2f}"),
)


@dataclass(frozen=True)
class Compared:
    """A method, whose CPU its own is compared with, and the variant whose serial run its time is compared with."""

    method: Method
    baseline: str | None = None
    serial: str | None = None


def _methods() -> list[Compared]:
    found = [Compared(Method(f"replicated, tensor {size}", "replicated", tensor=size)) for size in (2, 4)]
    for variant in ("exact", "stable"):
        for threads in (1, 2):
            name = f"{variant}, serial, {threads} thread{'s' * (threads > 1)}"
            found.append(Compared(Method(name, variant, threads=threads)))
        for size in (2, 4):
            method = Method(f"{variant}, tensor {size}", variant, tensor=size)
            found.append(Compared(method, f"replicated, tensor {size}", variant))
        replicas = f"{variant}, 2 replicas of tensor 2"
        found.append(Compared(Method(replicas, variant, data=2, tensor=2, averaged_first=True)))
        found.append(Compared(Method(f"{variant}, data 2 x tensor 2", variant, data=2, tensor=2), replicas))
    return found


METHODS = _methods()


def layouts(ranks: int, blocks: int) -> dict[str, Layout]:
    """The table of this benchmark."""
    return {"rekls": Layout(f"one step of REKLS for {blocks} transformer blocks on up to {ranks} ranks", COLUMNS)}


def run(pool: RankPool, report: Report, repeats: int, warm_steps: int, widths: tuple[int, ...], blocks: int) -> None:
    """Measure, adding the rows of a width as soon as it is done. Methods take turns; ranks without work wait."""
    compared = [one for one in METHODS if one.method.ranks <= pool.size]
    methods = [one.method for one in compared]
    with report.progress(len(widths) * repeats, "rekls") as advance:
        for width in widths:
            pool.run(prepare, methods, width, blocks, warm_steps)
            state: list[dict[str, int]] = pool.run(inspect)
            samples: list[list[dict[str, Sample]]] = []
            try:
                for turn in range(repeats + 1):
                    first = turn % len(methods)
                    taken = pool.run(sample, methods[first:] + methods[:first], turn)
                    if turn:  # the first warms up
                        samples.append(taken)
                        advance()
            finally:  # Ctrl-C keeps what was measured
                for one in compared if samples else ():
                    report.add("rekls", _row(width, one, samples, state))


def _row(
    width: int, one: Compared, samples: list[list[dict[str, Sample]]], state: list[dict[str, int]]
) -> dict[str, Any]:
    """``samples[turn][rank][method]``. Ratios are taken sample by sample: what else the machine did slowed both."""

    def turns(name: str) -> list[list[Sample]]:
        return [[rank[name] for rank in turn if name in rank] for turn in samples]

    def cpu(name: str) -> list[float]:
        return [sum(part.cpu for part in turn) for turn in turns(name)]

    def wall(name: str) -> list[float]:
        return [max(part.wall for part in turn) for turn in turns(name)]

    def ratio(others: list[float], mine: list[float]) -> float:
        return statistics.median(other / own for other, own in zip(others, mine, strict=True))

    name, serial = one.method.name, one.serial
    eigh = [[part.eigh for part in turn] for turn in turns(name)]
    return {
        "case": f"h {width}",
        "method": name,
        "cpu_milliseconds": 1e3 * statistics.median(cpu(name)),
        "less_cpu": ratio(cpu(one.baseline), cpu(name)) if one.baseline else None,
        "milliseconds": 1e3 * statistics.median(wall(name)),
        "to_one_thread": ratio(wall(f"{serial}, serial, 1 thread"), wall(name)) if serial else None,
        "to_two_threads": ratio(wall(f"{serial}, serial, 2 threads"), wall(name)) if serial else None,
        "megabytes": max(part.bytes_sent for part in turns(name)[-1]) / 1e6,
        "state_megabytes": max(rank[name] for rank in state if name in rank) / 1e6,
        "eigh_share": statistics.median(sum(parts) / all_cpu for parts, all_cpu in zip(eigh, cpu(name), strict=True)),
        "busiest": statistics.median(max(parts) * len(parts) / sum(parts) for parts in eigh),
        "samples": len(samples),
    }
