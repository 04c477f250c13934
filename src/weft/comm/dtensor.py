"""Rows that lie on the ranks of an axis one after the other, as the DTensor that checkpoints understand."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from weft.comm.axis import Axis
from weft.comm.dist import DistWire

_meshes: weakref.WeakKeyDictionary[Any, DeviceMesh] = weakref.WeakKeyDictionary()


def has_process_group(axis: Axis) -> bool:
    """Whether the axis is a process group of torch.distributed, whose ranks a DTensor can lie on."""
    return isinstance(axis.wire, DistWire) and list(axis.members) == list(range(axis.wire.size))


def as_dtensor(axis: Axis, mine: Tensor, rows: int) -> Tensor:
    """``mine`` as this rank's part of ``rows`` rows, of which each rank has ceil(rows/P) as far as they go."""
    assert isinstance(axis.wire, DistWire)
    group = axis.wire.group
    if group not in _meshes:
        _meshes[group] = DeviceMesh.from_group(group, mine.device.type)
    shape = torch.Size((rows, *mine.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(mine, _meshes[group], [Shard(0)], run_check=False, shape=shape, stride=stride)


def rows_here(axis: Axis, value: Tensor) -> Tensor | None:
    """This rank's part of a DTensor made by `as_dtensor` for the same ranks; None of any other tensor."""
    if not isinstance(value, DTensor) or value.placements != (Shard(0),) or not has_process_group(axis):
        return None
    assert isinstance(axis.wire, DistWire)
    mesh = value.device_mesh
    same = mesh.ndim == 1 and mesh.size() == axis.size and mesh.get_group() is axis.wire.group
    return value.to_local() if same else None


def is_dtensor(value: Tensor) -> bool:
    """Whether a tensor lies on the ranks of a mesh."""
    return isinstance(value, DTensor)


def whole_of(value: Tensor) -> Tensor:
    """All rows. Of a DTensor: they are gathered from its ranks, who must all ask."""
    return value.full_tensor() if isinstance(value, DTensor) else value
