"""What `OverlappedStep` refuses, and in which words."""

from __future__ import annotations

from collections.abc import Sequence

from weft.optim.part import ON_NONFINITE, StepPart


def check_parts(parts: Sequence[StepPart], clip: float | None, bucket_bytes: int | None, on_nonfinite: str) -> None:
    """What cannot be right, before anything is changed."""
    if not parts:
        raise ValueError("OverlappedStep: there are no parts")
    for part in parts:
        if not isinstance(part, StepPart):
            raise TypeError(
                f"OverlappedStep: {type(part).__name__} is no weft.StepPart; parts are weft.ShardedAdamW, weft.REKLS, "
                f"weft.RowAdam and classes that have the three verbs (docs/overlapped_step.md)"
            )
        if part.clips:
            raise ValueError(
                f"OverlappedStep: {type(part).__name__} has clip= of its own, which would count its gradients alone; "
                f"give clip= to OverlappedStep"
            )
    if clip is not None and not clip > 0:
        raise ValueError(f"OverlappedStep: clip must be > 0, got {clip}")
    if bucket_bytes is not None and bucket_bytes < 1:
        raise ValueError(f"OverlappedStep: bucket_bytes must be > 0, got {bucket_bytes}")
    if on_nonfinite not in ON_NONFINITE:
        raise ValueError(f"OverlappedStep: on_nonfinite {on_nonfinite!r} is not one of {', '.join(ON_NONFINITE)}")
