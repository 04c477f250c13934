"""The table of schedules. A new one is a file with one function and a line here."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from weft.comm import Axis
from weft.scan.affine import Affine
from weft.scan.doubling import doubling
from weft.scan.gather import gather
from weft.scan.pipeline import pipeline
from weft.scan.ring import ring
from weft.scan.transpose import transpose
from weft.scan.tree import tree

# (axis, this rank's map, blocks) -> the state entering this rank, None for zero
Schedule = Callable[[Axis, Affine, int | None], Tensor | None]

METHODS: dict[str, Schedule] = {
    "ring": ring,
    "gather": gather,
    "pipeline": pipeline,
    "tree": tree,
    "doubling": doubling,
    "transpose": transpose,
}
