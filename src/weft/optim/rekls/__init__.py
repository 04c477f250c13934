"""REKLS: one eigendecomposition for each factor, one owner for each matrix, any placement."""

from weft.optim.rekls.optimizer import REKLS

__all__ = ["REKLS"]
