"""How real ranks meet: a store on the loopback of this machine for local processes, or the one torchrun has made."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from weft.comm.axis import Axis
from weft.comm.device import choose_device, runs_behind

_HOST = "127.0.0.1"
_VARIABLE = "WEFT_LOCAL_RANK"


def open_store(port: int = 0, timeout: timedelta = dist.default_pg_timeout) -> Any:
    """A rendezvous store of this machine: the server on a free port, or with ``port`` a client of it.

    Left to itself, torch's server listens on every address of the host; this one is given a socket of the loopback.
    """
    if port:
        return dist.TCPStore(_HOST, port, is_master=False, timeout=timeout)
    listener = socket.create_server((_HOST, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(_HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def loopback_settings() -> dict[str, str]:
    """Environment of local ranks: Gloo and NCCL listen on the loopback, whatever the user's says of other hosts."""
    name = "lo0" if sys.platform == "darwin" else "lo"
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}


@contextmanager
def gloo_world(store: Any, rank: int, size: int, timeout: timedelta) -> Iterator[Axis]:
    """WORLD of local Gloo processes that share ``store``."""
    os.environ.update(loopback_settings())
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    try:
        yield Axis.of(None)
    finally:
        dist.destroy_process_group()


def device_of_rank(name: str = "auto") -> torch.device:
    """What this process computes on, by its number among those of its machine: see `choose_device`."""
    number, ranks = os.environ.get("LOCAL_RANK", "0"), os.environ.get("LOCAL_WORLD_SIZE", "1")
    return choose_device(name, int(number), int(ranks))


@contextmanager
def joined_world(timeout: timedelta | None = None, device: str = "auto") -> Iterator[Axis | None]:
    """The world made for this process, by torchrun or by weft (``RANK`` and ``WORLD_SIZE`` are set), or None.

    ``timeout``: of its waits; None for torch's default. ``device``: see `device_of_rank`. Integers travel over Gloo,
    and what lies on an accelerator over what torch has for it: NCCL, XCCL.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield None
        return
    if dist.is_initialized():
        yield Axis.of(None)
        return
    local = LocalRank.of_environment()
    if local is not None:
        local.follow_parent()
        os.environ.update(loopback_settings())
    where = _rendezvous(timeout, local)
    mine = device_of_rank(device)
    if runs_behind(mine):  # not run: no GPU where this was written
        backend = dist.get_default_backend_for_device(mine)
        dist.init_process_group(f"cpu:gloo,{mine.type}:{backend}", device_id=mine, timeout=timeout, **where)
    else:
        dist.init_process_group("gloo", timeout=timeout, **where)
    try:
        if local is not None:
            local.say_joined()
        yield Axis.of(None)
    except Exception as error:
        if local is not None:
            local.note_failure(error)
        raise
    finally:
        dist.destroy_process_group()


def _rendezvous(timeout: timedelta | None, local: LocalRank | None) -> dict[str, Any]:
    """Where ranks meet: at the store of the process that started them, or where torchrun says.

    Ranks that torchrun has started again meet apart from the addresses that their earlier lives left there: torch 2.13
    keeps one store over all restarts, and Gloo then tries to connect to ranks that are gone.
    """
    if local is not None:
        store = open_store(local.port, timeout or dist.default_pg_timeout)
        return {"store": store, "rank": local.rank, "world_size": int(os.environ["WORLD_SIZE"])}
    life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if life == "0":
        return {}
    store, rank, size = next(dist.rendezvous("env://", timeout=timeout or dist.default_pg_timeout))
    return {"store": dist.PrefixStore(f"life {life}", store), "rank": rank, "world_size": size}


@dataclass(frozen=True)
class LocalRank:
    """What a rank that weft started on this machine has of the process that started it, and what it leaves for it.

    ``port``: of the store, on the loopback. ``lifeline``: a pipe that ends with the process that started the ranks.

    ``folder``: private to this run; ranks leave there whether they have joined, and the error that ended them.
    """

    rank: int
    port: int
    lifeline: int
    folder: Path

    def environment(self, size: int) -> dict[str, str]:
        """What makes a process this rank of ``size``: as torchrun would, and where to meet."""
        rank, ranks = str(self.rank), str(size)
        return {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks,
            _VARIABLE: f"{self.port},{self.lifeline},{self.folder}",
        }  # fmt: skip

    @classmethod
    def of_environment(cls) -> LocalRank | None:
        """This process, or None if torchrun started it."""
        if _VARIABLE not in os.environ:
            return None
        port, lifeline, folder = os.environ[_VARIABLE].split(",", 2)
        return cls(int(os.environ["RANK"]), int(port), int(lifeline), Path(folder))

    def follow_parent(self) -> None:
        """End with the process that started this rank, however it ends and whatever this rank waits for."""

        def follow() -> None:
            os.read(self.lifeline, 1)  # nothing is ever written
            shutil.rmtree(self.folder, ignore_errors=True)
            os._exit(1)

        threading.Thread(target=follow, name="weft parent", daemon=True).start()

    def say_joined(self) -> None:
        """This rank is in the world."""
        (self.folder / f"joined-{self.rank}").touch()

    def has_joined(self) -> bool:
        return (self.folder / f"joined-{self.rank}").exists()

    def note_failure(self, error: Exception) -> None:
        """While the others still see this rank: later they fail, too, and say that it is gone."""
        text = f"{time.monotonic_ns()} {type(error).__name__}: {error}"
        with suppress(OSError):  # the error itself is what matters
            (self.folder / f"failure-{self.rank}").write_text(text)

    def failure(self) -> tuple[int, str] | None:
        """(when by the machine's clock, the error), or None if there is no note of one."""
        try:
            when, _, text = (self.folder / f"failure-{self.rank}").read_text().partition(" ")
        except OSError:
            return None
        return int(when), text

    @property
    def stderr_file(self) -> Path:
        """The file that takes its standard error."""
        return self.folder / f"stderr-{self.rank}"
