"""Mamba-1's selective scan over a sharded sequence: a recurrence of each channel around one scan of the states."""

from weft.ops.selective_scan.operation import selective_scan

__all__ = ["selective_scan"]
