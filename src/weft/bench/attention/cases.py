"""`weft bench attention`: context-parallel softmax attention beside what people use today and one process."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.bench.attention import baselines
from weft.bench.attention.baselines import Baseline, options_for
from weft.bench.ranks import RankPool, by_case, take_samples
from weft.bench.report import Column, Layout, Report
from weft.bench.timing import Case, examine, take_turns
from weft.comm import Axis, Ledger
from weft.comm.wire import SoloWire
from weft.ops.attention import attention
from weft.ops.sequence import shard

HEADS, KV_HEADS, DIM = 8, 2, 64
ALONE = "one process, {} threads"
BOUND = "no communication, {}"

COLUMNS = (
    Column("case", "causal, forward + backward", "{}"),
    Column("milliseconds", "ms", "{:.1f}"),
    Column("to_one", "x one process", "{:.3f}"),
    Column("to_bound", "x its own work", "{:.3f}"),
    Column("to_weft", "x weft zigzag gather", "{:.3f}"),
    Column("bytes_sent", "bytes sent", "{:,}"),
    Column("peak_megabytes", "peak MB", "{:.0f}"),
)
OURS = "weft gather, zigzag"


def layouts(ranks: int, tokens: int) -> dict[str, Layout]:
    """The table of this benchmark."""
    shape = f"B1 S{tokens} in all, H{HEADS} Hk{KV_HEADS} D{DIM} fp32"
    return {"attention": Layout(f"softmax attention on {ranks} ranks, {shape}", COLUMNS)}


def run(pool: RankPool, report: Report, repeats: int, tokens: int) -> None:
    """Measure; the rows are kept as far as they were measured."""
    if tokens % (2 * pool.size):
        raise ValueError(f"bench attention: --tokens {tokens} must be a multiple of twice the {pool.size} ranks")
    samples: list[dict[str, float]] = []
    with report.progress(repeats, "attention") as advance:
        facts = pool.run(inspect, tokens)
        try:
            for seconds in take_samples(pool, sample, [tokens], repeats, advance):
                samples.append(seconds)
        finally:
            for row in _rows(by_case(samples), facts, pool.size) if samples else ():
                report.add("attention", row)


def _rows(samples: dict[str, list[float]], facts: list[Any], size: int) -> list[dict[str, Any]]:
    def ratio(name: str, base: str) -> float:
        return statistics.median(a / b for a, b in zip(samples[name], samples[base], strict=True))

    rows = []
    for name in samples:
        peaks = [fact[name][1] for fact in facts if fact[name][1] is not None]
        layout = "zigzag" if "zigzag" in name else "contiguous"
        rows.append({
            "case": name,
            "milliseconds": statistics.median(samples[name]) * 1e3,
            "to_one": ratio(name, ALONE.format(size)),
            "to_bound": None if name.startswith(("one", "no", "weft ulysses")) else ratio(name, BOUND.format(layout)),
            "to_weft": ratio(name, OURS),
            "bytes_sent": max(fact[name][0].bytes_sent for fact in facts),
            "peak_megabytes": max(peaks) / 1e6 if peaks else None,
        })  # fmt: skip
    return rows


def _step(attend: Callable[..., Any], inputs: list[Tensor]) -> Case:
    grad = torch.ones_like(inputs[0])
    return lambda: torch.autograd.grad(attend(*inputs), inputs, grad)


def _cases(axis: Axis, tokens: int) -> dict[str, Case]:
    make = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, tokens, heads, DIM, generator=make) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    alone = Axis.over(SoloWire())
    everything = [t.clone().requires_grad_() for t in whole]

    def one_process() -> None:
        """The whole sequence on rank 0, with a thread for every rank; the others wait."""
        if axis.rank == 0:
            threads = torch.get_num_threads()
            torch.set_num_threads(axis.size)
            _step(lambda *t: attention(*t, causal=True, group=alone), everything)()
            torch.set_num_threads(threads)

    local = {
        layout: [shard(t, 1, layout=layout, group=axis).requires_grad_() for t in whole]
        for layout in ("zigzag", "contiguous")
    }

    def weft_by(method: str, layout: str) -> Case:
        return _step(lambda *t: attention(*t, causal=True, layout=layout, method=method, group=axis), local[layout])

    def baseline(schedule: Any, layout: str, strides: tuple[int, ...] = (KV_HEADS,)) -> Case:
        options = options_for(local[layout][0], local[layout][1], layout, strides)
        return _step(lambda *t: Baseline.apply(*t, options, axis, schedule), local[layout])

    cases: dict[str, Case] = {ALONE.format(axis.size): one_process}
    for layout in local:
        cases[BOUND.format(layout)] = baseline(baselines.local, layout)
    for method in ("gather", "ring"):
        for layout in local:
            cases[f"weft {method}, {layout}"] = weft_by(method, layout)
    if KV_HEADS % axis.size == 0:
        cases["weft ulysses (as Ulysses), contiguous"] = weft_by("ulysses", "contiguous")
    cases["strided all-gather, blocking ends, contiguous"] = baseline(baselines.strided, "contiguous", (1,) * KV_HEADS)
    cases["ring, contiguous"] = baseline(baselines.ring, "contiguous")
    cases["zigzag ring"] = baseline(baselines.ring, "zigzag")
    return cases


def inspect(axis: Axis, tokens: int) -> dict[str, tuple[Ledger, int | None]]:
    """What each case sends, and its memory."""
    return examine(_cases(axis, tokens))


def sample(axis: Axis, tokens: int, turn: int) -> dict[str, float]:
    """One interleaved sample of every case."""
    return take_turns(axis, _cases(axis, tokens), turn=turn)
