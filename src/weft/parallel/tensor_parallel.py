"""Weights cut over tensor-parallel ranks, by torch's ``parallelize_module``."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from weft.parallel.mesh import ParallelMesh, tensor_mesh


def cut_over_tensor_ranks(
    module: nn.Module, mesh: ParallelMesh, *, columns: Sequence[str], rows: Sequence[str], inputs: int
) -> None:
    """Cut linear layers of ``module`` by output (``columns``) and by input (``rows``), in place.

    The first of the ``inputs`` of the module's forward is the same on all tensor-parallel ranks, and so is what comes
    out. It is made a DTensor once, so that one all-reduce in the backward sums its gradient over all ``columns``.
    """
    if mesh.tensor.size == 1:
        return
    plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in columns}
    plan.update({name: RowwiseParallel() for name in rows})
    layouts = (Replicate(), *[None] * (inputs - 1))
    prepare = PrepareModuleInput(input_layouts=layouts, desired_input_layouts=layouts)
    parallelize_module(module, tensor_mesh(mesh), plan)
    parallelize_module(module, tensor_mesh(mesh), prepare)
