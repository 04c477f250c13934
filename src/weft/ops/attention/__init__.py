"""Softmax attention over a sharded sequence: gather by head strides, ring and ulysses."""

from weft.ops.attention.operation import attention
from weft.ops.attention.strides import head_strides

__all__ = ["attention", "head_strides"]
