"""The eigendecomposition of a factor."""

from __future__ import annotations

import torch
from torch import Tensor


class EigenError(RuntimeError):
    """A factor could not be decomposed, not in fp64 either."""


def decompose(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues ``[n]``, descending, and the eigenvectors ``[n, n]`` as columns of a symmetric matrix.

    One that fails is tried again in fp64. A zero matrix gets the basis that LAPACK gives it, without the work.
    """
    if not bool(factor.diagonal().any()):  # it has no negative eigenvalue, so then all of it is zero
        return factor.new_zeros(len(factor)), torch.eye(len(factor), dtype=factor.dtype, device=factor.device).flip(1)
    for dtype in (factor.dtype, torch.float64):
        try:
            values, vectors = torch.linalg.eigh(factor.to(dtype))
        except torch.linalg.LinAlgError:
            continue
        if bool(torch.isfinite(values).all()):
            return values.flip(0).to(factor.dtype), vectors.flip(1).to(factor.dtype)
    raise EigenError(f"a factor of {len(factor)} x {len(factor)} could not be decomposed")
