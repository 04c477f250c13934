"""`weft bench attention`: context-parallel softmax attention beside what people use today and one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from weft.bench.attention import baselines
from weft.bench.attention.baselines import Baseline, options_for
from weft.bench.ranks import Measured, RankPool, describe_cases, fill_table
from weft.bench.report import Column, Layout, Report
from weft.bench.timing import Case, examine, forward_and_backward, take_turns, use_threads
from weft.comm import Axis
from weft.comm.wire import SoloWire
from weft.ops.attention import attention
from weft.ops.sequence import shard

HEADS, KV_HEADS, DIM = 8, 2, 64
ALONE = "one process, {} threads"
BOUND = "no communication, {}"
OURS = "weft gather, zigzag"

COLUMNS = (
    Column("case", "causal, forward + backward"),
    Column("milliseconds", "ms", "{:.1f}"),
    Column("to_one", "x one process", "{:.3f}", lambda m: m.times(ALONE.format(len(m.turns[0])))),
    Column("to_bound", "x its own work", "{:.3f}", lambda m: _to_bound(m)),
    Column("to_weft", "x weft zigzag gather", "{:.3f}", lambda m: m.times(OURS)),
    Column("bytes_sent", "bytes sent", "{:,}"),
    Column("peak_megabytes", "peak MB", "{:.0f}"),
)


def _to_bound(measured: Measured) -> float | None:
    if measured.case.startswith(("one", "no", "weft ulysses")):
        return None
    return measured.times(BOUND.format("zigzag" if "zigzag" in measured.case else "contiguous"))


def run(pool: RankPool, report: Report, repeats: int, tokens: int) -> None:
    """Measure; the rows are kept as far as they were measured."""
    if tokens % (2 * pool.size):
        raise ValueError(f"bench attention: --tokens {tokens} must be a multiple of twice the {pool.size} ranks")
    shape = f"B1 S{tokens} in all, H{HEADS} Hk{KV_HEADS} D{DIM} fp32"
    report.tables["attention"] = Layout(f"softmax attention on {pool.size} ranks, {shape}", COLUMNS)
    with report.progress(repeats, "attention") as advance:
        facts = describe_cases(pool.run(examine, make_cases, tokens))
        take = partial(pool.run, take_turns, make_cases, [tokens], 1)
        fill_table(report, "attention", take, repeats, advance, facts)


def make_cases(axis: Axis, tokens: int) -> dict[str, Case]:
    """One process, no communication, weft's methods and the baselines: forward and backward on this rank."""
    make = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, tokens, heads, DIM, generator=make) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    alone = Axis.over(SoloWire())
    everything = [t.clone().requires_grad_() for t in whole]

    def one_process() -> None:
        """The whole sequence on rank 0, with a thread for every rank; the others wait."""
        if axis.rank == 0:
            with use_threads(axis.size):
                forward_and_backward(lambda *t: attention(*t, causal=True, group=alone), everything)()

    local = {
        layout: [shard(t, 1, layout=layout, group=axis).requires_grad_() for t in whole]
        for layout in ("zigzag", "contiguous")
    }

    def weft_by(method: str, layout: str) -> Case:
        attend = partial(attention, causal=True, layout=layout, method=method, group=axis)
        return forward_and_backward(attend, local[layout])

    def baseline(schedule: Any, layout: str, strides: tuple[int, ...] = (KV_HEADS,)) -> Case:
        options = options_for(local[layout][0], local[layout][1], layout, strides)
        return forward_and_backward(lambda *t: Baseline.apply(*t, options, axis, schedule), local[layout])

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
