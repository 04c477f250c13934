"""`weft bench attention --packed`: packed documents in every layout, beside their share of one process's work."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from weft.bench.ranks import Measured, RankPool, describe_cases, describe_ledgers, fill_table
from weft.bench.report import Column, Layout, Report
from weft.bench.timing import Case, Sample, examine, forward_and_backward, take_turns, use_threads
from weft.comm import Axis
from weft.comm.wire import SoloWire
from weft.ops.attention import attention
from weft.ops.attention.plan import plan_attention
from weft.ops.sequence import sequence, shard
from weft.ops.sequence.layout import LAYOUTS, Bounds
from weft.world import VirtualWorld
from weft.world.machine import PRESETS

HEADS, KV_HEADS, DIM = 8, 2, 64
H100_TOKENS, H100_HEADS, H100_KV_HEADS, H100_DIM = 4096, 32, 8, 128  # of a rank
ONE = "one process, one thread"

COLUMNS = (
    Column("case", "causal, forward + backward"),
    Column("milliseconds", "ms", "{:.2f}"),
    Column("to_share", "x its share", "{:.3f}", lambda m: _to_share(m)),
    Column("to_zigzag", "x faster than zigzag", "{:.2f}", lambda m: m.faster_than("weft, zigzag")),
    Column("busiest", "busiest / mean work", "{:.3f}"),
    Column("bytes_sent", "bytes sent", "{:,}"),
)


def _to_share(measured: Measured) -> float | None:
    """Beside the P-th part of what one process takes for the whole batch."""
    times = measured.times(ONE)
    return None if times is None or measured.case == ONE else times * len(measured.turns[0])


def run(pool: RankPool, report: Report, repeats: int, tokens: int, h100_ranks: Sequence[int]) -> None:
    """Measure, then simulate; the rows are kept as far as they were measured."""
    bounds = documents(tokens, longest=tokens // 2, median=max(1, tokens // 64))
    shape = f"B1 H{HEADS} Hk{KV_HEADS} D{DIM} fp32, one thread each"
    title = f"{tokens} packed tokens in {len(bounds) - 1} documents on {pool.size} ranks, {shape}"
    report.tables["packed"] = Layout(title, COLUMNS)
    args = [bounds]
    with report.progress(repeats, "packed attention") as advance:
        facts = describe_cases(pool.run(examine, make_cases, *args))
        balance = pool.run(imbalance, bounds)[0]
        rows = {case: {**found, "busiest": balance.get(case)} for case, found in facts.items()}
        take = partial(pool.run, sample, args)
        fill_table(report, "packed", take, repeats, advance, rows)
    if pool.reports:
        for ranks in h100_ranks:
            simulate(report, ranks)


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
        f"weft, {layout}": by_layout(axis, layout, bounds, whole) for layout in LAYOUTS
    }


def alone(bounds: Bounds, whole: Sequence[Tensor]) -> Case:
    """All documents in one process."""
    attend = partial(attention, causal=True, cu_seqlens=torch.tensor(bounds), group=Axis.over(SoloWire()))
    return forward_and_backward(attend, [x.detach().requires_grad_() for x in whole])


def by_layout(axis: Axis, layout: str, bounds: Bounds, whole: Sequence[Tensor]) -> Case:
    """This rank's tokens, keys gathered as they are needed."""
    where = sequence(total=bounds[-1], layout=layout, cu_seqlens=bounds, group=axis)
    local = [shard(x, 1, sequence=where).requires_grad_() for x in whole]
    return forward_and_backward(partial(attention, causal=True, sequence=where, method="gather"), local)


def imbalance(axis: Axis, bounds: Bounds) -> dict[str, float]:
    """Scores of the rank with the most of them over the mean, by case."""
    found = {}
    for layout in LAYOUTS:
        where = sequence(total=bounds[-1], layout=layout, cu_seqlens=bounds, group=axis)
        plan = plan_attention(where.runs, where.lengths, bounds, True, (-1, -1))
        pairs = [plan.pairs(rank) for rank in range(axis.size)]
        found[f"weft, {layout}"] = max(pairs) * axis.size / sum(pairs)
    return found


def simulate(report: Report, ranks: int) -> None:
    """The same on many H100s in virtual time."""
    bounds, machine, table = documents(ranks * H100_TOKENS, seed=ranks), PRESETS["h100"], f"packed, {ranks} H100"
    shape = f"H{H100_HEADS} Hk{H100_KV_HEADS} D{H100_DIM} bf16, in virtual time: 10 us, 50 GB/s, 495 TFLOP/s"
    title = f"{ranks} H100 of {H100_TOKENS} tokens in {len(bounds) - 1} documents, {shape}"
    report.tables[table] = Layout(title, COLUMNS)
    whole = [
        torch.empty(1, bounds[-1], heads, H100_DIM, dtype=torch.bfloat16, device="meta")
        for heads in (H100_HEADS, H100_KV_HEADS, H100_KV_HEADS)
    ]
    one = VirtualWorld(1, machine).run(lambda axis: alone(bounds, whole)())
    world, elapsed, facts = VirtualWorld(ranks, machine), {ONE: Sample(one.elapsed or 0.0)}, {}
    balance = VirtualWorld(ranks).run(partial(imbalance, bounds=bounds)).results[0]
    for layout in LAYOUTS:
        case = f"weft, {layout}"
        result = world.run(partial(_run_layout, layout, bounds, whole))
        elapsed[case] = Sample(result.elapsed or 0.0)
        facts[case] = {**describe_ledgers(result.ledgers), "busiest": balance[case]}
    rows = [elapsed, *({case: Sample(0.0) for case in elapsed} for _ in range(ranks - 1))]
    fill_table(
        report,
        table,
        lambda turn: rows,
        1,
        lambda: None,
        {ONE: {"busiest": None, "bytes_sent": None}, **facts},
        warm_ups=0,
    )


def _run_layout(layout: str, bounds: Bounds, whole: Sequence[Tensor], axis: Axis) -> None:
    by_layout(axis, layout, bounds, whole)()
