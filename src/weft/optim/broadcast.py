"""`broadcast_parameters`: every rank gets one rank's weights, where they are to be the same."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm import Axis
from weft.comm.arguments import at, find_integer_fault, kind_of, read, show
from weft.comm.call import exchange_coalesced
from weft.ops.embedding import RowTable
from weft.parallel.dtensor import is_dtensor, local_of, shard_place


@dataclass(frozen=True)
class _Options:
    """What the ranks must have in common."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    devices: tuple[str, ...]
    source: int


@torch.no_grad()
def broadcast_parameters(
    module_or_parameters: nn.Module | Tensor | Iterable[Tensor], *, group: Any = None, source: int = 0
) -> None:
    """Give every rank of ``group`` the values that rank ``source`` of it has, in place, to the bit.

    Of a module all parameters and buffers; of tensors these. What is sharded over ``group`` stays as it is: DTensors
    (FSDP2, tensor parallel) on an axis that cuts them, and tables of `weft.ShardedEmbedding`. A DTensor of which all
    ranks of ``group`` have the same part (a data axis) is sent as other tensors are. A plain tensor is taken to be
    replicated: where it is a shard, pass the group of its replicas.

    Call it on all ranks, after the model is made and before the first step. One message goes to each rank.

    >>> broadcast_parameters(torch.nn.Linear(4, 3))          # nothing to do in a world of one
    """
    axis = Axis.of(group)
    found = read("broadcast_parameters", axis.rank, lambda: _read(module_or_parameters, source, axis))
    if isinstance(found, Exception):
        axis.refuse("broadcast_parameters", found, metadata=0)
    options, tensors = found
    call = axis.begin("broadcast_parameters", options, metadata=[])
    call.metadata.wait()
    shared = [local_of(one).detach() for one in _find_shared(tensors, axis)]
    filled = [one for one in shared if one.numel()]
    if not filled or axis.size == 1:
        return
    if axis.rank == source:
        packed = [one.contiguous() for one in filled]
        exchange_coalesced(call, [(rank, packed) for rank in call.others], []).wait()
        return
    received = [torch.empty_like(one, memory_format=torch.contiguous_format) for one in filled]
    exchange_coalesced(call, [], [(source, received)]).wait()
    for one, value in zip(filled, received, strict=True):
        one.copy_(value)


def _read(given: Any, source: int, axis: Axis) -> tuple[_Options, list[Tensor]] | Exception:
    """What the ranks must have in common, and each tensor once, without tables; or what is wrong."""
    name, rank = "broadcast_parameters", axis.rank
    if isinstance(given, nn.Module):
        given = [*given.parameters(), *given.buffers()]
    listed = [given] if isinstance(given, Tensor) else list(given) if isinstance(given, Iterable) else [given]
    for one in listed:
        if not isinstance(one, Tensor):
            return TypeError(f"{name}: takes a module, a tensor or tensors, not {kind_of(one)}{at(rank)}")
        if one.layout != torch.strided:
            return TypeError(f"{name}: takes dense tensors, got {show(one)} that is sparse{at(rank)}")
    if fault := find_integer_fault(name, "source", source, rank):
        return fault
    if not 0 <= source < axis.size:
        return ValueError(f"{name}: source {source} is not one of {axis.size} ranks{at(rank)}")
    found = {id(one): one for one in listed if not isinstance(getattr(one, "row_table", None), RowTable)}
    tensors = list(found.values())
    shapes, dtypes = (tuple(tuple(one.shape) for one in tensors), tuple(one.dtype for one in tensors))
    return _Options(shapes, dtypes, tuple(one.device.type for one in tensors), int(source)), tensors


def _find_shared(tensors: list[Tensor], axis: Axis) -> list[Tensor]:
    """Those of which all ranks hold the same part: the others are cut over the ranks of the axis."""
    cut = [one for one in tensors if is_dtensor(one)]
    if not cut:
        return tensors
    rows = axis.begin("broadcast_parameters.shards", metadata=[shard_place(one) for one in cut]).metadata.wait()
    left: set[int] = set()
    for one, column in zip(cut, zip(*rows, strict=True), strict=True):
        if len(set(column)) not in (1, axis.size):
            raise ValueError(
                f"broadcast_parameters: a DTensor {list(one.shape)} has {len(set(column))} different shards on the "
                f"{axis.size} ranks of group; pass the group of those ranks that have the same shard"
            )
        if len(set(column)) > 1:
            left.add(id(one))
    return [one for one in tensors if id(one) not in left]
