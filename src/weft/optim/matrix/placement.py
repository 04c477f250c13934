"""Where the parameters of a group lie on the ranks, and the matrices they are cut into.

Placements are read from DTensors, said by ``partition_dim``, and made of the shapes that ranks gather.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from weft.comm import Axis
from weft.optim.matrix.plan import Box, Placement, is_matrix
from weft.optim.owners import Averaged, Replicated, Role, Sharded
from weft.optim.step.compare import gather_verdict
from weft.parallel.dtensor import is_dtensor, local_of, mesh_axes

Cuts = list[tuple[Axis, int | None]]  # the axes a parameter lies on, and the dimension it is cut along on each


@dataclass(frozen=True)
class _Options:
    """What the ranks must have in common when a group is added."""

    dtypes: tuple[str, ...]
    dims: tuple[str, ...]
    settings: str


def find_placements(
    label: str, parameters: Sequence[Tensor], group: dict[str, Any], tensor_axis: Axis, data_axis: Axis | None,
    fault: Exception | None,
) -> tuple[list[Placement], list[Axis]]:  # fmt: skip
    """Where each parameter lies, and all axes that anything lies on.

    Ranks gather the shapes they hold, once for each axis; ``fault`` is raised on all.
    """
    all_cuts: list[Cuts] = []
    for number, parameter in enumerate(parameters):
        try:
            all_cuts.append(_cuts(label, number, parameter, group, tensor_axis))
        except NotImplementedError as error:
            fault, all_cuts = fault or error, all_cuts + [[]]
    shapes = [_viewed_shape(local_of(parameter), group) for parameter in parameters]
    found = [Placement(shape, shape) for shape in shapes]
    axes = [] if data_axis is None or data_axis.size == 1 else [data_axis]
    if tensor_axis.size > 1 and not all(is_dtensor(parameter) for parameter in parameters):
        axes.append(tensor_axis)
    for number, (parameter, cuts) in enumerate(zip(parameters, all_cuts, strict=True)):
        lies_on = [axis for axis, _ in (mesh_axes(parameter) if is_dtensor(parameter) else cuts)]
        axes += [axis for axis in lies_on if axis.size > 1 and axis not in axes]
        if [axis for axis in axes if any(axis is own for own, _ in cuts)] != [axis for axis, _ in cuts]:
            fault = fault or NotImplementedError(
                f"{label}: parameter {number} is cut along the axes of its mesh in another order than the parameters "
                f"before it; put it into an optimizer of its own (rank {tensor_axis.rank})"
            )
    settings = {name: group[name] for name in sorted(group) if name not in ("params", "param_names", "lr")}
    options = _Options(
        tuple(f"{parameter.dtype} on {parameter.device.type}" for parameter in parameters),
        tuple(str([dim for _, dim in cuts]) for cuts in all_cuts),
        "" if fault else str(settings),  # what is at fault may not even be shown
    )

    def merge(axis: Axis, gathered: list[tuple[int, ...]]) -> list[int]:
        for index, placement in enumerate(found):
            rows = [numbers[3 * index : 3 * index + 3] for numbers in gathered]
            dims = [dim for own, dim in all_cuts[index] if own is axis]
            if axis is data_axis:
                found[index] = _extend(label, index, placement, axis, Averaged(), None, rows)
            elif dims:
                found[index] = _extend(label, index, placement, axis, Replicated(), dims[0], rows)
        return [number for placement in found for number in _three(placement.whole)]

    numbers = [number for shape in shapes for number in _three(shape)]
    gather_verdict(axes, f"{label}.add_param_group", options, numbers, merge, fault)
    return found, axes


def _extend(
    label: str, number: int, placement: Placement, axis: Axis, role: Role, dim: int | None, rows: list[tuple[int, ...]]
) -> Placement:
    """The placement with one more axis, whose ranks hold matrices of the shapes ``rows``: cut along ``dim``, if any."""
    alike = [tuple(size for at, size in enumerate(row) if at != dim) for row in rows]
    if any(one != alike[0] for one in alike):
        kind = f"is cut along dimension {dim} over" if dim is not None else "must have one shape on all"
        shown = "; ".join(f"{list(row[: len(placement.whole)])} on rank {rank}" for rank, row in enumerate(rows))
        raise ValueError(f"{label}: parameter {number} {kind} {axis.size} ranks, but is {shown}")
    whole = placement.whole
    if dim is not None:
        role = Sharded(dim, tuple(row[dim] for row in rows))
        whole = (*whole[:dim], sum(role.sizes), *whole[dim + 1 :])
    return Placement(whole, placement.local, (*placement.axes, axis), (*placement.roles, role))


def _viewed_shape(local: Tensor, group: dict[str, Any]) -> tuple[int, ...]:
    """A rank's part as a vector, a matrix (further dimensions are joined to the second) or a stack of matrices."""
    if local.ndim < 2:
        return (local.numel(),)
    if local.ndim == 3 and group["stacked"]:
        return tuple(local.shape)
    return local.shape[0], local.shape[1:].numel()


def _cuts(label: str, number: int, parameter: Tensor, group: dict[str, Any], tensor_axis: Axis) -> Cuts:
    """Of a parameter; a data axis, on which it is whole, is not among them."""
    if is_dtensor(parameter) and not is_matrix(parameter, group):
        return []  # every rank steps its own elements
    cuts = mesh_axes(parameter) if is_dtensor(parameter) else [(tensor_axis, group["partition_dim"])]
    flattened = len(_viewed_shape(local_of(parameter), group)) < parameter.ndim
    if flattened and any(dim is not None and dim > 0 for _, dim in cuts):
        raise NotImplementedError(
            f"{label}: parameter {number} {list(parameter.shape)} is flattened and cut along another dimension than "
            f"the first (rank {tensor_axis.rank}); shard it along dimension 0"
        )
    return [(axis, dim) for axis, dim in cuts if axis.size > 1]


def _three(shape: tuple[int, ...]) -> list[int]:
    """A shape of at most three dimensions as three integers."""
    return [*shape, 0, 0][:3]


def find_boxes(label: str, number: int, placement: Placement, group: dict[str, Any]) -> list[Box]:
    """The matrices that a parameter is cut into, each as the ranges it has of the whole.

    ``split`` cuts rows, as those of fused weights; ``block_dim`` what is longer, into parts as equal as can be.
    """
    *stack, rows, columns = placement.whole
    split, longest = group["split"], group["block_dim"]
    sizes = [rows] if split is None else list(split) if isinstance(split, tuple | list) else [split] * (rows // split)
    if sum(sizes) != rows:
        raise ValueError(
            f"{label}: split={split} does not divide the {rows} rows of parameter {number} "
            f"{list(placement.whole)}; its parts must sum to them"
        )
    if 0 in stack or not sizes:
        raise ValueError(f"{label}: parameter {number} {list(placement.whole)} has nothing to be cut into matrices")
    ends = list(itertools.accumulate(sizes))
    row_ranges = [part for size, end in zip(sizes, ends, strict=True) for part in _ranges(end - size, end, longest)]
    return [
        (*((index, index + 1) for index in indices), row, column)
        for indices in itertools.product(*(range(size) for size in stack))
        for row in row_ranges
        for column in _ranges(0, columns, longest)
    ]


def _ranges(start: int, stop: int, longest: int | None) -> list[tuple[int, int]]:
    """A range in as few parts of at most ``longest`` as can be, their sizes different by one at most."""
    parts = 1 if longest is None else max(1, -(-(stop - start) // longest))
    edges = [start + (stop - start) * part // parts for part in range(parts + 1)]
    return list(itertools.pairwise(edges))
