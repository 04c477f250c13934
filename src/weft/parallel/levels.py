"""Ranks on two levels: *inner* ranks, who are neighbours among all, and *outer* ones, one of each group of inner ranks.

They are given as a 2-D mesh (outer, inner) or as (all ranks, inner ranks), where each of the two is what `Axis.of`
takes. Rank outer * inner ranks + inner of all is rank ``inner`` of group ``outer``, as in a flattened mesh.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from weft.comm.arguments import show
from weft.comm.axis import Axis


def all_ranks(group: Any) -> Any:
    """The group of all ranks of two levels; ``group`` itself, if it is something else.

    A mesh is flattened, which makes a process group the first time; then all ranks of its root mesh must ask.
    """
    if _is_mesh(group):
        if group.mesh_dim_names is None:
            raise ValueError(
                "Axis.of: a mesh cannot be flattened without names; make it with mesh_dim_names, for example "
                "('outer', 'inner') (raised on this rank alone)"
            )
        return group._flatten()
    return group[0] if _is_pair(group) else group


def count_inner_ranks(operation: str, axis: Axis, group: Any) -> int | Exception:
    """How many inner ranks a group of ``axis`` has; or what is wrong. Nobody has to give any in a world of one."""
    if group is None and axis.size == 1:
        return 1
    where, held = f"(rank {axis.rank})", _numbers(axis)
    if not _is_mesh(group) and not _is_pair(group):
        return ValueError(
            f"{operation}: a method on two levels needs a group of two: a 2-D DeviceMesh (outer, inner), or "
            f"(all ranks, inner ranks); got {show(group)} {where}"
        )
    given = group.mesh.flatten().tolist() if _is_mesh(group) else _numbers(Axis.of(group[0]))
    if given != held:
        return ValueError(
            f"{operation}: group has the ranks {show(given)}, but the sequence lies on {show(held)}; it must lie on "
            f"all ranks of the group, in their order {where}"
        )
    inner = _numbers(Axis.of(group.get_group(1) if _is_mesh(group) else group[1]))
    begin = axis.rank // len(inner) * len(inner)
    if axis.size % len(inner) or inner != held[begin : begin + len(inner)]:
        return ValueError(
            f"{operation}: the ranks {show(inner)} cannot be inner ranks of {show(held)}; they must be neighbours "
            f"there, and as many in each group {where}"
        )
    return len(inner)


def _is_mesh(group: Any) -> bool:
    return isinstance(group, DeviceMesh) and group.ndim == 2


def _is_pair(group: Any) -> bool:
    return isinstance(group, tuple) and len(group) == 2


def _numbers(axis: Axis) -> list[int]:
    """Of the ranks of an axis in the whole world."""
    return [axis.wire.numbers[member] for member in axis.members]
