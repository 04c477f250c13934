"""`weft bench step-orders`: orders of one large step in virtual time, beside the bound no order can pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from weft.bench.report import Column, Layout, Report
from weft.comm import Axis
from weft.ops.embedding import BigramHashEmbedding
from weft.optim import REKLS, OverlappedStep, RowAdam, ShardedAdamW
from weft.optim.step.orders import Orders, read_order
from weft.optim.step.replay import Profile, replay
from weft.optim.step.tune import gather_profiles
from weft.world import Machine, VirtualWorld

RANKS, BLOCKS, WIDTH = 8, 12, 768
ROWS, TOUCHED = 250_000, 0.2  # of the table; each rank's batch needs this share of them
MACHINE = Machine(latency=10e-6, bandwidth=25e9, flops=100e12)

COLUMNS = (
    Column("case", "buckets", "{}"),
    Column("order", "order", "{}"),
    Column("milliseconds", "step ms", "{:.2f}"),
    Column("exposed", "exposed ms", "{:.2f}"),
    Column("to_bound", "x bound", "{:.3f}"),
    Column("work", "work ms", "{:.2f}"),
    Column("link", "link ms", "{:.2f}"),
    Column("units", "buckets", "{}"),
)


def layouts() -> dict[str, Layout]:
    """The table of this benchmark."""
    title = (
        f"one step in virtual time: {RANKS} ranks, {BLOCKS} blocks of h = {WIDTH} with REKLS, a table of {ROWS:,} x "
        f"{WIDTH} of which a rank's batch touches {TOUCHED:.0%}; 10 us, 25 GB/s, 100 TFLOP/s"
    )
    return {"orders": Layout(title, COLUMNS)}


def run(report: Report, tries: int) -> None:
    """Orders in virtual time, for the buckets that REKLS makes itself and for smaller ones."""
    cases: tuple[tuple[str, int | None], ...] = (("4 buckets", None), ("8 MB", 8 << 20))
    with report.progress(len(cases), "orders") as advance:
        for name, bucket_bytes in cases:
            world = VirtualWorld(RANKS, MACHINE)
            found = world.run(lambda axis, b=bucket_bytes: orders_of(axis, b, tries))  # type: ignore[misc]
            for row in found.results[0]:
                report.add("orders", {"case": name, **row})
            advance()


def orders_of(axis: Axis, bucket_bytes: int | None, tries: int) -> list[dict[str, Any]]:
    """The step on one rank, tuned, and how long each order takes. (The first rank replays.)"""
    step, backward = build(axis, bucket_bytes)
    backward()
    world = VirtualWorld(RANKS, MACHINE)
    tuning = step.tune(world, tries=tries, show=False)
    profiles = gather_profiles(step.axes, Profile.of(step.dry_run(step.orders), step.axes))
    step.parts["RowAdam"].zero_grad()
    backward()  # its rows leave now
    before = axis.wire.clock()
    step.dry_run(tuning.orders)
    dry = axis.wire.clock() - before
    if axis.rank:
        return []
    default = Orders.default(step.units)
    others = [name for name in default.work if not name.startswith("RowAdam")]
    third = read_order("work_order", [*others[:2], "RowAdam"], step.units, default.work)
    seconds = {
        "naive: all sent, all worked on, all returned": replay(world, profiles, default, naive=True),
        "published: table sent first, worked on third": replay(world, profiles, Orders(default.scatter, third)),
        "default": replay(world, profiles, default),
        "tuned": tuning.tried[0].predicted,
        "tuned, the step itself": dry,
        "bound: max(work, link)": tuning.bound,
    }
    return [
        {
            "order": name, "milliseconds": 1e3 * value, "exposed": 1e3 * (value - tuning.work),
            "to_bound": value / tuning.bound, "work": 1e3 * tuning.work, "link": 1e3 * tuning.link,
            "units": len(step.units),
        }
        for name, value in seconds.items()
    ]  # fmt: skip


def build(axis: Axis, bucket_bytes: int | None) -> tuple[OverlappedStep, Callable[[], None]]:
    """The step, and what brings the gradients of its table. Matrices are meta tensors, whose operators only count."""
    shapes = ((3, 1), (1, 1), (4, 1), (1, 4))
    matrices = [_meta(rows * WIDTH, columns * WIDTH) for _ in range(BLOCKS) for rows, columns in shapes]
    norms = [_meta(WIDTH) for _ in range(2 * BLOCKS)]
    table = BigramHashEmbedding(ROWS, WIDTH, group=axis)
    alone = axis.subset([axis.rank])
    step = OverlappedStep(
        [
            REKLS(matrices, lr=0.01, variant="stable", group=alone, data_group=axis),
            ShardedAdamW(norms, group=axis),
            RowAdam(table.parameters(), lr=0.01),
        ],
        bucket_bytes=bucket_bytes,
    )
    ids = torch.randperm(ROWS, generator=torch.Generator().manual_seed(axis.rank))[: int(TOUCHED * ROWS)]
    for parameter in (*matrices, *norms):
        parameter.grad = torch.empty_like(parameter)
    return step, lambda: table(rows=ids).sum().backward()


def _meta(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, device="meta"))
