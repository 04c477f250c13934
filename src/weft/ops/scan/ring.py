"""ring (LASP): the whole state goes from rank to rank."""

from __future__ import annotations

from torch import Tensor

from weft.comm.rounds import Path, Schedule
from weft.ops.scan.affine import Form
from weft.ops.scan.pipeline import pipeline


def ring(path: Path, form: Form) -> Schedule[Tensor | None]:
    """P-1 rounds of one state: a pipeline of a single block."""
    return pipeline(path, form, blocks=1)
