"""`clip_grad_norm_`: the global norm of gradients, with the rows of sharded tables counted once."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.comm import Axis
from weft.comm.arguments import find_flag_fault, find_number_fault, kind_of, read
from weft.comm.device import copy_to_device, outside_autocast
from weft.comm.rounds import gather_rows
from weft.ops.embedding import RowTable
from weft.optim.step.verdict import device_of
from weft.parallel.dtensor import is_dtensor, local_of, whole_of


@dataclass(frozen=True)
class _Options:
    """What the ranks must have in common."""

    max_norm: float
    norm_type: float
    tables: int


@torch.no_grad()
@outside_autocast()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale gradients so that their norm is at most ``max_norm``, as torch's does; returns the norm before.

    ``parameters`` may be replicated (their gradients already the same on every rank), DTensors, and weights of
    `weft.ShardedEmbedding`, of which each rank holds the gradients of its own rows: their norms are summed over the
    ranks, one scalar from each, for all tables of a group together. The norm is the same on every rank, to the bit.

    >>> x = torch.ones(4, requires_grad=True)
    >>> (3 * x).sum().backward()
    >>> clip_grad_norm_([x], 1.0)
    tensor(6.)
    """
    name, rank = "clip_grad_norm_", Axis.of(None).rank
    listed = read(name, rank, lambda: _list(parameters, rank))
    if isinstance(listed, Exception):  # whose ranks wait is not known: it is raised on those of WORLD
        Axis.of(None).publish_fault(name, listed)
        raise listed
    tables = [table for table in (getattr(one, "row_table", None) for one in listed) if isinstance(table, RowTable)]
    if fault := (
        find_number_fault(name, "max_norm", max_norm, rank, allow="infinite", tensor=True)
        or find_number_fault(name, "norm_type", norm_type, rank, allow="infinite")
        or find_flag_fault(name, "error_if_nonfinite", error_if_nonfinite, rank)
    ):
        axes = [axis for axis, _ in _by_axis(tables)]
        for axis in axes[1:]:
            axis.publish_fault(name, fault)
        if not axes:  # nothing is sent
            raise fault
        axes[0].refuse(name, fault)
    max_norm, norm_type = float(max_norm), float(norm_type)
    weights = {id(table.weight) for table in tables}
    plain = [one.grad for one in listed if id(one) not in weights and one.grad is not None]
    kinds = [[grad for grad in plain if is_dtensor(grad) == sharded] for sharded in (False, True)]
    norms = [whole_of(torch.nn.utils.get_total_norm(some, norm_type)) for some in kinds if some]
    norms += [_norm_over_ranks(axis, some, norm_type, max_norm) for axis, some in _by_axis(tables)]
    if not norms:
        return torch.tensor(0.0)
    device = device_of(norms)
    total = torch.linalg.vector_norm(torch.stack([copy_to_device(norm, device) for norm in norms]), norm_type)
    if error_if_nonfinite and not math.isfinite(total):
        raise RuntimeError(f"clip_grad_norm_: the norm of order {norm_type} of the gradients is {float(total)}")
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    rows = [found[1] for found in (table.gradient() for table in tables) if found is not None]
    for grad in (*map(local_of, plain), *rows):
        grad.mul_(scale)  # a scalar on its own device, which the host does not wait for
    return total


def _list(parameters: Any, rank: int) -> list[Tensor] | Exception:
    listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    for number, one in enumerate(listed):
        if not isinstance(one, Tensor):
            return TypeError(f"clip_grad_norm_: parameter {number} must be a tensor, got {kind_of(one)} (rank {rank})")
    return listed


def _by_axis(tables: list[RowTable]) -> list[tuple[Axis, list[RowTable]]]:
    """Tables of the same ranks together."""
    groups: dict[str, tuple[Axis, list[RowTable]]] = {}
    for table in tables:
        groups.setdefault(table.axis.counter.name, (table.axis, []))[1].append(table)
    return list(groups.values())


def _norm_over_ranks(axis: Axis, tables: list[RowTable], norm_type: float, max_norm: float) -> Tensor:
    """The norm of all ranks' rows, in fp64: everybody's part, combined in rank order."""
    parts = [torch.zeros((), dtype=torch.float64, device=tables[0].weight.device)]
    for table in tables:
        found = table.gradient()
        if found is not None:
            parts.append(torch.linalg.vector_norm(found[1], norm_type, dtype=torch.float64))
    mine = torch.linalg.vector_norm(torch.stack(parts), norm_type).view(1)
    call = axis.begin("clip_grad_norm_", _Options(max_norm, norm_type, len(tables)))
    return torch.linalg.vector_norm(gather_rows(call, mine).wait(), norm_type).to(tables[0].wide)
