"""Linear attention over a sharded sequence: local chunk kernels around one scan of the state."""

from weft.ops.linear_attention.operation import linear_attention

__all__ = ["linear_attention"]
