"""Lanes on real processes: a schedule runs beside the caller."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

import weft
from weft.world.launch import ProcessWorld


def overlap(axis: weft.Axis) -> tuple[float, float, float]:
    """Seconds of a slow scan, of other work, and of both with the scan on a lane. The slow part is sleeping."""
    group = dist.new_group(range(2))
    if axis.rank >= 2:
        return 0.0, 0.0, 0.0
    line = weft.Axis.of(group)

    def slow_scan(lane: weft.Axis) -> torch.Tensor:
        out = torch.zeros(1, 1)
        for _ in range(10):
            time.sleep(0.02)
            out = out + weft.exclusive_scan(torch.ones(1, 1), group=lane, method="ring")
        return out

    def compute() -> None:
        end = time.perf_counter() + 0.2
        while time.perf_counter() < end:
            torch.randn(64, 64) @ torch.randn(64, 64)

    def timed(work) -> float:
        weft.exclusive_scan(torch.ones(1, 1), group=line)
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    def both() -> None:
        pending = line.start(slow_scan)
        compute()
        assert pending.wait().item() == 10 * line.rank

    slow_scan(line)
    return timed(lambda: slow_scan(line)), timed(compute), timed(both)


def test_a_lane_overlaps_with_the_computation(pool: ProcessWorld) -> None:
    for scan, compute, both in pool.run(overlap)[:2]:
        assert both < 0.8 * (scan + compute), (scan, compute, both)


def lane_errors(axis: weft.Axis) -> str:
    group = dist.new_group(range(2))
    if axis.rank >= 2:
        return ""
    line = weft.Axis.of(group)
    pending = line.start(lambda lane: weft.exclusive_scan(torch.ones(2), group=lane))
    try:
        pending.wait()
    except ValueError as error:
        return str(error)
    return "no error"


def test_an_error_on_a_lane_is_raised_by_the_wait(pool: ProcessWorld) -> None:
    assert all("state must be [..., K, V]" in words for words in pool.run(lane_errors)[:2])
