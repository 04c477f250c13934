"""What `OverlappedStep` refuses, and in which words."""

from __future__ import annotations

from collections.abc import Sequence

from weft.comm.arguments import find_flag_fault, find_integer_fault, show
from weft.optim.step.group_faults import find_option_fault
from weft.optim.step.part import StepPart
from weft.optim.step.run import union_of_axes


def check_parts(
    parts: Sequence[StepPart], clip: float | None, bucket_bytes: int | None, overlap_backward: bool, on_nonfinite: str
) -> None:
    """What cannot be right, before anything is changed."""
    if not isinstance(parts, Sequence) or isinstance(parts, str):
        raise TypeError(f"OverlappedStep: parts must be a list of weft.optim.StepPart, got {show(parts)}")
    if not parts:
        raise ValueError("OverlappedStep: there are no parts")
    for part in parts:
        if not isinstance(part, StepPart):
            raise TypeError(
                f"OverlappedStep: {type(part).__name__} is no StepPart; parts are weft.optim.ShardedAdamW, REKLS, "
                f"weft.optim.RowAdam and classes that have the three verbs (docs/overlapped_step.md)"
            )
        if part.clips:
            raise ValueError(
                f"OverlappedStep: {type(part).__name__} has clip= of its own, which would count its gradients alone; "
                f"give clip= to OverlappedStep"
            )
    fault = find_option_fault("OverlappedStep", on_nonfinite, clip)
    fault = fault or find_flag_fault("OverlappedStep", "overlap_backward", overlap_backward, None)
    if bucket_bytes is not None:
        fault = fault or find_integer_fault("OverlappedStep", "bucket_bytes", bucket_bytes, None, least=1)
    if fault is not None:
        raise fault


def publish_fault(parts: object, error: Exception) -> None:
    """For ranks that go on: making buckets anew, or at the next step, they wait for this one."""
    given = parts if isinstance(parts, tuple | list) else ()
    for axis in union_of_axes([part for part in given if isinstance(part, StepPart)]):
        axis.publish_fault("OverlappedStep", error)
