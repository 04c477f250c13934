"""What people use today for sequence-parallel linear attention, written for the benchmark with weft's own kernels.

The three differ from `weft.linear_attention` only in what they send and when they wait, so the table compares
schedules and not kernels. One dense contiguous sequence, a scalar gate, no initial state.

- ``lasp``: the ring receives the state before it computes anything, then sends on.
- ``lasp2``: every rank's map to every rank, waited for, then everything local.
- ``zeco``: the chain in blocks, started after the local state and waited for after the intra-chunk work.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.comm import Axis, Call
from weft.comm.schedule import Path, ScheduleExecutor
from weft.ops.linear_attention.distributed import BACKWARD, FORWARD
from weft.ops.scan import Affine, Form, schedule
from weft.ops.scan.gather import fold

CHUNK = 64


@dataclass(frozen=True)
class Options:
    """What the ranks must have in common."""

    v: torch.Size


class Baseline(torch.autograd.Function):
    """Linear attention by one of the schedules above."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, axis: Axis, name: str, blocks: int, backend: str
    ) -> Tensor:
        call = axis.begin(name, Options(v.shape))
        if name == "lasp":
            entering = _receive(call, q, v)
        kernel = FORWARD[backend](q, k, v, g, q.shape[-1] ** -0.5, [q.shape[1]], CHUNK)
        entering = _travel(call, kernel, name, blocks, entering if name == "lasp" else None)
        out, _ = kernel.finish(entering)
        ctx.save_for_backward(q, k, v, g, entering)
        ctx.how = axis, name, blocks, backend
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, g, entering = ctx.saved_tensors
        axis, name, blocks, backend = ctx.how
        call = axis.begin(f"{name}.backward", Options(v.shape)).reversed()
        if name == "lasp":
            arrived = _receive(call, q, v)
        scale, lengths = q.shape[-1] ** -0.5, [q.shape[1]]
        kernel = BACKWARD[backend](q, k, v, g, scale, lengths, CHUNK, entering, grad)
        arrived = _travel(call, kernel, name, blocks, arrived if name == "lasp" else None)
        dq, dk, dv, dg, _ = kernel.finish(arrived)
        return dq, dk, dv, dg, None, None, None, None


def fla(module: str, name: str) -> Callable[..., Any] | None:
    """An operation of flash-linear-attention, if that is installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return None


def _receive(call: Call, q: Tensor, v: Tensor) -> Tensor | None:
    """LASP: what comes from the rank before, before anything else."""
    if call.rank == 0:
        return None
    state = q.new_empty(q.shape[0], v.shape[2], q.shape[3], v.shape[3], dtype=torch.float32)
    call.receive(state, call.rank - 1).wait()
    return state


def _travel(call: Call, kernel: Any, name: str, blocks: int, arrived: Tensor | None) -> Tensor | None:
    """Send this rank's map its way and do the intra-chunk work; returns the state that enters."""
    log, state = kernel.maps
    own, form = Affine.of(state, log), Form.of(state, log)
    if name == "zeco":
        path = Path.along(call)
        chain = ScheduleExecutor(call, [(path, schedule("pipeline", path, form, blocks))])
        pending = call.start(lambda lane: chain.run(lane, [own]), state.device)
        kernel.intra()
        return pending.wait()[0]
    if name == "lasp":
        if call.rank + 1 < call.size:
            call.send(own.apply(arrived), call.rank + 1).wait()
        kernel.intra()
        return arrived
    maps = torch.stack(call.all_gather(own.flat).wait())
    kernel.intra()
    return fold(maps[: call.rank], form) if call.rank else None
