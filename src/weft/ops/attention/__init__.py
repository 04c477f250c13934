"""Softmax attention over a sharded sequence: gather by head strides, ring and ulysses."""

from weft.ops.attention.gather import head_strides
from weft.ops.attention.operation import attention

__all__ = ["attention", "head_strides"]
