"""Timing over ranks: everybody starts together, the slowest rank counts, cases take turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

from weft.comm import Axis

Case = Callable[[], object]


def line_up(axis: Axis) -> None:
    """Return when every rank has arrived: log2(P) rounds of one byte."""
    token, step = torch.zeros(1, dtype=torch.uint8), 1
    while step < axis.size:
        ahead, behind = (axis.rank + step) % axis.size, (axis.rank - step) % axis.size
        axis.exchange([(ahead, token)], [(behind, torch.empty_like(token))]).wait()
        step *= 2


def take_turns(axis: Axis, cases: Mapping[str, Case], calls: int = 1) -> dict[str, float]:
    """Seconds a call of each case on this rank, one sample each, in an order that is the same on every rank."""
    seconds = {}
    for name, case in cases.items():
        line_up(axis)
        start = time.perf_counter()
        for _ in range(calls):
            case()
        seconds[name] = (time.perf_counter() - start) / calls
    return seconds


def slowest(samples: list[dict[str, float]]) -> dict[str, float]:
    """One sample of all ranks: the time of the rank that took longest."""
    return {name: max(sample[name] for sample in samples) for name in samples[0]}
