"""How the parameters of a group lie on the ranks: read from DTensors, said by ``partition_dim``, told by the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.comm import Axis
from weft.ops.embedding import RowTable
from weft.optim.owners import Averaged, Replicated, Role, Sharded
from weft.optim.step.compare import gather_verdict
from weft.parallel.dtensor import is_dtensor, local_of, mesh_axes


@dataclass(frozen=True)
class Placement:
    """A parameter, seen as a matrix or a vector, over the ranks.

    ``whole`` is its shape, ``local`` that of this rank's part; ``roles[i]`` says how it lies on ``axes[i]``, each of
    more than one rank, in the order in which pieces are put together.
    """

    whole: tuple[int, ...]
    local: tuple[int, ...]
    axes: tuple[Axis, ...]
    roles: tuple[Role, ...]

    @property
    def whole_over(self) -> list[Axis]:
        """The axes on which it is the same, or averaged."""
        return [axis for axis, role in zip(self.axes, self.roles, strict=True) if not isinstance(role, Sharded)]


@dataclass(frozen=True)
class _Options:
    """What the ranks must have in common when a group is added."""

    dtypes: tuple[str, ...]
    dims: tuple[str, ...]
    settings: str


def find_parameter_fault(number: int, parameter: Tensor, group: dict[str, Any], rank: int) -> Exception | None:
    """What is wrong with a parameter, if anything."""
    shape, where = list(parameter.shape), f"(rank {rank})"
    dim = group["partition_dim"]
    if parameter.layout != torch.strided:
        return TypeError(f"REKLS: parameter {number} is {parameter.layout}, not dense {where}")
    if not parameter.is_floating_point():
        return TypeError(f"REKLS: parameter {number} is {parameter.dtype}; parameters must be floating point {where}")
    if isinstance(getattr(parameter, "row_table", None), RowTable):
        return TypeError(
            f"REKLS: parameter {number} is the table of a weft.ShardedEmbedding; step it with "
            f"weft.optim.RowAdam {where}"
        )
    if group["algorithm"] == "rekls" and parameter.ndim > 2 and not group["flatten"]:
        return ValueError(
            f"REKLS: parameter {number} has {parameter.ndim} dimensions {shape}; put it into a group with flatten=True "
            f"(a matrix of the first by all others) or algorithm='adamw' {where}"
        )
    if dim is not None and is_dtensor(parameter):
        return ValueError(
            f"REKLS: parameter {number} is a DTensor, whose placement is read from it; leave out partition_dim={dim} "
            f"{where}"
        )
    if dim is not None and dim >= parameter.ndim:
        return ValueError(f"REKLS: partition_dim={dim} is not a dimension of parameter {number} {shape} {where}")
    return None


def find_cut_fault(group: dict[str, Any], rank: int) -> Exception | None:
    """Where weights are whole on all ranks there are: whether a shard has none to be cut over."""
    if group["partition_dim"] is None:
        return None
    return ValueError(
        f"REKLS: partition_dim={group['partition_dim']} says that parameters are shards over group, but the only "
        f"ranks given are those of data_group, over which they are whole; pass both: group= the ranks that hold "
        f"the shards, data_group= those whose gradients are averaged (rank {rank})"
    )


def find_placements(
    parameters: Sequence[Tensor], group: dict[str, Any], tensor_axis: Axis, data_axis: Axis | None,
    fault: Exception | None,
) -> tuple[list[Placement], list[Axis]]:  # fmt: skip
    """Where each parameter lies, and all axes that anything lies on.

    Ranks tell the shapes they hold, once for each axis; ``fault`` is raised on all.
    """
    cuts: list[list[tuple[Axis, int | None]]] = []
    for number, parameter in enumerate(parameters):
        try:
            cuts.append(_cuts(number, parameter, group, tensor_axis))
        except NotImplementedError as error:
            fault, cuts = fault or error, cuts + [[]]
    shapes = [matrix_shape(local_of(parameter)) for parameter in parameters]
    found = [Placement(shape, shape, (), ()) for shape in shapes]
    axes = [] if data_axis is None or data_axis.size == 1 else [data_axis]
    if tensor_axis.size > 1 and not all(is_dtensor(parameter) for parameter in parameters):
        axes.append(tensor_axis)
    for number, (parameter, cut) in enumerate(zip(parameters, cuts, strict=True)):
        lies_on = [axis for axis, _ in (mesh_axes(parameter) if is_dtensor(parameter) else cut)]
        axes += [axis for axis in lies_on if axis.size > 1 and axis not in axes]
        if [axis for axis in axes if any(axis is own for own, _ in cut)] != [axis for axis, _ in cut]:
            fault = fault or NotImplementedError(
                f"REKLS: parameter {number} is cut along the axes of its mesh in another order than the parameters "
                f"before it; put it into an optimizer of its own (rank {tensor_axis.rank})"
            )
    options = _Options(
        tuple(f"{parameter.dtype} on {parameter.device.type}" for parameter in parameters),
        tuple(str([dim for _, dim in cut]) for cut in cuts),
        # What is at fault may not even be shown.
        ""
        if fault
        else str({name: group[name] for name in sorted(group) if name not in ("params", "param_names", "lr")}),
    )

    def merge(axis: Axis, told: list[tuple[int, ...]]) -> list[int]:
        numbers: list[int] = []
        for index, placement in enumerate(found):
            rows = [told[rank][2 * index : 2 * index + 2] for rank in range(axis.size)]
            role = _role(axis, data_axis, cuts[index])
            found[index] = _extend(index, placement, axis, role, rows)
            numbers += _pair(found[index].whole)
        return numbers

    numbers = [number for shape in shapes for number in _pair(shape)]
    gather_verdict(axes, "REKLS.add_param_group", options, numbers, merge, fault)
    return found, axes


def _role(axis: Axis, data_axis: Axis | None, cut: list[tuple[Axis, int | None]]) -> int | str | None:
    """How a parameter lies on an axis: cut along a dimension, "whole", "averaged"; None if it is not on this axis."""
    if axis is data_axis:
        return "averaged"
    for own, dim in cut:
        if own is axis:
            return "whole" if dim is None else dim
    return None


def _extend(
    number: int, placement: Placement, axis: Axis, role: int | str | None, rows: list[tuple[int, ...]]
) -> Placement:
    """The placement with one more axis, whose ranks hold matrices of the shapes ``rows``."""
    if role is None:
        return placement
    dim = role if isinstance(role, int) else None
    alike = [tuple(size for at, size in enumerate(row) if at != dim) for row in rows]
    if any(one != alike[0] for one in alike):
        kind = f"is cut along dimension {dim} over" if dim is not None else "must have one shape on all"
        shown = "; ".join(f"{list(row)} on rank {rank}" for rank, row in enumerate(rows))
        raise ValueError(f"REKLS: parameter {number} {kind} {axis.size} ranks, but is {shown}")
    whole = placement.whole
    new: Role = Averaged() if role == "averaged" else Replicated()
    if dim is not None:
        sizes = tuple(row[dim] for row in rows)
        whole = (*whole[:dim], sum(sizes), *whole[dim + 1 :])
        new = Sharded(dim, sizes)
    return Placement(whole, placement.local, (*placement.axes, axis), (*placement.roles, new))


def is_matrix(parameter: Tensor, group: dict[str, Any]) -> bool:
    """Whether a parameter has factors; the others are stepped by AdamW."""
    return parameter.ndim >= 2 and group["algorithm"] == "rekls"


def matrix_shape(local: Tensor) -> tuple[int, ...]:
    """A rank's part as a vector or a matrix: further dimensions are joined to the second."""
    if local.ndim < 2:
        return (local.numel(),)
    return local.shape[0], local.shape[1:].numel()


def _cuts(number: int, parameter: Tensor, group: dict[str, Any], tensor_axis: Axis) -> list[tuple[Axis, int | None]]:
    """The axes a parameter lies on, but for a data axis, and along which dimension it is cut on each."""
    if is_dtensor(parameter) and not is_matrix(parameter, group):
        return []  # every rank steps its own elements
    cuts = mesh_axes(parameter) if is_dtensor(parameter) else [(tensor_axis, group["partition_dim"])]
    if parameter.ndim > 2 and any(dim is not None and dim > 0 for _, dim in cuts):
        raise NotImplementedError(
            f"REKLS: parameter {number} {list(parameter.shape)} is flattened and cut along another dimension than the "
            f"first (rank {tensor_axis.rank}); shard it along dimension 0"
        )
    return [(axis, dim) for axis, dim in cuts if axis.size > 1]


def _pair(shape: tuple[int, ...]) -> list[int]:
    """A shape as two integers."""
    return [shape[0], shape[1] if len(shape) > 1 else 0]
