"""`clip_grad_norm_`: the global norm of gradients, with the rows of sharded tables counted once."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.comm import Axis
from weft.comm.autocast import outside_autocast
from weft.comm.dtensor import is_dtensor, whole_of
from weft.embedding import RowTable


@dataclass(frozen=True)
class _Options:
    """What the ranks must have in common."""

    norm_type: float
    tables: int


@torch.no_grad()
@outside_autocast()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
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
    listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    tables = [table for table in (getattr(one, "row_table", None) for one in listed) if isinstance(table, RowTable)]
    weights = {id(table.weight) for table in tables}
    plain = [one.grad for one in listed if id(one) not in weights and one.grad is not None]
    kinds = [[grad for grad in plain if is_dtensor(grad) == sharded] for sharded in (False, True)]
    norms = [whole_of(torch.nn.utils.get_total_norm(some, norm_type)) for some in kinds if some]
    norms += [_norm_over_ranks(axis, some, norm_type) for axis, some in _by_axis(tables)]
    if not norms:
        return torch.tensor(0.0)
    total = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type)
    if error_if_nonfinite and not math.isfinite(total):
        raise RuntimeError(f"clip_grad_norm_: the norm of order {norm_type} of the gradients is {float(total)}")
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for grad in plain:
        grad.mul_(float(scale))
    for table in tables:
        found = table.gradient()
        if found is not None:
            found[1].mul_(float(scale))
    return total


def _by_axis(tables: list[RowTable]) -> list[tuple[Axis, list[RowTable]]]:
    """Tables of the same ranks together."""
    groups: dict[str, tuple[Axis, list[RowTable]]] = {}
    for table in tables:
        groups.setdefault(table.axis.counter.name, (table.axis, []))[1].append(table)
    return list(groups.values())


def _norm_over_ranks(axis: Axis, tables: list[RowTable], norm_type: float) -> Tensor:
    """The norm of all ranks' rows, in fp64: everybody's part, combined in rank order."""
    parts = [torch.zeros((), dtype=torch.float64, device=tables[0].weight.device)]
    for table in tables:
        found = table.gradient()
        if found is not None:
            parts.append(torch.linalg.vector_norm(found[1], norm_type, dtype=torch.float64))
    mine = torch.linalg.vector_norm(torch.stack(parts), norm_type).view(1)
    call = axis.begin("clip_grad_norm_", _Options(norm_type, len(tables)))
    return torch.linalg.vector_norm(torch.cat(call.all_gather(mine).wait()), norm_type).to(tables[0].wide)
