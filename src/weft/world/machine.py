"""The few numbers a simulated machine is made of."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.world.virtual import VirtualWorld


@dataclass(frozen=True)
class Machine:
    """What a message and a local operator cost in a virtual world.

    latency: seconds a message is on its way, whatever its size (a delay, not an occupation of the link).
    bandwidth: bytes/s at which a sender's link is taken; messages of one rank leave one after the other.
    flops: FLOP/s of local matrix products. memory_bandwidth: bytes/s read and written by local operators.
    An operator takes the longer of its two costs. inf means free.

    >>> Machine(latency=5e-6, bandwidth=25e9).message_seconds(25_000)
    1e-06
    """

    latency: float
    bandwidth: float
    flops: float = math.inf
    memory_bandwidth: float = math.inf

    def __post_init__(self) -> None:
        if not 0 <= self.latency < math.inf:
            raise ValueError(f"Machine: latency must be a finite number of seconds >= 0, got {self.latency}")
        for name in ("bandwidth", "flops", "memory_bandwidth"):
            if not getattr(self, name) > 0:
                raise ValueError(f"Machine: {name} must be > 0 a second (inf = free), got {getattr(self, name)}")

    def message_seconds(self, size: int) -> float:
        """How long a message of ``size`` bytes takes the sender's link."""
        return size / self.bandwidth

    def operator_seconds(self, flops: float, size: int) -> float:
        """How long a local operator of ``flops`` that touches ``size`` bytes takes."""
        return max(flops / self.flops, size / self.memory_bandwidth)

    def world(self, size: int) -> VirtualWorld:
        """A virtual world of ``size`` ranks of this machine, on an ideal network."""
        from weft.world.virtual import VirtualWorld  # it is made of machines

        return VirtualWorld(size, self)

    @property
    def counts_operators(self) -> bool:
        return self.flops < math.inf or self.memory_bandwidth < math.inf


# One GPU of a cluster, by what its vendor says: dense tf32 products, which is what weft's Triton kernels take, memory
# bandwidth, and a network link of its own (200, 400 and 400 Gbit/s) with 10 us of delay.
PRESETS = {
    "a100": Machine(latency=10e-6, bandwidth=25e9, flops=156e12, memory_bandwidth=2.0e12),
    "h100": Machine(latency=10e-6, bandwidth=50e9, flops=495e12, memory_bandwidth=3.35e12),
    "b200": Machine(latency=10e-6, bandwidth=50e9, flops=1100e12, memory_bandwidth=8.0e12),
}
