"""A simulated accelerator on a CPU-only torch: ``torch.device("sim")``, with CUDA's streams, allocator and host syncs.

    from weft.world import simulated
    simulated.install()                       # once for each process; there is no way back
    x = torch.ones(3, device="sim")           # a real tensor of another device, over CPU memory

A tensor on it is not on the CPU: what mixes devices raises, what the host reads is counted, and what would be a race
between streams or memory given back too early is reported, with both places. Every rank of a virtual world has streams
and a host of its own (`Rank`, `enter_rank`). Nothing happens when this is imported.

It stands on private names of torch, so it fits one release of it (`misfit`). Not simulated: generators of the device,
resizing a storage (a tensor can be), more than one device for each rank, graphs (but for what must not happen while
one is captured), and the time anything takes.
In a backward, a node waits for all nodes before it, where the engine lets it wait only for those it needs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from weft.world.simulated import streams
from weft.world.simulated.autocast import install_autocast
from weft.world.simulated.backward import DeviceGuard, follow_forward
from weft.world.simulated.device_module import make_device_module
from weft.world.simulated.flash import install_flash
from weft.world.simulated.host_watch import WatchHost
from weft.world.simulated.memory import DEVICE_TYPE, host_alias
from weft.world.simulated.messages import Communicator, Work
from weft.world.simulated.operators import install_operators
from weft.world.simulated.pinned import install_pinned
from weft.world.simulated.places import SimulatedDeviceError, collect_reports, reports
from weft.world.simulated.streams import (
    Event,
    Rank,
    Stream,
    capturing,
    current_rank,
    current_stream,
    enter_rank,
    inside_rank,
    no_host_sync,
)
from weft.world.simulated.torch_parts import install_parts

__all__ = [
    "TORCH", "Communicator", "Event", "Rank", "SimulatedDeviceError", "Stream", "WatchHost", "Work",
    "capturing", "collect_reports", "current_rank", "current_stream", "enter_rank", "fits", "host_alias",
    "inside_rank", "install", "misfit", "no_host_sync", "reports",
]  # fmt: skip

TORCH = "2.13.0"
_kept: list[Any] = []  # registrations last as long as their libraries do


def misfit() -> str | None:
    """Why the simulated device cannot be had with this torch; None if it can."""
    if torch.__version__.partition("+")[0] != TORCH:
        return f"the simulated device fits torch {TORCH}, and this is {torch.__version__}"
    if torch.cuda.is_available():
        return "the simulated device is for a torch without an accelerator, and CUDA is available"
    if not _kept and torch._C._get_privateuse1_backend_name() not in ("privateuseone", "sim"):
        return f"torch has another device of this kind already: {torch._C._get_privateuse1_backend_name()}"
    return None


def fits() -> bool:
    """Whether the simulated device can be had with this torch."""
    return misfit() is None


def install(whole_process: bool = False) -> None:
    """Make ``torch.device("sim")``, in this process and for good. A second call does nothing.

    Threads that enter a `Rank` find it available as their accelerator, others only with ``whole_process``.
    """
    if whole_process:
        streams.whole_process.append(True)
    if _kept:
        return
    if (reason := misfit()) is not None:
        raise RuntimeError(reason)
    _setup_privateuseone_for_python_backend(DEVICE_TYPE, make_device_module(), device_guard=DeviceGuard())
    everything, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    _kept.extend((everything, aten))
    install_operators(aten, everything)
    install_flash()
    install_pinned(aten)
    install_parts(aten)
    install_autocast(aten, everything)
    graph: Any = torch.autograd.graph
    run = follow_forward(graph._engine_run_backward)
    graph._engine_run_backward = torch.autograd._engine_run_backward = run
