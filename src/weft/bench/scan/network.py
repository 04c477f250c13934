"""`weft bench network`: what a real network takes, beside the virtual time of the same program on the same links.

For ranks on one host (they start together by its clock) that are joined by links of a known delay and rate: one process
for each rank, started by torchrun or the like. Layers also compute; how long that takes here is measured without
communication and given to the virtual machine as its FLOP rate.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from weft.bench.ranks import RankPool
from weft.bench.report import Column, Layout, Report
from weft.bench.timing import forward_and_backward
from weft.comm import Axis
from weft.comm.wire import SoloWire
from weft.ops.attention import attention
from weft.ops.attention.distributed import METHODS as ATTENTION_METHODS
from weft.ops.linear_attention import linear_attention
from weft.ops.scan import METHODS, exclusive_scan
from weft.ops.sequence.layout import ANY_LENGTHS
from weft.world import Machine, VirtualWorld

HEADS = 6  # of softmax attention
START = 60_000_000  # nanoseconds from the last word of a rank to the common start

STATES = ((1, 64, 64), (8, 64, 64), (32, 128, 128))  # heads, K, V: 16 KiB, 128 KiB and 2 MiB of fp32
COLUMNS = (
    Column("case", "case"),
    Column("milliseconds", "ms", "{:.1f}"),
    Column("local", "local work, ms", "{:.1f}"),
    Column("virtual_gloo", "virtual ms, gloo", "{:.1f}"),
    Column("to_gloo", "x gloo", "{:.2f}"),
    Column("virtual_ideal", "virtual ms, ideal", "{:.1f}"),
    Column("to_ideal", "x ideal", "{:.2f}"),
)
Program = Callable[[Axis, str], object]  # a case, on an axis and a device


def make_cases(tokens: int) -> dict[str, Program]:
    """Bare scans, which compute nothing but the combination of states; forward and backward of both attentions."""
    found: dict[str, Program] = {}
    for shape, method in itertools.product(STATES, METHODS):
        found[f"scan {'x'.join(map(str, shape))} {method}"] = partial(_scan, shape, method)
    for method in METHODS:
        found[f"linear attention, {method}"] = partial(_linear_attention, tokens, method)
    for method, layout in itertools.product(ATTENTION_METHODS, ANY_LENGTHS):
        found[f"attention, {layout}, {method}"] = partial(_attention, tokens, method, layout)
    return found


def _scan(shape: tuple[int, ...], method: str, axis: Axis, device: str) -> None:
    state, log = torch.ones(shape, device=device), torch.zeros(shape[0], device=device)
    exclusive_scan(state, log_decay=log, method=method, group=axis)


def _linear_attention(tokens: int, method: str, axis: Axis, device: str) -> None:
    _step(tokens, 1, device, lambda *t: linear_attention(*t, method=method, group=axis)[0])


def _attention(tokens: int, method: str, layout: str, axis: Axis, device: str) -> None:
    """An eighth of the tokens; alone, with those of all ranks, whose number is that of the heads."""
    tokens = tokens // 8 * (HEADS if axis.size == 1 else 1)
    method = "gather" if axis.size == 1 else method
    _step(tokens, HEADS, device, lambda *t: attention(*t, causal=True, layout=layout, method=method, group=axis))


def _step(tokens: int, heads: int, device: str, attend: Callable[..., Tensor]) -> None:
    inputs = [torch.ones(1, tokens, heads, 64, device=device).requires_grad_() for _ in range(3)]
    forward_and_backward(attend, inputs)()


def run(pool: RankPool, report: Report, machine: Machine, repeats: int, tokens: int) -> None:
    """Measure every case on the ranks and simulate it under both rules."""
    links = f"{machine.latency * 1e3:g} ms and {machine.bandwidth * 8e-6:g} Mbit/s"
    report.tables["network"] = Layout(f"{pool.size} ranks on links of {links}", COLUMNS)
    cases = make_cases(tokens)
    with report.progress(len(cases), "network") as advance:
        for name, program in cases.items():
            measured = _median(pool.run(sample_case, program, repeats, False))
            local = 0.0 if name.startswith("scan") else _median(pool.run(sample_case, program, repeats, True))
            row: dict[str, Any] = {"case": name, "milliseconds": measured * 1e3, "local": local * 1e3 or None}
            here = machine
            if local:
                counting = replace(machine, flops=1.0, latency=0.0, bandwidth=math.inf)
                here = replace(machine, flops=_simulate(program, 1, counting, "ideal") / local)
            for rules in ("gloo", "ideal"):
                row[f"virtual_{rules}"] = _simulate(program, pool.size, here, rules) * 1e3
                row[f"to_{rules}"] = row["milliseconds"] / row[f"virtual_{rules}"]
            report.add("network", row)
            advance()


def _median(samples: list[list[float]]) -> float:
    """Of the slowest rank."""
    return statistics.median(max(sample) for sample in zip(*samples, strict=True))


def _simulate(program: Program, size: int, machine: Machine, rules: str) -> float:
    run = VirtualWorld(size, machine, rules).run(lambda axis: program(axis, "meta"))
    assert run.elapsed is not None
    return run.elapsed


def sample_case(axis: Axis, program: Program, repeats: int, alone: bool) -> list[float]:
    """Seconds from a common start to the end of this rank, after one to warm up; ``alone``: as a world of one."""
    here = Axis.over(SoloWire()) if alone else axis
    seconds = []
    for _ in range(repeats + 1):
        clocks = axis.begin("start", metadata=(time.monotonic_ns(),)).metadata.wait()
        start = max(clock for (clock,) in clocks) + START
        time.sleep(max(0.0, (start - time.monotonic_ns()) / 1e9))
        program(here, "cpu")
        seconds.append((time.monotonic_ns() - start) / 1e9)
    return seconds[1:]
