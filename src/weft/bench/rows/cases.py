"""`weft bench rows`: training steps of large embedding tables, beside what people do today."""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from weft.bench.ranks import RankPool
from weft.bench.report import Column, Layout, Report
from weft.bench.rows.baselines import BASELINES, WholeTable
from weft.bench.timing import line_up
from weft.comm import Axis, Ledger, record
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
    Column("case", "table, ids of a rank", "{}"),
    Column("method", "method", "{}"),
    Column("cpu_milliseconds", "CPU ms", "{:,.0f}"),
    Column("to_best_today", "x push", "{:.2f}"),
    Column("milliseconds", "wall ms", "{:,.0f}"),
    Column("megabytes", "MB sent", "{:,.1f}"),
    Column("density", "density", "{:.1%}"),
    Column("picked", "steps", "{}"),
)
PHASES = (
    Column("case", "table, ids of a rank", "{}"),
    Column("push", "push ms", "{:.1f}"),
    Column("compaction", "of it compaction", "{:.1f}"),
    Column("merge", "of it merge", "{:.1f}"),
    Column("share", "compaction / push", "{:.2f}"),
)


def layouts(ranks: int) -> dict[str, Layout]:
    """The tables of this benchmark."""
    return {
        "rows": Layout(f"one training step of an embedding table on {ranks} ranks", COLUMNS),
        "phases": Layout("CPU of a push, all ranks: sums over equal ids here and at the owners, and all of it", PHASES),
    }


def run(pool: RankPool, report: Report, repeats: int, warm_steps: int, smaller: int) -> None:
    """Measure, adding the rows of a case as soon as it is done. Methods of a case take turns."""
    with report.progress(len(CASES) * repeats, "rows") as advance:
        for case in CASES:
            small = Case(case.rows // smaller, case.width, case.dtype, max(1, case.tokens // smaller), case.zipf)
            names = [*(name for name in BASELINES if fits(small, name, pool.size)), *weft_methods(small)]
            pool.run(prepare, small, warm_steps)
            samples: list[list[list[Any]]] = []
            try:
                for turn in range(repeats + 1):
                    taken = pool.run(sample, small, names[turn % len(names) :] + names[: turn % len(names)], turn)
                    if turn:
                        samples.append(taken)
                        advance()
            finally:
                for row in _rows(small, samples):
                    report.add("rows", row)
            report.add("phases", _phases(small, pool.run(time_push, small)))


def _rows(case: Case, samples: list[list[Any]]) -> list[dict[str, Any]]:
    """``samples[turn][rank][method]`` = (cpu, wall, ledger)."""
    rows = []
    for name in [name for name in (*BASELINES, *WEFT) if samples and name in samples[0][0]]:
        cpu = [sum(rank[name][0] for rank in turn) for turn in samples]
        today = [sum(rank[BEST_TODAY][0] for rank in turn) for turn in samples]
        ledgers: list[Ledger] = [rank[name][2] for rank in samples[-1]]
        picked = [event.operation.split(": ")[1] for event in ledgers[0].events if "RowAdam" in event.operation]
        rows.append({
            "case": case.name,
            "method": name,
            "cpu_milliseconds": 1e3 * statistics.median(cpu),
            "to_best_today": statistics.median(mine / other for mine, other in zip(cpu, today, strict=True)),
            "milliseconds": 1e3 * statistics.median(max(rank[name][1] for rank in turn) for turn in samples),
            "megabytes": max(ledger.bytes_sent for ledger in ledgers) / 1e6,
            "density": statistics.mean(rank["needed"] for rank in samples[-1]) / case.rows,
            "picked": ", ".join(picked),
            "samples": len(samples),
        })  # fmt: skip
    return rows


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


def sample(axis: Axis, case: Case, names: list[str], turn: int) -> dict[str, Any]:
    """(CPU seconds, wall seconds, ledger) of one step by each method, on this rank."""
    ids, grads = case.batch(axis.rank, _made["steps"] + turn)
    found: dict[str, Any] = {"needed": len(compact(ids).unique)}
    for name in names:
        if name in WEFT:
            action = _made[name].step
        else:  # made for each step: there is no memory for all of them at once
            step, sharded = BASELINES[name]
            action = partial(WholeTable(axis, case.rows, case.width, case.dtype, sharded).train, step)
        line_up(axis)
        with record() as ledger:
            cpu, wall = time.process_time(), time.perf_counter()
            action(ids, grads)
            found[name] = time.process_time() - cpu, time.perf_counter() - wall, ledger
        del action
    return found


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


def _phases(case: Case, times: list[tuple[float, float, float]]) -> dict[str, Any]:
    push, compaction, merge = (1e3 * sum(rank[index] for rank in times) for index in range(3))
    return {"case": case.name, "push": push, "compaction": compaction, "merge": merge, "share": compaction / push}
