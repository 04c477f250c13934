"""Timelines of operations in virtual time."""

from __future__ import annotations

import torch

from weft.comm import Axis
from weft.ops.scan import exclusive_scan
from weft.world import Machine, VirtualWorld, WorldRun


def trace_scan(machine: Machine, ranks: int, method: str, shape: tuple[int, ...]) -> WorldRun[None]:
    """One scan of meta states of ``shape``, with a scalar decay, on ``ranks`` virtual ranks."""

    def program(axis: Axis) -> None:
        state, log = torch.empty(shape, device="meta"), torch.empty(shape[:-2], device="meta")
        exclusive_scan(state, log_decay=log, group=axis, method=method)

    return VirtualWorld(ranks, machine).run(program)
