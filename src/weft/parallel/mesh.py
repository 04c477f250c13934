"""A mesh of data x context x tensor parallel ranks: torch's DeviceMesh, its axes, and weights cut over it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from weft.comm.axis import Axis

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


def make_mesh(shape: tuple[int, int, int]) -> ParallelMesh:
    """The mesh of all ranks of WORLD, who must all ask; tensor-parallel neighbours are ranks next to each other."""
    if not dist.is_initialized():
        alone = Axis.of(None)
        return ParallelMesh(alone, alone, alone, alone, alone, None)
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(kind, shape, mesh_dim_names=NAMES)
    data, context, tensor = (Axis.of(mesh[name]) for name in NAMES)
    flat = mesh["dp", "cp"]._flatten("tokens")
    world = Axis.of(None)
    # Where they are the same ranks they are one axis: metadata is gathered once.
    tokens = world if shape[2] == 1 else Axis.of(flat)
    return ParallelMesh(data, context, tensor, tokens, world, mesh)


def token_mesh(mesh: ParallelMesh) -> DeviceMesh:
    """The 1-D mesh of the ranks that have other tokens than this one."""
    assert mesh.device_mesh is not None
    flat: Any = mesh.device_mesh["tokens"]
    return flat


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
