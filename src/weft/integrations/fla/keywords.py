"""What fla's functions have in common: boundaries, states, keywords that are refused, and who is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor

from weft.comm.arguments import find_flag_fault, find_tensor_fault, read, show
from weft.ops.sequence.layout import DTYPES, read_on_axis

T = TypeVar("T")
# What to do in place of a keyword that is refused.
INSTEAD = {
    "cp_context": "pass group=, layout= or sequence= of weft",
    "chunk_indices": "leave it out: chunks are found from cu_seqlens",
    "seq_idx": "pass cu_seqlens, of the whole sequence",
    "head_first": "tensors are [B, T, H, ...]",
    "transpose_state_layout": "it is now state_v_first",
}


def prepare(name: str, operation: str, group: Any, sequence: Any, preparing: Callable[[int], T | Exception]) -> T:
    """What ``preparing(rank)`` makes of fla's arguments for weft's ``operation``; a fault is raised on all ranks."""
    _, found = read_on_axis(
        operation, group, sequence, lambda axis: read(name, axis.rank, lambda: preparing(axis.rank))
    )
    return found


def find_refused(name: str, rank: int, given: Mapping[str, Any]) -> Exception | None:
    """The error for the first keyword that was given; None and False are what fla has where they are not."""
    for keyword, value in given.items():
        if value is not None and value is not False:
            instead = INSTEAD.get(keyword, "leave it out")
            return NotImplementedError(
                f"{name}: {keyword}={show(value)} is not supported over ranks (rank {rank}); {instead}"
            )
    return None


def find_wrong_flag(name: str, rank: int, flags: Mapping[str, Any]) -> Exception | None:
    """The error for the first of ``flags`` that is neither True nor False."""
    return next((fault for flag in flags if (fault := find_flag_fault(name, flag, flags[flag], rank))), None)


def find_wrong_tensor(
    name: str, rank: int, tensors: Mapping[str, Any], optional: Mapping[str, Any] | None = None
) -> Exception | None:
    """The error for the first of ``tensors`` that is none; they are changed before weft's operation looks at them."""
    given = {**tensors, **{label: value for label, value in (optional or {}).items() if value is not None}}
    wrong = (find_tensor_fault(name, label, given[label], rank, DTYPES, "a floating tensor") for label in given)
    return next((fault for fault in wrong if fault), None)


def read_boundaries(name: str, rank: int, cu_seqlens: Any, on_cpu: Any) -> tuple[Any] | Exception:
    """The boundaries, from the host's copy if there is one."""
    if on_cpu is not None and cu_seqlens is None:
        return ValueError(f"{name}: cu_seqlens_cpu is a copy of cu_seqlens, which is missing (rank {rank})")
    return (cu_seqlens if on_cpu is None else on_cpu,)


def turn(state: Tensor | None, v_first: bool) -> Tensor | None:
    """A state from [K, V] to [V, K] or back, if it is stored so."""
    return state if state is None or not v_first else state.mT.contiguous()
