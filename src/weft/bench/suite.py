"""How a benchmark runs: ranks, a report with a header, rows that are kept as far as they were measured."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weft.bench.report import Layout, Report, describe_machine
from weft.bench.world import RankPool, rank_pool


def run_on_ranks(
    name: str, ranks: int | None, json: Path | None, facts: dict[str, Any],
    layouts: Callable[[int], dict[str, Layout]], run: Callable[[RankPool, Report], None],
) -> None:  # fmt: skip
    """``run`` on local ranks or torchrun's; ``layouts`` of a number of ranks, ``facts`` are for the header."""
    with rank_pool(ranks) as world:
        header = describe_machine(bench=name, ranks=world.size, **facts)
        report = Report(layouts(world.size), json, world.reports, header)
        measure(report, lambda: run(world, report))


def measure(report: Report, work: Callable[[], None]) -> None:
    """Do the work and show what there is, also when the user stops it."""
    try:
        work()
    except KeyboardInterrupt:
        print("stopped: the rows measured so far follow", file=sys.stderr)
    report.show()
