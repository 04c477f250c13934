"""weft: distributed training operations for PyTorch whose communication runs under the computation."""

from weft.comm import Axis, Machine, VirtualWorld, launch, record
from weft.scan import exclusive_scan

__all__ = ["Axis", "Machine", "VirtualWorld", "exclusive_scan", "launch", "record"]
__version__ = "0.1.0"
