"""torch's own data parallelism over the ranks of an axis: for the trainer, and what benchmarks compare with."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from weft.comm.axis import Axis
from weft.comm.dist import DistWire
from weft.parallel.mesh import ParallelMesh, token_mesh


def axis_of_ranks(ranks: Sequence[int]) -> Axis:
    """The axis of a new process group of some ranks of WORLD, who must all ask; the others need not."""
    return Axis.of(dist.new_group(list(ranks), use_local_synchronization=True))


def wrap_with_ddp(axis: Axis, module: nn.Module) -> nn.Module:
    """``module`` in a DistributedDataParallel, its gradients in the memory that is all-reduced."""
    return DistributedDataParallel(module, process_group=_group(axis), gradient_as_bucket_view=True)


def wrap_with_ddp_beside_tables(axis: Axis, module: nn.Module, tables: Sequence[str]) -> nn.Module:
    """``module`` in a DistributedDataParallel that leaves the sharded ``tables``, by name, alone."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, list(tables))
    return DistributedDataParallel(module, process_group=_group(axis))


def wrap_with_fsdp2(
    mesh: ParallelMesh, module: nn.Module, blocks: Sequence[nn.Module], tables: Sequence[Tensor]
) -> None:
    """Shard the weights of ``module`` over the ranks that have other tokens, each of ``blocks`` together, in place."""
    for part in (*blocks, module):
        fully_shard(part, mesh=token_mesh(mesh), ignored_params=set(tables))  # type: ignore[arg-type]


def make_zero_adamw(axis: Axis, parameters: Iterable[Tensor], **options: Any) -> torch.optim.Optimizer:
    """``torch.optim.AdamW`` in a ZeroRedundancyOptimizer: whole parameters have owners."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # importing it compiles with torch.jit.script
        from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, process_group=_group(axis), **options)


def _group(axis: Axis) -> dist.ProcessGroup:
    assert isinstance(axis.wire, DistWire), "only processes have torch's data parallelism"
    return axis.wire.group
