"""What people use today for sequence-parallel linear attention, written for the benchmark with weft's own kernels.

The three differ from `weft.linear_attention` only in what they send and when they wait, so the table compares
schedules and not kernels. One dense contiguous sequence, a scalar gate, no initial state.

- ``lasp``: the ring receives the state before it computes anything, then sends on.
- ``lasp2``: every rank's map to every rank, waited for, then everything local.
- ``zeco``: the chain in blocks, started after the local state and waited for after the intra-chunk work.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.comm import Axis
from weft.linear_attention.chunk import Backward, Forward
from weft.scan.affine import Affine
from weft.scan.gather import fold
from weft.scan.pipeline import pipeline

CHUNK = 64


class Baseline(torch.autograd.Function):
    """Linear attention by one of the schedules above."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, axis: Axis, schedule: str, blocks: int) -> Tensor:
        call = axis.begin(schedule, v=v.shape)
        if schedule == "lasp":
            entering = _receive(call, q, v)
        kernel = Forward(q, k, v, g, q.shape[-1] ** -0.5, [q.shape[1]], CHUNK)
        entering = _travel(call, kernel, schedule, blocks, entering if schedule == "lasp" else None)
        out, _ = kernel.finish(entering)
        ctx.save_for_backward(q, k, v, g, entering)
        ctx.how = axis, schedule, blocks
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, g, entering = ctx.saved_tensors
        axis, schedule, blocks = ctx.how
        call = axis.begin(f"{schedule}.backward", v=v.shape).reversed()
        if schedule == "lasp":
            arrived = _receive(call, q, v)
        kernel = Backward(q, k, v, g, q.shape[-1] ** -0.5, [q.shape[1]], CHUNK, entering, grad)
        arrived = _travel(call, kernel, schedule, blocks, arrived if schedule == "lasp" else None)
        dq, dk, dv, dg, _ = kernel.finish(arrived)
        return dq, dk, dv, dg, None, None, None


def _receive(call: Axis, q: Tensor, v: Tensor) -> Tensor | None:
    """LASP: what comes from the rank before, before anything else."""
    if call.rank == 0:
        return None
    state = q.new_empty(q.shape[0], v.shape[2], q.shape[3], v.shape[3], dtype=torch.float32)
    call.receive(state, call.rank - 1).wait()
    return state


def _travel(
    call: Axis, kernel: Forward | Backward, schedule: str, blocks: int, arrived: Tensor | None
) -> Tensor | None:
    """Send this rank's map its way and do the intra-chunk work; returns the state that enters."""
    log, state = kernel.maps
    own = Affine.of(state, log)
    if schedule == "zeco":
        pending = call.start(lambda lane: pipeline(lane, own, blocks))
        kernel.intra()
        return pending.wait()
    if schedule == "lasp":
        if call.rank + 1 < call.size:
            call.send(own.apply(arrived), call.rank + 1).wait()
        kernel.intra()
        return arrived
    maps = own.flat.new_empty(call.size, own.flat.numel())
    maps[call.rank] = own.flat
    others = [rank for rank in range(call.size) if rank != call.rank]
    call.exchange([(rank, own.flat) for rank in others], [(rank, maps[rank]) for rank in others]).wait()
    kernel.intra()
    return fold(maps[: call.rank], own) if call.rank else None
