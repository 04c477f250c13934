"""How real ranks meet: a store of this machine for local processes, or the one that torchrun has made."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from weft.comm.axis import Axis


def open_store(port: int = 0, timeout: timedelta = dist.default_pg_timeout) -> Any:
    """A rendezvous store of this machine: the server on a free port, or with ``port`` a client of it."""
    if port:
        return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@contextmanager
def gloo_world(store: Any, rank: int, size: int, timeout: timedelta) -> Iterator[Axis]:
    """WORLD of local Gloo processes that share ``store``."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    try:
        yield Axis.of(None)
    finally:
        dist.destroy_process_group()


@contextmanager
def joined_world(timeout: timedelta | None = None) -> Iterator[Axis | None]:
    """The world torchrun has made for this process (``RANK`` and ``WORLD_SIZE`` are set), or None without one.

    ``timeout``: of its waits; None for torch's default.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield None
        return
    if dist.is_initialized():
        yield Axis.of(None)
        return
    if torch.cuda.is_available():  # not run: no GPU where this was written
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device, timeout=timeout, **_rendezvous(timeout))
    else:
        dist.init_process_group("gloo", timeout=timeout, **_rendezvous(timeout))
    try:
        yield Axis.of(None)
    finally:
        dist.destroy_process_group()


def _rendezvous(timeout: timedelta | None) -> dict[str, Any]:
    """Where ranks that torchrun has started again meet: apart from the addresses that their earlier lives left there.

    torch 2.13 keeps one store over all restarts, and Gloo then tries to connect to ranks that are gone.
    """
    life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if life == "0":
        return {}
    store, rank, size = next(dist.rendezvous("env://", timeout=timeout or dist.default_pg_timeout))
    return {"store": dist.PrefixStore(f"life {life}", store), "rank": rank, "world_size": size}
