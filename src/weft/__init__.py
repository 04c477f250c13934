"""weft: distributed training operations for PyTorch whose communication runs under the computation."""

from weft.attention import attention, head_strides
from weft.comm import Axis, Machine, VirtualWorld, launch, record, shard, unshard
from weft.linear_attention import linear_attention
from weft.scan import exclusive_scan

__all__ = [
    "Axis",
    "Machine",
    "VirtualWorld",
    "attention",
    "exclusive_scan",
    "head_strides",
    "launch",
    "linear_attention",
    "record",
    "shard",
    "unshard",
]
__version__ = "0.1.0"
