"""`weft bench matrix`: steps of data-parallel blocks on H100s in virtual time, beside their work and their link."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from weft.bench.matrix.methods import OPTIMIZERS, begins_so
from weft.bench.report import Column, Layout, Report
from weft.comm import Axis
from weft.world import VirtualWorld
from weft.world.machine import PRESETS

SHAPES = ((3, 1), (1, 1), (4, 1), (1, 4))  # qkv, projection, up, down: rows, columns (x h)
STEPS = 10  # a cycle of the roots
COLUMNS = (
    Column("method", "method"),
    Column("milliseconds", "ms of a step", "{:.2f}"),
    Column("work", "busiest rank's work", "{:.2f}"),
    Column("link", "busiest link", "{:.2f}"),
    Column("to_bound", "x the longer", "{:.3f}"),
    Column("to_bound_in_order", "in NCCL's order", "{:.3f}"),
)


def simulate(report: Report, ranks: int, methods: tuple[str, ...], blocks: int = 12, width: int = 768) -> None:
    """Steps after the dense ones, gradients averaged on their way to the owners; a row for each method."""
    table = f"matrix, {ranks} H100"
    shape = f"{blocks} blocks, h {width}, fp32; 10 us, 50 GB/s, 495 TFLOP/s, 3.35 TB/s"
    report.tables[table] = Layout(f"one step on {ranks} data-parallel H100s in virtual time: {shape}", COLUMNS)
    names = begins_so(OPTIMIZERS, methods)
    with report.progress(len(names), f"{ranks} H100") as advance:
        for name in names:
            found = {rules: _time(ranks, rules, name, blocks, width) for rules in ("ideal", "nccl")}
            seconds, work, link = found["ideal"]
            bound = max(work, link)
            report.add(table, {
                "method": name, "milliseconds": 1e3 * seconds, "work": 1e3 * work, "link": 1e3 * link,
                "to_bound": seconds / bound, "to_bound_in_order": found["nccl"][0] / bound,
            })  # fmt: skip
            advance()


def _time(ranks: int, rules: str, method: str, blocks: int, width: int) -> tuple[float, float, float]:
    """Seconds of one of `STEPS` steps: of the step, of the busiest rank's operators, of the busiest link."""
    first, last = (_spend(ranks, rules, partial(_run, method, blocks, width, steps)) for steps in (1, 1 + STEPS))
    step, work, link = (
        max(late - early for early, late in zip(some, others, strict=True)) / STEPS
        for some, others in zip(first, last, strict=True)  # the first step compares weights, too
    )
    return step, work, link


def _spend(ranks: int, rules: str, program: Callable[[Axis], None]) -> tuple[list[float], list[float], list[float]]:
    """Seconds that a program takes; by rank, those of its operators and those of its link."""
    machine, work = PRESETS["h100"], [0.0] * ranks
    run = VirtualWorld(ranks, machine, rules).run(program)
    for event in run.timeline.events:
        if event.lane == "compute":
            work[event.rank] += (event.end or event.start) - event.start
    return [run.elapsed or 0.0], work, [machine.message_seconds(ledger.bytes_sent) for ledger in run.ledgers]


def _run(method: str, blocks: int, width: int, steps: int, axis: Axis) -> None:
    """Of tensors without memory."""
    parameters = [
        torch.nn.Parameter(torch.empty(rows * width, columns * width, device="meta"))
        for _ in range(blocks)
        for rows, columns in SHAPES
    ]
    own: dict[str, Any] = {"dense_steps": 0} if method == "stable" else {}
    optimizer = OPTIMIZERS[method](parameters, lr=0.01, data_group=axis, **own)
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        optimizer.step()
