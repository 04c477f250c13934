"""Forward and backward over stages of keys, whoever brings them: what gather, ring and a single rank compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from weft.attention.block import attend_block, attend_block_backward
from weft.attention.geometry import Geometry
from weft.attention.job import Job
from weft.attention.merge import merge_into
from weft.attention.stage import Stage, Trip
from weft.attention.strides import choose_strides
from weft.comm import Axis

Supply = Callable[[Trip], Iterator[Stage]]
Triple = tuple[Tensor, Tensor, Tensor]
Saved = tuple[Tensor, ...]  # q, k, v, out, lse, of tokens or of heads


def attend(trip: Trip, supply: Supply, q: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(out, lse) ``[B, S, H, D]``, ``[B, S, H]`` of this rank's queries, at least in fp32, merged stage by stage."""
    out = torch.zeros_like(q, dtype=torch.promote_types(q.dtype, torch.float32))
    lse = out.new_full(q.shape[:3], -torch.inf)
    shared = q.shape[2] // trip.kv_heads
    untouched = True
    for stage in supply(trip):
        heads = slice(stage.heads.start * shared, stage.heads.stop * shared)
        for unit, blocks in trip.geometry.blocks(trip.rank, stage.held):
            rows = slice(unit.start, unit.start + unit.length)
            queries = q[:, rows, heads].transpose(1, 2)
            for number, block in enumerate(blocks):
                cut = slice(block.at, block.at + block.length)
                part, part_lse = attend_block(queries, stage.keys[:, :, cut], stage.values[:, :, cut], block, scale)
                part, part_lse = part.transpose(1, 2), part_lse.transpose(1, 2)
                if untouched and number == 0:
                    out[:, rows, heads], lse[:, rows, heads] = part, part_lse
                else:
                    merge_into(out[:, rows, heads], lse[:, rows, heads], part, part_lse)
        untouched = False
    return out, lse


def attend_backward(
    trip: Trip, supply: Supply, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, scale: float
) -> Tensor:
    """dq, at least in fp32; dk and dv of the own keys are summed in ``trip``."""
    dq = torch.zeros_like(q, dtype=lse.dtype)
    shared = q.shape[2] // trip.kv_heads
    for stage in supply(trip):
        assert stage.grad_keys is not None and stage.grad_values is not None
        heads = slice(stage.heads.start * shared, stage.heads.stop * shared)
        for unit, blocks in trip.geometry.blocks(trip.rank, stage.held):
            rows = slice(unit.start, unit.start + unit.length)
            mine = [x[:, rows, heads].transpose(1, 2) for x in (grad, q, out, lse)]
            for block in blocks:
                cut = slice(block.at, block.at + block.length)
                keys, values = stage.keys[:, :, cut], stage.values[:, :, cut]
                dq_part, dk, dv = attend_block_backward(mine[0], mine[1], keys, values, mine[2], mine[3], block, scale)
                dq[:, rows, heads].add_(dq_part.transpose(1, 2))
                stage.grad_keys[:, :, cut].add_(dk)
                stage.grad_values[:, :, cut].add_(dv)
    return dq


def forward_in_stages(
    supply: Supply, job: Job, call: Axis, geometry: Geometry, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Saved]:
    """out in the input's dtype, lse, and what the backward wants."""
    strides = job.strides or choose_strides(k.shape[2], call.size)
    trip = Trip(call, geometry, k, v, strides, grad_dtype=q.dtype, local_first=job.local_first)
    out, lse = attend(trip, supply, q, job.scale)
    out = out.to(q.dtype)
    return out, lse, (q, k, v, out, lse)


def backward_in_stages(supply: Supply, job: Job, call: Axis, geometry: Geometry, saved: Saved, grad: Tensor) -> Triple:
    """dq, dk and dv, at least in fp32."""
    q, k, v, out, lse = saved
    dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (k, v))
    strides = job.backward_strides or choose_strides(k.shape[2], call.size)
    trip = Trip(call, geometry, k, v, strides, job.grad_dtype or lse.dtype, dk, dv, job.local_first)
    dq = attend_backward(trip, supply, grad, q, out, lse, job.scale)
    return dq, dk, dv
