"""`weft bench scan`: every schedule at several state sizes on real processes."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import torch
from torch import Tensor

from weft.bench.ranks import Measured, RankPool, describe_ledgers, fill_table
from weft.bench.report import Column, Layout, Report
from weft.bench.scan import baselines
from weft.bench.timing import Case, take_turns
from weft.comm import Axis, Ledger, record
from weft.comm.dist import DistWire
from weft.ops.scan import METHODS, Form, exclusive_scan

SIZES = ((4, 32, 32), (8, 64, 64), (16, 128, 128))  # heads, K, V: 16 KiB, 128 KiB and 1 MiB of fp32 state

COLUMNS = (
    Column("state", "state"),
    Column("method", "method"),
    Column("milliseconds", "ms", "{:.3f}"),
    Column("to_fastest", "x fastest", "{:.2f}", lambda m: m.milliseconds / (1e3 * _fastest(m))),
    Column("to_handwritten", "x by hand", "{:.2f}", lambda m: m.times(f"{m.case} by hand")),
    Column("bytes_sent", "bytes sent", "{:,}"),
    Column("rounds", "rounds"),
    Column("error", "error", "{:.1e}"),
    Column("samples", None),
)


def _fastest(measured: Measured) -> float:
    return min(statistics.median(measured.wall(method)) for method in METHODS)


def run(pool: RankPool, report: Report, repeats: int, calls: int) -> None:
    """Measure, adding a row for each method and size to ``report`` as soon as the size is done."""
    title = f"exclusive scan on {pool.size} ranks, fp32 states with a scalar decay"
    report.tables["scan"] = Layout(title, COLUMNS)
    with report.progress(len(SIZES) * repeats, "scan") as advance:
        for shape in SIZES:
            facts = {method: _facts(shape, method, pool.run(inspect, method, shape)) for method in METHODS}
            take = partial(pool.run, take_turns, make_cases, [shape], calls)
            fill_table(report, "scan", take, repeats, advance, facts)


def _facts(shape: tuple[int, ...], method: str, ranks: list[tuple[Ledger, float]]) -> dict[str, Any]:
    ledgers, errors = zip(*ranks, strict=True)
    return {"state": "x".join(map(str, shape)), "method": method, **describe_ledgers(ledgers), "error": max(errors)}


def _inputs(rank: int, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    make = torch.Generator().manual_seed(rank)
    return torch.randn(shape, generator=make), -0.1 * torch.rand(shape[0], generator=make)


def inspect(axis: Axis, method: str, shape: tuple[int, ...]) -> tuple[Ledger, float]:
    """What a rank sends, and its largest relative error against a serial fold in fp64."""
    state, log = _inputs(axis.rank, shape)
    with record() as ledger:
        out = exclusive_scan(state, log_decay=log, group=axis, method=method)
    fold = torch.zeros(shape, dtype=torch.float64)
    for rank in range(axis.rank):
        earlier, decay = _inputs(rank, shape)
        fold = decay.double().exp().view(-1, 1, 1) * fold + earlier.double()
    error = (out.double() - fold).abs().max() / fold.abs().max().clamp(min=1)
    return ledger, error.item()


def make_cases(axis: Axis, shape: tuple[int, ...]) -> dict[str, Case]:
    """Every method and its hand-written version."""
    state, log = _inputs(axis.rank, shape)
    assert isinstance(axis.wire, DistWire)
    line = baselines.Line(axis.wire.group)
    blocks = Form.of(state).default_blocks
    cases: dict[str, Case] = {}
    for method in METHODS:
        cases[method] = partial(exclusive_scan, state, log_decay=log, group=axis, method=method)
        if method in baselines.METHODS:
            cases[f"{method} by hand"] = partial(baselines.scan, line, method, state, log, blocks)
    return cases
