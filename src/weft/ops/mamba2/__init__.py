"""Mamba-2's scan over a sharded sequence: linear attention whose values and gates come from time steps."""

from weft.ops.mamba2.operation import mamba2

__all__ = ["mamba2"]
