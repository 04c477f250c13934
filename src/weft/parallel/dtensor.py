"""DTensors: how they lie on axes, and rows of an axis as the DTensor that checkpoints understand."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from weft.comm.axis import Axis
from weft.comm.dist import DistWire

_meshes: weakref.WeakKeyDictionary[Any, DeviceMesh] = weakref.WeakKeyDictionary()
_groups: weakref.WeakValueDictionary[tuple[int, ...], Any] = weakref.WeakValueDictionary()  # of meshes, by ranks


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


def local_of(value: Tensor) -> Tensor:
    """This rank's part of a DTensor, in the same memory; any other tensor itself. Without gradients."""
    return value.to_local() if isinstance(value, DTensor) else value


def like_parameter(parameter: Tensor, local: Tensor) -> Tensor:
    """``local`` as the DTensor that lies as ``parameter`` does."""
    assert isinstance(parameter, DTensor)
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
    )


def local_gradient(parameter: Tensor) -> Tensor:
    """This rank's part of the gradient, laid as the parameter is: torch leaves some gradients as sums still to be made.

    All ranks of a DTensor must ask.
    """
    grad = parameter.grad
    assert grad is not None
    if isinstance(parameter, DTensor):
        assert isinstance(grad, DTensor)
        if grad.placements != parameter.placements:
            grad = grad.redistribute(placements=parameter.placements)
    return local_of(grad)


def local_part(value: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part of ``value``, a DTensor that lies as ``parameter`` does, or a whole tensor of its shape."""
    assert isinstance(parameter, DTensor)
    if isinstance(value, DTensor) and (value.device_mesh, value.placements) == (
        parameter.device_mesh,
        parameter.placements,
    ):
        return value.to_local()
    return distribute_tensor(
        whole_of(value), parameter.device_mesh, parameter.placements, src_data_rank=None
    ).to_local()


def shard_place(value: Tensor) -> int:
    """Which shard of a DTensor this rank has, as a number; 0 of a whole one, and of any other tensor."""
    if not isinstance(value, DTensor):
        return 0
    mesh, place = value.device_mesh, 0
    for index, placement in enumerate(value.placements):
        if not isinstance(placement, Replicate):
            place = place * mesh.size(index) + mesh.get_local_rank(index)
    return place


def _axis_of(mesh: DeviceMesh, index: int) -> Axis:
    """The axis of a dimension of a mesh, one and the same for the same ranks.

    torch takes equal meshes for one: of DTensors that are made on a second mesh over the same ranks, those whose shape
    the first has seen lie on the first.
    """
    group = mesh.get_group(index)
    return Axis.of(_groups.setdefault(tuple(dist.get_process_group_ranks(group)), group))


def mesh_axes(parameter: Tensor) -> list[tuple[Axis, int | None]]:
    """The mesh axes of a DTensor with the dimension it is cut along on each, None where it is whole.

    They stand in the order in which pieces are put together: where a dimension is cut along two axes, the finer cut
    first. That is the later axis, unless torch says otherwise by a strided shard: FSDP2 cuts what tensor parallelism
    has cut already, and stands first in the mesh.
    """
    assert isinstance(parameter, DTensor)
    found: list[tuple[Axis, int | None]] = []
    strided = False
    for index, placement in enumerate(parameter.placements):
        dim = getattr(placement, "dim", None)
        if dim is None and not isinstance(placement, Replicate):
            raise NotImplementedError(f"a parameter with the placement {placement} on its mesh is not supported")
        strided |= type(placement).__name__ == "_StridedShard"
        found.append((_axis_of(parameter.device_mesh, index), dim))
    dims = [dim for _, dim in found if dim is not None]
    return found if strided or len(set(dims)) == len(dims) else found[::-1]
