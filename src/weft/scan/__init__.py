"""The exclusive scan of affine maps over the ranks of an axis."""

from weft.scan.affine import Affine
from weft.scan.methods import METHODS
from weft.scan.prefix import exclusive_scan

__all__ = ["METHODS", "Affine", "exclusive_scan"]
