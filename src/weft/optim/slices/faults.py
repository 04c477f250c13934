"""What `ShardedAdamW` refuses, and in which words."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from weft.ops.embedding import RowTable
from weft.optim.step.compare import join_faults
from weft.optim.step.part import find_kind_fault, find_listed_twice, first_group_fault
from weft.parallel.dtensor import is_dtensor


def find_group_fault(group: dict[str, Any]) -> Exception | None:
    """What is wrong with the numbers of a parameter group, if anything."""
    if fault := find_kind_fault("ShardedAdamW", group, "eps", "weight_decay"):
        return fault
    lr, (b1, b2) = float(group["lr"]), group["betas"]
    if not all(0 <= value < float("inf") for value in (lr, group["eps"], group["weight_decay"])):
        return ValueError(
            f"ShardedAdamW: lr, eps and weight_decay must be finite and not negative, got {lr}, {group['eps']} and "
            f"{group['weight_decay']}"
        )
    if not (0 <= b1 < 1 and 0 <= b2 < 1):
        return ValueError(f"ShardedAdamW: betas must be in [0, 1), got ({b1}, {b2})")
    return None


def find_parameter_fault(number: int, parameter: Tensor, rank: int) -> Exception | None:
    """What is wrong with a parameter, if anything."""
    if is_dtensor(parameter):
        return TypeError(
            f"ShardedAdamW: parameter {number} is a DTensor (FSDP2, tensor parallel): its state is sharded as it "
            f"is; use torch.optim.AdamW, or weft.optim.REKLS with algorithm='adamw' (rank {rank})"
        )
    if isinstance(getattr(parameter, "row_table", None), RowTable):
        return TypeError(
            f"ShardedAdamW: parameter {number} is the table of a weft.ShardedEmbedding; step it with "
            f"weft.optim.RowAdam (rank {rank})"
        )
    if parameter.layout != torch.strided:
        return TypeError(f"ShardedAdamW: parameter {number} is {parameter.layout}, not dense (rank {rank})")
    if not parameter.is_floating_point():
        return TypeError(f"ShardedAdamW: parameter {number} is {parameter.dtype}, not floating point (rank {rank})")
    return None


@dataclass(frozen=True)
class Added:
    """What the ranks must have in common when parameters are added."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    devices: tuple[str, ...]  # their types
    bucket_bytes: int


def read_parameters(
    groups: Sequence[dict[str, Any]], parameters: Sequence[Tensor], bucket_bytes: int, rank: int
) -> Added | Exception:
    """Of parameters that are added to the last of ``groups``: what the ranks must share, or all that is wrong."""
    fault = join_faults([
        first_group_fault("ShardedAdamW", groups, find_group_fault, rank),
        *(find_listed_twice("ShardedAdamW", group["params"], rank) for group in groups),
        *(find_parameter_fault(number, parameter, rank) for number, parameter in enumerate(parameters)),
    ])  # fmt: skip
    return fault or Added(
        tuple(tuple(parameter.shape) for parameter in parameters),
        tuple(parameter.dtype for parameter in parameters),
        tuple(parameter.device.type for parameter in parameters),
        bucket_bytes,
    )


def find_wrapper_fault(names: Mapping[Tensor, str], rank: int) -> Exception | None:
    """Whether a DistributedDataParallel averages the gradients of one of the parameters.

    torch leaves no trace of it on a parameter, so its live instances are asked.
    """
    kinds: list[type] = [DistributedDataParallel]
    for kind in kinds:
        kinds += kind.__subclasses__()
        wrappers: list[Any] = [thing for thing in gc.get_referrers(kind) if type(thing) is kind]
        for wrapper in wrappers:
            for name, parameter in wrapper.module.named_parameters():
                if parameter in names and name not in wrapper.parameters_to_ignore:
                    return ValueError(
                        f"ShardedAdamW: {names[parameter]} is in a DistributedDataParallel, which averages its "
                        f"gradients already; leave the wrapper out (rank {rank})"
                    )
    return None
