"""Ulysses: heads exchanged for sequence, so that every rank attends over the whole sequence with some of the heads.

A rank's key/value heads go in parts, each with its query heads: while one part is computed, the next comes in and
the one before goes back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from weft.attention.geometry import Geometry, survey
from weft.attention.job import Job
from weft.attention.stage import Stage, Trip
from weft.attention.staged import Saved, Triple, backward_in_stages, forward_in_stages
from weft.attention.strides import choose_strides
from weft.comm import Axis, Pending
from weft.comm.wire import SoloWire


def forward_by_heads(
    job: Job, call: Axis, geometry: Geometry, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Saved]:
    """q, k and v become whole sequences of some heads; out (and lse, if asked for) goes back."""
    alone, whole = _alone(job, geometry)
    kept: list[Tensor] = []

    def compute(part: int, tensors: list[Tensor]) -> list[Pending[list[Tensor]]]:
        out, lse, saved = forward_in_stages(_own_only, job, alone, whole, *tensors)
        kept.extend(saved)
        going = [_to_tokens(call, geometry, [out])]
        return going + ([_to_tokens(call, geometry, [lse[..., None]])] if job.return_lse else [])

    out, *lse = _in_parts(call, geometry, [q, k, v], k.shape[2], compute)
    return out, lse[0][..., 0] if lse else out.new_empty(0), tuple(kept)


def backward_by_heads(job: Job, call: Axis, geometry: Geometry, saved: Saved, grad: Tensor) -> Triple:
    """The gradient of out comes in, those of q, k and v go back: whole sums already."""
    alone, whole = _alone(job, geometry)
    dtype = saved[0].dtype
    kv_heads = call.size * sum(keys.shape[2] for keys in saved[1::5])

    def compute(part: int, tensors: list[Tensor]) -> list[Pending[list[Tensor]]]:
        mine = saved[5 * part : 5 * part + 5]
        dq, dk, dv = backward_in_stages(_own_only, job, alone, whole, mine, *tensors)
        wire = job.grad_dtype or dtype
        return [
            _to_tokens(call, geometry, [dq.to(dtype)]),
            _to_tokens(call, geometry, [dk.to(wire), dv.to(wire)]),
        ]

    dq, dk, dv = _in_parts(call, geometry, [grad], kv_heads, compute)
    return dq, dk, dv


def _in_parts(
    call: Axis,
    geometry: Geometry,
    tensors: Sequence[Tensor],
    kv_heads: int,
    compute: Callable[[int, list[Tensor]], list[Pending[list[Tensor]]]],
) -> list[Tensor]:
    """Bring ``tensors`` in part by part, two ahead of ``compute``, and join what it sends back: ``[B, S, h, D]``."""
    width = kv_heads // call.size
    strides = choose_strides(width, width)  # from a single head on: nothing hides the first part and the last
    parts = [slice(end - stride, end) for end, stride in zip(accumulate(strides), strides, strict=True)]
    coming = [_to_heads(call, geometry, tensors, width, part) for part in parts[:2]]
    going: list[list[Pending[list[Tensor]]]] = []
    back: list[list[Tensor]] = []

    def take_back() -> None:
        back.append([tensor for pending in going[len(back)] for tensor in pending.wait()])

    for number in range(len(parts)):
        if number >= 2:
            take_back()  # messages are waited for in the order in which they were sent
        going.append(compute(number, coming[number].wait()))
        if number + 2 < len(parts):
            coming.append(_to_heads(call, geometry, tensors, width, parts[number + 2]))
    while len(back) < len(parts):
        take_back()
    return [torch.cat(pieces, dim=3).flatten(2, 3) for pieces in zip(*back, strict=True)]


def _to_heads(
    call: Axis, geometry: Geometry, tensors: Sequence[Tensor], width: int, part: slice
) -> Pending[list[Tensor]]:
    """Each ``[B, S, h, D]`` of all heads becomes ``[B, total, n, D]`` of a part of this rank's, in sequence order.

    All tensors travel together: one message a peer and run.
    """
    size, rank = call.size, call.rank
    cut = [x.unflatten(2, (size, width, -1))[:, :, :, part].flatten(3, 4) for x in tensors]
    # [P, S, B, heads of all tensors, D]: what each peer gets is contiguous
    parcels = torch.cat(cut, dim=3).permute(2, 1, 0, 3, 4).contiguous()
    whole = parcels.new_empty(sum(geometry.lengths), *parcels.shape[2:])
    outgoing, incoming = [], []
    for run in geometry.runs:
        place = whole[run.offset : run.offset + run.length]
        if run.rank != rank:
            incoming.append((run.rank, place))
            continue
        tokens = slice(run.start, run.start + run.length)
        place.copy_(parcels[rank, tokens])
        outgoing += [(peer, parcels[peer, tokens]) for peer in range(size) if peer != rank]
    pending = call.exchange(outgoing, incoming)

    def finish() -> list[Tensor]:
        pending.wait()
        return [x.transpose(0, 1) for x in whole.split([x.shape[3] for x in cut], dim=2)]

    return Pending(finish)


def _to_tokens(call: Axis, geometry: Geometry, tensors: Sequence[Tensor]) -> Pending[list[Tensor]]:
    """The way back: ``[B, total, n, D]`` of this rank's heads becomes ``[B, S, P, n, D]`` of its tokens."""
    size, rank = call.size, call.rank
    whole = torch.cat([x.transpose(0, 1) for x in tensors], dim=2).contiguous()
    parcels = whole.new_empty(size, geometry.lengths[rank], *whole.shape[1:])
    outgoing, incoming = [], []
    for run in geometry.runs:
        place = whole[run.offset : run.offset + run.length]
        if run.rank != rank:
            outgoing.append((run.rank, place))
            continue
        tokens = slice(run.start, run.start + run.length)
        parcels[rank, tokens] = place
        incoming += [(peer, parcels[peer, tokens]) for peer in range(size) if peer != rank]
    pending = call.exchange(outgoing, incoming)

    def finish() -> list[Tensor]:
        pending.wait()
        return [x.permute(2, 1, 0, 3, 4) for x in parcels.split([x.shape[2] for x in tensors], dim=3)]

    return Pending(finish)


def _own_only(trip: Trip) -> Iterator[Stage]:
    """The single stage of a rank that holds the whole sequence."""
    yield from trip.own(slice(0, trip.kv_heads))


def _alone(job: Job, geometry: Geometry) -> tuple[Axis, Geometry]:
    """A world of one, with the same sequence on it."""
    whole = survey((sum(geometry.lengths),), "contiguous", job.bounds, job.causal, job.window)
    return Axis.over(SoloWire()), whole
