"""`weft bench rows`: training steps of large embedding tables, beside what people do today."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from weft.bench.ranks import RankPool, fill_table, ratio
from weft.bench.report import Column, Layout, Report
from weft.bench.rows.baselines import BASELINES, WholeTable
from weft.bench.timing import Sample, line_up, measure_each
from weft.comm import Axis, Ledger
from weft.ops.embedding import RowExchange, ShardedEmbedding
from weft.ops.embedding.ids import compact, segment_sum
from weft.optim import RowAdam
from weft.optim.rows.steps import RowCosts

BEST_TODAY = "push + dense Adam + dense gather"


@dataclass(frozen=True)
class Case:
    """A table and what a rank looks up in a step: ids by Zipf's law (frequency ~ 1/rank), or drawn evenly."""

    rows: int
    width: int
    dtype: torch.dtype
    tokens: int
    zipf: bool = True

    @property
    def name(self) -> str:
        kind = str(self.dtype).removeprefix("torch.").replace("float32", "fp32").replace("bfloat16", "bf16")
        rows = f"{self.rows // 1_000_000}M" if self.rows >= 1_000_000 else f"{self.rows // 1000}k"
        return f"{rows} x {self.width} {kind}, {self.tokens} {'Zipf' if self.zipf else 'even'}"

    def batch(self, rank: int, step: int) -> tuple[Tensor, Tensor]:
        """(ids, gradients of their rows)."""
        make = torch.Generator().manual_seed(1_000_003 * step + rank)
        if self.zipf:
            drawn = (self.rows ** torch.rand(self.tokens, generator=make, dtype=torch.float64)).long() - 1
            ids = drawn * 7919 % self.rows
        else:
            ids = torch.randint(0, self.rows, (self.tokens,), generator=make)
        grads = torch.randn(1024, self.width, generator=make.manual_seed(0)).to(self.dtype)
        return ids, grads[ids % 1024]


CASES = (
    Case(250_000, 256, torch.float32, 16_384),
    Case(1_000_000, 256, torch.bfloat16, 16_384),
    Case(250_000, 768, torch.bfloat16, 49_152),
    Case(250_000, 256, torch.float32, 65_536, zipf=False),
)

COLUMNS = (
    Column("case", "table, ids of a rank"),
    Column("method", "method"),
    Column("cpu_milliseconds", "CPU ms", "{:,.0f}"),
    Column("to_best_today", "x push", "{:.2f}", lambda m: ratio(m.cpu(), m.cpu(BEST_TODAY))),
    Column("milliseconds", "wall ms", "{:,.0f}"),
    Column("megabytes", "MB sent", "{:,.1f}"),
    Column("density", "density", "{:.1%}"),
    Column("picked", "steps", "{}", lambda m: ", ".join(_picked(m.of()[-1][0].ledger))),
    Column("samples", None),
)
PHASES = (
    Column("case", "table, ids of a rank"),
    Column("push", "push ms", "{:.1f}"),
    Column("compaction", "of it compaction", "{:.1f}"),
    Column("merge", "of it merge", "{:.1f}"),
    Column("share", "compaction / push", "{:.2f}"),
)


def _picked(ledger: Ledger) -> list[str]:
    """What RowAdam chose to do, as its events say."""
    return [event.operation.split(": ")[1] for event in ledger.events if "RowAdam" in event.operation]


def run(pool: RankPool, report: Report, repeats: int, warm_steps: int, smaller: int) -> None:
    """Measure, adding the rows of a case as soon as it is done. Methods of a case take turns."""
    title = "CPU of a push, all ranks: sums over equal ids here and at the owners, and all of it"
    report.tables["rows"] = Layout(f"one training step of an embedding table on {pool.size} ranks", COLUMNS)
    report.tables["phases"] = Layout(title, PHASES)
    with report.progress(len(CASES) * repeats, "rows") as advance:
        for whole in CASES:
            case = replace(whole, rows=whole.rows // smaller, tokens=max(1, whole.tokens // smaller))
            names = [*(name for name in BASELINES if fits(case, name, pool.size)), *weft_methods(case)]
            pool.run(prepare, case, warm_steps)
            density = statistics.mean(pool.run(count_needed, case, repeats)) / case.rows
            facts = {name: {"case": case.name, "method": name, "density": density} for name in names}
            fill_table(report, "rows", partial(pool.run, sample, case, names), repeats, advance, facts)
            push, compaction, merge = (1e3 * sum(times) for times in zip(*pool.run(time_push, case), strict=True))
            times = {"push": push, "compaction": compaction, "merge": merge, "share": compaction / push}
            report.add("phases", {"case": case.name, **times})


class _Weft:
    """A sharded table and its optimizer."""

    def __init__(self, axis: Axis, case: Case, name: str) -> None:
        mode, costs = WEFT[name]
        self.table = ShardedEmbedding(case.rows, case.width, group=axis, dtype=case.dtype)
        self.optimizer = RowAdam(self.table.parameters(), lr=1e-3, mode=mode)
        if costs is not None:
            self.optimizer.set_costs(costs)

    def step(self, ids: Tensor, grads: Tensor) -> None:
        self.table(ids).backward(grads)
        self.optimizer.step()
        self.optimizer.zero_grad()


# name: (mode, costs in place of measured ones)
WEFT: dict[str, tuple[str, RowCosts | None]] = {
    "weft exact": ("exact", None),
    "weft exact, dense steps": ("auto", RowCosts(1.0, 0.0, 0.0)),
    "weft auto": ("auto", None),
    "weft lazy": ("lazy", None),
}


def weft_methods(case: Case) -> list[str]:
    """Most rows are touched only where ids are drawn evenly; elsewhere there is no choice to make."""
    return list(WEFT) if not case.zipf else ["weft exact", "weft lazy"]


def fits(case: Case, name: str, ranks: int) -> bool:
    """Whether a baseline's tables, moments and gradients fit in this machine's memory beside weft's."""
    elements, bytes_each = case.rows * case.width, case.dtype.itemsize
    _, sharded = BASELINES[name]
    moments = 8 / ranks if sharded else 8
    weft = len(weft_methods(case)) * (bytes_each + 8) / ranks
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return ranks * elements * (3 * bytes_each + moments + weft) < 0.8 * memory


_made: dict[Any, Any] = {}  # of this rank: the tables of the case under way


def prepare(axis: Axis, case: Case, warm_steps: int) -> None:
    """Make weft's tables and train them for a while: what is skipped must be caught up, as in a long run."""
    _made.clear()
    for name in weft_methods(case):
        _made[name] = made = _Weft(axis, case, name)
        for step in range(warm_steps):
            made.step(*case.batch(axis.rank, step))
    _made["steps"] = warm_steps


def count_needed(axis: Axis, case: Case, turn: int) -> int:
    """Rows that this rank needs in a turn."""
    return len(compact(case.batch(axis.rank, _made["steps"] + turn)[0]).unique)


def sample(axis: Axis, case: Case, names: list[str], turn: int) -> dict[str, Sample]:
    """One step by each method, on this rank."""
    ids, grads = case.batch(axis.rank, _made["steps"] + turn)

    def ready(name: str) -> Callable[[], None]:
        if name in WEFT:
            return partial(_made[name].step, ids, grads)
        # Made for each step: there is no memory for all of them at once.
        step, sharded = BASELINES[name]
        return partial(WholeTable(axis, case.rows, case.width, case.dtype, sharded).train, step, ids, grads)

    return measure_each(axis, names, ready, turn)


def time_push(axis: Axis, case: Case) -> tuple[float, float, float]:
    """CPU seconds of a push (ids, compaction, exchange, merge), and of its compaction and its merge."""
    ids, grads = case.batch(axis.rank, 10_000)
    seconds = 0.0, 0.0, 0.0
    for _ in range(2):  # the first warms up
        line_up(axis)
        start = time.process_time()
        exchange = RowExchange(ids, case.rows, group=axis)
        received = exchange.push([exchange.sum(0, grads)]).wait()
        before = time.process_time()
        exchange.merge(received)
        end = time.process_time()
        segment_sum(grads, compact(ids), case.dtype)
        seconds = end - start, time.process_time() - end, end - before
    return seconds
