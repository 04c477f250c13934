"""`weft bench scan`: every schedule at several state sizes on real processes."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch import Tensor

from weft.bench.ranks import RankPool, by_case, take_samples
from weft.bench.report import Column, Layout, Report
from weft.bench.scan import baselines
from weft.bench.timing import take_turns
from weft.comm import Axis, Ledger, record
from weft.comm.dist import DistWire
from weft.ops.scan import METHODS, Form, exclusive_scan

SIZES = ((4, 32, 32), (8, 64, 64), (16, 128, 128))  # heads, K, V: 16 KiB, 128 KiB and 1 MiB of fp32 state

COLUMNS = (
    Column("state", "state", "{}"),
    Column("method", "method", "{}"),
    Column("milliseconds", "ms", "{:.3f}"),
    Column("to_fastest", "x fastest", "{:.2f}"),
    Column("to_handwritten", "x by hand", "{:.2f}"),
    Column("bytes_sent", "bytes sent", "{:,}"),
    Column("rounds", "rounds", "{}"),
    Column("error", "error", "{:.1e}"),
)


def layouts(ranks: int) -> dict[str, Layout]:
    """The table of this benchmark."""
    return {"scan": Layout(f"exclusive scan on {ranks} ranks, fp32 states with a scalar decay", COLUMNS)}


def run(pool: RankPool, report: Report, repeats: int, calls: int) -> None:
    """Measure, adding a row for each method and size to ``report`` as soon as the size is done."""
    with report.progress(len(SIZES) * repeats, "scan") as advance:
        for shape in SIZES:
            facts = [pool.run(inspect, method, shape) for method in METHODS]
            samples: list[dict[str, float]] = []
            try:
                for seconds in take_samples(pool, sample, [shape, calls], repeats, advance):
                    samples.append(seconds)
            finally:  # Ctrl-C keeps what was measured
                for row in _rows(shape, by_case(samples), dict(zip(METHODS, facts, strict=True))):
                    report.add("scan", row)


def _rows(shape: tuple[int, ...], samples: dict[str, list[float]], facts: dict[str, Any]) -> list[dict[str, Any]]:
    medians = {name: statistics.median(times) for name, times in samples.items()}
    rows = []
    for method in METHODS if medians else ():
        # Ratios sample by sample: what else the machine was doing then slowed both.
        by_hand = samples.get(f"{method} by hand")
        ratios = [a / b for a, b in zip(samples[method], by_hand, strict=True)] if by_hand else None
        rows.append({
            "state": "x".join(map(str, shape)),
            "method": method,
            "milliseconds": medians[method] * 1e3,
            "to_fastest": medians[method] / min(medians[name] for name in METHODS),
            "to_handwritten": statistics.median(ratios) if ratios else None,
            "bytes_sent": max(ledger.bytes_sent for ledger, _ in facts[method]),
            "rounds": Ledger.merge(ledger for ledger, _ in facts[method]).rounds,
            "error": max(error for _, error in facts[method]),
            "samples": len(samples[method]),
        })  # fmt: skip
    return rows


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


def sample(axis: Axis, shape: tuple[int, ...], calls: int, turn: int) -> dict[str, float]:
    """One interleaved sample of every method and of its hand-written version."""
    state, log = _inputs(axis.rank, shape)
    assert isinstance(axis.wire, DistWire)
    line = baselines.Line(axis.wire.group)
    blocks = Form.of(state).default_blocks
    cases = {}
    for method in METHODS:
        cases[method] = lambda method=method: exclusive_scan(state, log_decay=log, group=axis, method=method)
        if method in baselines.METHODS:
            cases[f"{method} by hand"] = lambda method=method: baselines.scan(line, method, state, log, blocks)
    return take_turns(axis, cases, calls, turn)
