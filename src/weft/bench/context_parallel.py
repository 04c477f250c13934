"""What people use today for context-parallel softmax attention, written for the benchmark with weft's block kernels.

They differ from `weft.attention` only in what they send and when they wait, so the table compares schedules.

- ``strided``: all-gather by head strides on a contiguous layout. Everybody gets everything, the own keys are
  gathered with the rest, and nothing hides the first gather and the last reduction.
- ``ring``: whole blocks of keys and values go all the way round; in the backward their gradients go with them,
  one hop more, so that every rank adds to them in turn.
- ``local``: not a method: all keys are already here. The time no schedule can beat on this layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from weft.attention.geometry import Held, survey
from weft.attention.job import Job
from weft.attention.stage import Stage, Trip
from weft.attention.staged import Supply, backward_in_stages, forward_in_stages
from weft.comm import Axis, Pending
from weft.comm.layout import gather_lengths


class Baseline(torch.autograd.Function):
    """Causal attention with one of the supplies below."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, job: Job, supply: Supply) -> Tensor:
        call = job.axis.begin(supply.__name__, q=q.shape, layout=job.layout)
        geometry = survey(tuple(gather_lengths(call, q.shape[1], q.device)), job.layout, None, True, (-1, -1))
        out, _, saved = forward_in_stages(supply, job, call, geometry, q, k, v)
        ctx.save_for_backward(*saved)
        ctx.how = job, supply, geometry
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        job, supply, geometry = ctx.how
        call = job.axis.begin(f"{supply.__name__}.backward", q=grad.shape, layout=job.layout)
        dq, dk, dv = backward_in_stages(supply, job, call, geometry, ctx.saved_tensors, grad)
        return dq, dk, dv, None, None


def job_for(axis: Axis, layout: str, scale: float, strides: tuple[int, ...]) -> Job:
    """The options of a baseline: causal, dense, the same strides both ways."""
    return Job(axis, "gather", layout, True, (-1, -1), None, scale, strides, strides, None, None, False)


def _everything(trip: Trip) -> tuple[list[Held], list[int]]:
    """Where every rank's tokens lie in memory that holds all of them, and where each rank's begin."""
    begins = [0, *accumulate(trip.geometry.lengths)]
    held = [
        one
        for owner, length in enumerate(trip.geometry.lengths)
        for one in trip.geometry.place(owner, ((0, length),), begins[owner])
    ]
    return held, begins


def strided(trip: Trip) -> Iterator[Stage]:
    """All-gather a few heads, compute them; reduce their gradients while the next are computed."""
    held, begins = _everything(trip)
    ends = list(accumulate(trip.strides))
    steps = [slice(end - width, end) for end, width in zip(ends, trip.strides, strict=True)]
    mine = ((0, trip.k.shape[1]),)

    def fetch(heads: slice) -> tuple[Pending[None], Tensor]:
        width = heads.stop - heads.start
        kv = trip.shape(trip.room(begins[-1], width), begins[-1], width)
        own = trip.pack(trip.room(trip.k.shape[1], width), mine, heads)
        kv[begins[trip.rank] : begins[trip.rank + 1]] = own
        incoming = [(other, kv[begins[other] : begins[other + 1]]) for other in trip.others]
        return trip.call.exchange([(other, own) for other in trip.others], incoming), kv

    returning: tuple[Pending[None], list[Tensor], slice] | None = None
    coming = fetch(steps[0])
    for number, heads in enumerate(steps):
        pending, kv = coming
        pending.wait()
        if number + 1 < len(steps):
            coming = fetch(steps[number + 1])
        grads = torch.zeros_like(kv, dtype=trip.grad_dtype) if trip.is_backward else None
        yield trip.stage(kv, held, heads, grads)
        if grads is not None:
            if returning is not None:
                _add_up(trip, *returning)
            returning = *_give_back(trip, grads, begins), heads
    if returning is not None:
        _add_up(trip, *returning)


def _give_back(trip: Trip, grads: Tensor, begins: list[int]) -> tuple[Pending[None], list[Tensor]]:
    """Everybody's part of ``grads`` to everybody, also where the mask has left zeros."""
    own = grads[begins[trip.rank] : begins[trip.rank + 1]]
    boxes = [own if rank == trip.rank else torch.empty_like(own) for rank in range(trip.call.size)]
    outgoing = [(other, grads[begins[other] : begins[other + 1]]) for other in trip.others]
    return trip.call.exchange(outgoing, [(other, boxes[other]) for other in trip.others]), boxes


def _add_up(trip: Trip, pending: Pending[None], boxes: list[Tensor], heads: slice) -> None:
    pending.wait()
    for box in boxes:
        for index, total in enumerate((trip.dk, trip.dv)):
            assert total is not None
            total[:, :, heads].add_(box[:, index].movedim(0, 1))


def ring(trip: Trip) -> Iterator[Stage]:
    """Pass whole blocks on while the one before is computed; lengths must be equal."""
    size, rank, tokens = trip.call.size, trip.rank, trip.k.shape[1]
    heads, whole = slice(0, trip.kv_heads), ((0, tokens),)
    after, before = (rank + 1) % size, (rank - 1) % size
    kv = trip.pack(trip.room(tokens, trip.kv_heads), whole, heads)
    grads: Tensor | None = None
    arriving: tuple[Pending[None], Tensor] | None = None
    for hop in range(size):
        owner = (rank - hop) % size
        if hop + 1 < size:
            box = torch.empty_like(kv)
            flying = trip.call.exchange([(after, kv)], [(before, box)])
        own = torch.zeros_like(kv, dtype=trip.grad_dtype) if trip.is_backward else None
        yield trip.stage(kv, trip.geometry.place(owner, whole), heads, own)
        if own is not None:
            if arriving is not None:
                arriving[0].wait()
                own += arriving[1]
            grads = torch.empty_like(own)
            arriving = trip.call.exchange([(after, own)], [(before, grads)]), grads
        if hop + 1 < size:
            flying.wait()
            kv = box
    if arriving is not None:  # the sums are back at their owner
        _add_up(trip, arriving[0], [arriving[1]], heads)


def local(trip: Trip) -> Iterator[Stage]:
    """All keys at once, and nothing sent: what stands in for the others' is this rank's own."""
    held, begins = _everything(trip)
    heads = slice(0, trip.kv_heads)
    kv = trip.shape(trip.room(begins[-1], trip.kv_heads), begins[-1], trip.kv_heads)
    for begin, end in pairwise(begins):
        trip.pack(kv[begin:end].view(-1), ((0, min(end - begin, trip.k.shape[1])),), heads)
    grads = torch.zeros_like(kv, dtype=trip.grad_dtype) if trip.is_backward else None
    yield trip.stage(kv, held, heads, grads)
