"""Short causal convolutions over a sharded sequence: each channel over the last few tokens of its document."""

from weft.ops.short_conv.operation import short_conv

__all__ = ["short_conv"]
