"""The exclusive scan of affine maps over the ranks of an axis."""

from weft.scan.affine import Affine, Form
from weft.scan.methods import METHODS, choose, schedule
from weft.scan.prefix import exclusive_scan

__all__ = ["METHODS", "Affine", "Form", "choose", "exclusive_scan", "schedule"]
