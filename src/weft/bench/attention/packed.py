"""`weft bench attention --packed`: packed documents in every layout, beside their share of one process's work."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from weft.bench.attention import baselines
from weft.bench.attention.baselines import Baseline, options_for
from weft.bench.ranks import Measured, RankPool, describe_cases, describe_ledgers, fill_table
from weft.bench.report import Column, Layout, Report
from weft.bench.timing import Case, Sample, examine, forward_and_backward, take_turns, use_threads
from weft.comm import Axis
from weft.comm.wire import SoloWire
from weft.ops.attention import attention
from weft.ops.attention.plan import plan_attention
from weft.ops.sequence import sequence, shard
from weft.ops.sequence.layout import LAYOUTS, Bounds, shard_runs
from weft.ops.sequence.runs import lengths_of
from weft.world import VirtualWorld
from weft.world.machine import PRESETS, Machine

HEADS, KV_HEADS, DIM = 8, 2, 64
H100_HEADS, H100_KV_HEADS, H100_DIM = 64, 8, 128
ONE = "one process, one thread"
UNSENT = "no communication, balanced"

COLUMNS = (
    Column("case", "causal, forward + backward"),
    Column("milliseconds", "ms", "{:.2f}"),
    Column("to_share", "x its share", "{:.3f}", lambda m: _to_share(m)),
    Column("to_zigzag", "x faster than zigzag", "{:.2f}", lambda m: m.faster_than("weft, zigzag")),
    Column("busiest", "busiest / mean work", "{:.3f}"),
    Column("bytes_sent", "bytes sent", "{:,}"),
)
H100_COLUMNS = (*COLUMNS, Column("to_bound", "x (its share + its link)", "{:.3f}"))


def _to_share(measured: Measured) -> float | None:
    """Beside the P-th part of what one process takes for the whole batch."""
    times = measured.times(ONE)
    return None if times is None or measured.case == ONE else times * len(measured.turns[0])


def run(
    pool: RankPool, report: Report, repeats: int, tokens: int, h100_ranks: Sequence[int], h100_tokens: int,
    h100_batches: int,
) -> None:  # fmt: skip
    """Measure, then simulate; the rows are kept as far as they were measured."""
    bounds = documents(tokens, longest=tokens // 2, median=max(1, tokens // 64))
    shape = f"B1 H{HEADS} Hk{KV_HEADS} D{DIM} fp32, one thread each"
    title = f"{tokens} packed tokens in {len(bounds) - 1} documents on {pool.size} ranks, {shape}"
    report.tables["packed"] = Layout(title, COLUMNS)
    args = [bounds]
    with report.progress(repeats, "packed attention") as advance:
        facts = describe_cases(pool.run(examine, make_cases, *args))
        balance = {f"weft, {layout}": imbalance(layout, bounds, pool.size) for layout in LAYOUTS}
        balance[UNSENT] = balance["weft, balanced"]
        rows = {case: {**found, "busiest": balance.get(case)} for case, found in facts.items()}
        take = partial(pool.run, sample, args)
        fill_table(report, "packed", take, repeats, advance, rows)
    if pool.reports:
        for ranks in h100_ranks:
            simulate(report, ranks, h100_tokens, h100_batches)


def documents(tokens: int, longest: int = 0, median: int = 1024, seed: int = 0) -> Bounds:
    """Boundaries of lognormal documents (sigma 1.5); the third has ``longest`` tokens, if that is given."""
    make = torch.Generator().manual_seed(seed)
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        drawn = round(math.exp(math.log(median) + 1.5 * torch.randn((), generator=make).item()))
        lengths.append(min(left, longest if longest and len(lengths) == 2 else max(1, drawn)))
    return (0, *accumulate(lengths))


def sample(axis: Axis, args: Sequence[Bounds], turn: int) -> dict[str, Sample]:
    """On all ranks, with one thread each."""
    with use_threads(1):
        return take_turns(axis, make_cases, args, 1, turn)


def make_cases(axis: Axis, bounds: Bounds) -> dict[str, Case]:
    """The whole batch on rank 0, and every layout: forward and backward on this rank."""
    make = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, bounds[-1], heads, DIM, generator=make) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return {ONE: alone(bounds, whole) if axis.rank == 0 else lambda: None} | {
        UNSENT: unsent(axis, bounds, whole),
        **{f"weft, {layout}": by_layout(axis, layout, bounds, whole) for layout in LAYOUTS},
    }


def alone(bounds: Bounds, whole: Sequence[Tensor]) -> Case:
    """All documents in one process."""
    attend = partial(attention, causal=True, cu_seqlens=torch.tensor(bounds), group=Axis.over(SoloWire()))
    return forward_and_backward(attend, [x.detach().requires_grad_() for x in whole])


def unsent(axis: Axis, bounds: Bounds, whole: Sequence[Tensor]) -> Case:
    """This rank's work of a balanced deal as if all keys were here: what is over its share is none of the messages."""
    where = sequence(total=bounds[-1], layout="balanced", cu_seqlens=bounds, group=axis)
    local = [shard(x, 1, sequence=where).requires_grad_() for x in whole]
    options = options_for(local[0], local[1], where.layout, (KV_HEADS,), where)
    return forward_and_backward(lambda *t: Baseline.apply(*t, options, axis, baselines.local), local)


def by_layout(axis: Axis, layout: str, bounds: Bounds, whole: Sequence[Tensor]) -> Case:
    """This rank's tokens, keys gathered as they are needed."""
    where = sequence(total=bounds[-1], layout=layout, cu_seqlens=bounds, group=axis)
    local = [shard(x, 1, sequence=where).requires_grad_() for x in whole]
    return forward_and_backward(partial(attention, causal=True, sequence=where, method="gather"), local)


def imbalance(layout: str, bounds: Bounds, ranks: int) -> float:
    """Scores of the rank with the most of them over the mean."""
    runs = shard_runs(bounds[-1], layout, ranks, bounds)
    plan = plan_attention(runs, lengths_of(runs, ranks), bounds, True, (-1, -1))
    pairs = [plan.pairs(rank) for rank in range(ranks)]
    return max(pairs) * ranks / sum(pairs)


def simulate(report: Report, ranks: int, tokens: int, batches: int) -> None:
    """Several batches on many H100s in virtual time, each a turn."""
    machine, table = PRESETS["h100"], f"packed, {ranks} H100"
    shape = f"H{H100_HEADS} Hk{H100_KV_HEADS} D{H100_DIM} bf16, in virtual time: 10 us, 50 GB/s, 495 TFLOP/s"
    title = f"{ranks} H100 of {tokens} tokens, {batches} batches, {shape}"
    report.tables[table] = Layout(title, H100_COLUMNS)
    found: dict[str, list[dict[str, float]]] = {}

    def take(turn: int) -> list[dict[str, Sample]]:
        bounds = documents(ranks * tokens, seed=turn - 1)
        elapsed = {ONE: _simulate_alone(bounds, machine)}
        for layout in LAYOUTS:
            result = VirtualWorld(ranks, machine).run(partial(_run_layout, layout, bounds))
            seconds, sent = result.elapsed or 0.0, describe_ledgers(result.ledgers)["bytes_sent"]
            bound = elapsed[ONE] / ranks + sent / machine.bandwidth
            elapsed[f"weft, {layout}"] = seconds
            row = {"bytes_sent": sent, "busiest": imbalance(layout, bounds, ranks), "to_bound": seconds / bound}
            found.setdefault(f"weft, {layout}", []).append(row)
        rest = {case: Sample(0.0) for case in elapsed}
        return [{case: Sample(seconds) for case, seconds in elapsed.items()}, *[rest] * (ranks - 1)]

    with report.progress(batches, f"{ranks} H100") as advance:
        turns = []
        for turn in range(1, batches + 1):
            turns.append(take(turn))
            advance()
    facts: dict[str, dict[str, float | None]] = {ONE: dict.fromkeys(("bytes_sent", "busiest", "to_bound"))}
    for case, rows in found.items():
        facts[case] = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        facts[case]["bytes_sent"] = int(facts[case]["bytes_sent"] or 0)
    fill_table(report, table, lambda turn: turns[turn - 1], batches, lambda: None, facts, warm_ups=0)


def _simulate_alone(bounds: Bounds, machine: Machine) -> float:
    def program(axis: Axis) -> None:
        _forward_and_backward(bounds[-1], cu_seqlens=torch.tensor(bounds), group=axis)

    return VirtualWorld(1, machine).run(program).elapsed or 0.0


def _run_layout(layout: str, bounds: Bounds, axis: Axis) -> None:
    where = sequence(total=bounds[-1], layout=layout, cu_seqlens=bounds, group=axis)
    _forward_and_backward(where.lengths[axis.rank], sequence=where, method="gather")


def _forward_and_backward(tokens: int, **how: Any) -> None:
    """Of tensors without memory, and with a gradient that is there already, so that nothing else takes time."""
    q, k, v = (
        torch.empty(1, tokens, heads, H100_DIM, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for heads in (H100_HEADS, H100_KV_HEADS, H100_KV_HEADS)
    )
    out = attention(q, k, v, causal=True, **how)
    torch.autograd.grad(out, (q, k, v), torch.empty_like(out))
