"""A mesh of data x context x tensor parallel ranks: torch's DeviceMesh, its axes, weights cut over it, wrappers.

DistributedDataParallel, FSDP2 and ZeroRedundancyOptimizer are for the trainer, and what benchmarks compare with.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from weft.comm.axis import Axis
from weft.comm.dist import DistWire

NAMES = ("dp", "cp", "tp")


@dataclass(frozen=True)
class ParallelMesh:
    """How the ranks of a training run stand to each other, seen from one of them.

    | axis       | ranks that differ in it have                              |
    |------------|-----------------------------------------------------------|
    | `data`     | other sequences                                           |
    | `context`  | other tokens of the same sequences                        |
    | `tensor`   | other heads and columns, for the same tokens              |
    | `tokens`   | other tokens: data and context together                   |
    | `world`    | anything                                                  |

    ``device_mesh`` is None in a world of one, where nothing is initialised.
    """

    data: Axis
    context: Axis
    tensor: Axis
    tokens: Axis
    world: Axis
    device_mesh: DeviceMesh | None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Ranks along data, context and tensor."""
        return self.data.size, self.context.size, self.tensor.size

    def __str__(self) -> str:
        return " x ".join(f"{name} {size}" for name, size in zip(NAMES, self.shape, strict=True))


def make_mesh(shape: tuple[int, int, int], device: str = "cpu") -> ParallelMesh:
    """The mesh of all ranks of WORLD, who must all ask; tensor-parallel neighbours are ranks next to each other.

    ``device``: the kind that its tensors lie on.
    """
    if not dist.is_initialized():
        alone = Axis.of(None)
        return ParallelMesh(alone, alone, alone, alone, alone, None)
    mesh = init_device_mesh(device, shape, mesh_dim_names=NAMES)
    data, context, tensor = (Axis.of(mesh[name]) for name in NAMES)
    flat = mesh["dp", "cp"]._flatten("tokens")
    world = Axis.of(None)
    # Where they are the same ranks they are one axis: metadata is gathered once.
    tokens = world if shape[2] == 1 else Axis.of(flat)
    return ParallelMesh(data, context, tensor, tokens, world, mesh)


def cut_over_tensor_ranks(
    module: nn.Module, mesh: ParallelMesh, *, columns: Sequence[str], rows: Sequence[str], inputs: int
) -> None:
    """Cut linear layers of ``module`` by output (``columns``) and by input (``rows``), in place.

    The first of the ``inputs`` of the module's forward is the same on all tensor-parallel ranks, and so is what comes
    out. It is made a DTensor once, so that one all-reduce in the backward sums its gradient over all ``columns``.
    """
    if mesh.tensor.size == 1:
        return
    assert mesh.device_mesh is not None
    tensor_mesh = mesh.device_mesh["tp"]
    plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in columns}
    plan.update({name: RowwiseParallel() for name in rows})
    layouts = (Replicate(), *[None] * (inputs - 1))
    prepare = PrepareModuleInput(input_layouts=layouts, desired_input_layouts=layouts)
    parallelize_module(module, tensor_mesh, plan)
    parallelize_module(module, tensor_mesh, prepare)


def rows_of_tensor_rank(mesh: ParallelMesh, weight: Tensor) -> Tensor:
    """This tensor rank's rows of a ``weight`` that is whole on every rank, for what is cut by heads.

    All have the whole gradient: in the backward the ranks' rows of it are gathered.
    """
    if mesh.tensor.size == 1:
        return weight
    assert mesh.device_mesh is not None
    whole = DTensor.from_local(weight, mesh.device_mesh["tp"], [Replicate()], run_check=False)
    return whole.redistribute(placements=[Shard(0)]).to_local()


def axis_of_ranks(ranks: Sequence[int]) -> Axis:
    """The axis of a new process group of some ranks of WORLD, who must all ask; the others need not."""
    return Axis.of(dist.new_group(list(ranks), use_local_synchronization=True))


def wrap_with_ddp(axis: Axis, module: nn.Module, tables: Sequence[str] = ()) -> nn.Module:
    """``module`` in a DistributedDataParallel that leaves the sharded ``tables``, by name, alone.

    Without tables gradients lie in the memory that is all-reduced.
    """
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, list(tables))
    return DistributedDataParallel(module, process_group=_group(axis), gradient_as_bucket_view=not tables)


def wrap_with_fsdp2(
    mesh: ParallelMesh, module: nn.Module, blocks: Sequence[nn.Module], tables: Sequence[Tensor]
) -> None:
    """Shard the weights of ``module`` over the ranks that have other tokens, each of ``blocks`` together, in place."""
    assert mesh.device_mesh is not None
    for part in (*blocks, module):
        fully_shard(part, mesh=mesh.device_mesh["tokens"], ignored_params=set(tables))  # type: ignore[arg-type]


def make_zero_adamw(axis: Axis, parameters: Iterable[Tensor], **options: Any) -> torch.optim.Optimizer:
    """``torch.optim.AdamW`` in a ZeroRedundancyOptimizer: whole parameters have owners."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # importing it compiles with torch.jit.script
        from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, process_group=_group(axis), **options)


def _group(axis: Axis) -> dist.ProcessGroup:
    assert isinstance(axis.wire, DistWire), "only processes have torch's data parallelism"
    return axis.wire.group
