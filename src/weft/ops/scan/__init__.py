"""The exclusive scan of affine maps over the ranks of an axis."""

from weft.ops.scan.affine import Affine, Form, Kind
from weft.ops.scan.methods import METHODS, choose, schedule
from weft.ops.scan.prefix import exclusive_scan

__all__ = ["METHODS", "Affine", "Form", "Kind", "choose", "exclusive_scan", "schedule"]
