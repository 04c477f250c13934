"""ring (LASP): the whole state goes from rank to rank."""

from __future__ import annotations

from torch import Tensor

from weft.comm import Axis
from weft.scan.affine import Affine
from weft.scan.pipeline import pipeline


def ring(axis: Axis, local: Affine, blocks: int | None) -> Tensor | None:
    """P-1 rounds of one state: a pipeline of a single block."""
    return pipeline(axis, local, blocks=1)
