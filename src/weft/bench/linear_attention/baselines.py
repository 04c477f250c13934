"""What people use today for sequence-parallel linear attention, written for the benchmark with weft's own kernels.

The three differ from `weft.linear_attention` only in what they send and when they wait, so the table compares
schedules and not kernels. A contiguous layout, a scalar gate, no initial state; ``lasp2`` takes packed documents too.

- ``lasp``: the ring receives the state before it computes anything, then sends on.
- ``lasp2``: every rank's map to every rank, waited for, then everything local.
- ``zeco``: the chain in blocks, started after the local state and waited for after the intra-chunk work.
"""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from weft.comm import Axis, Call
from weft.comm.rounds import Path, ScheduleExecutor
from weft.ops.linear_attention.operation import BACKWARD, FORWARD
from weft.ops.scan import Affine, Form, schedule
from weft.ops.scan.gather import fold
from weft.ops.sequence import Sequence

CHUNK = 64


@dataclass(frozen=True)
class Segments:
    """The documents on a rank: tokens of each, and whether the first and the last go on beyond the rank."""

    lengths: tuple[int, ...]
    enters: bool
    leaves: bool

    @staticmethod
    def of(where: Sequence) -> Segments:
        """Those of this rank.

        >>> Segments.of(Sequence(Axis.of(None), "contiguous", (5,), (0, 2, 5)))
        Segments(lengths=(2, 3), enters=False, leaves=False)
        """
        assert where.layout == "contiguous", "a rank's tokens are one run"
        begin = sum(where.lengths[: where.axis.rank])
        end = begin + where.length
        bounds = where.bounds or (0, where.total)
        mine = [(low, high) for low, high in pairwise(bounds) if low < end and high > begin]
        lengths = tuple(min(high, end) - max(low, begin) for low, high in mine)
        return Segments(lengths, mine[0][0] < begin, mine[-1][1] > end)


@dataclass(frozen=True)
class How:
    """A schedule above for the documents on this rank, the scale of queries, a kernel, and the blocks of ``zeco``."""

    schedule: str
    here: Segments
    scale: float
    backend: str = "torch"
    blocks: int = 1


@dataclass(frozen=True)
class Options:
    """What the ranks must have in common."""

    heads: tuple[int, ...]
    dtype: torch.dtype


class Baseline(torch.autograd.Function):
    """Linear attention by one of the schedules above."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, axis: Axis, how: How) -> Tensor:
        call = axis.begin(how.schedule, Options(tuple(v.shape[2:]), v.dtype))
        arrived = _receive(call, q, v) if how.schedule == "lasp" else None
        kernel = FORWARD[how.backend](q, k, v, g, how.scale, list(how.here.lengths), CHUNK)
        entering = _send_maps(call, kernel, how, arrived)
        out, _ = kernel.finish(entering)
        ctx.save_for_backward(q, k, v, g, entering)
        ctx.how = axis, how
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, g, entering = ctx.saved_tensors
        axis, how = ctx.how
        call = axis.begin(f"{how.schedule}.backward", Options(tuple(v.shape[2:]), v.dtype)).reversed()
        arrived = _receive(call, q, v) if how.schedule == "lasp" else None
        kernel = BACKWARD[how.backend](q, k, v, g, how.scale, list(how.here.lengths), CHUNK, entering, grad)
        dq, dk, dv, dg, _ = kernel.finish(_send_maps(call, kernel, how, arrived, backward=True))
        return dq, dk, dv, dg, None, None


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


def _send_maps(call: Call, kernel: Any, how: How, arrived: Tensor | None, backward: bool = False) -> Tensor | None:
    """Send this rank's map its way and do the intra-chunk work; returns the state that enters."""
    log, state = kernel.maps
    if how.schedule == "lasp2":
        # Seen from the end of the sequence a rank's documents come in the opposite order.
        many = backward and len(state) > 1
        maps = (None if log is None else log.flip(0), state.flip(0)) if many else (log, state)
        arrived = _gather(call, maps, how.here.leaves if backward else how.here.enters)
        kernel.intra()
        return arrived.flip(0) if many and arrived is not None else arrived
    own, form = Affine.of(state, log), Form.of(state, log)
    if how.schedule == "zeco":
        path = Path.along(call)
        chain = ScheduleExecutor(call, [(path, schedule("pipeline", path, form, how.blocks))])
        pending = call.start(lambda lane: chain.run(lane, [own]), state.device)
        kernel.intra()
        return pending.wait()[0]
    if call.rank + 1 < call.size:
        call.send(own.apply(arrived), call.rank + 1).wait()
    kernel.intra()
    return arrived


def _gather(call: Call, maps: tuple[Tensor | None, Tensor], enters: bool) -> Tensor | None:
    """What arrives in each of a rank's segments ``[N, H, K, V]``, from everybody's map; waited for at once.

    ``maps``: (log decay ``[N, H]``, state) of the segments in the order of the call's ranks. The last one is sent, also
    if its document ends here: then nobody takes it, and it goes no further. What leaves a rank depends on what enters
    it only where one document goes all the way through.
    """
    log, state = maps
    assert log is not None
    through = len(state) == 1 and enters
    own = Affine.of(state[-1:], log[-1:] if through else torch.full_like(log[-1:], -math.inf))
    everybody = torch.stack(call.all_gather(own.flat).wait())
    if not enters:
        return None
    arrived = fold(everybody[: call.rank], Form.of(own.state, own.decay))
    return torch.cat([arrived, torch.zeros_like(state[1:])]) if len(state) > 1 else arrived
