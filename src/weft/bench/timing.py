"""What a rank measures: seconds of cases that take turns, memory, and what the kernel counts of it."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from weft.comm import Axis, Ledger, record

Case = Callable[[], object]
_BYTES_SENT = 200  # where tcpi_bytes_sent stands in Linux' struct tcp_info


def line_up(axis: Axis) -> None:
    """Return when every rank has arrived: log2(P) rounds of one byte."""
    token, step = torch.zeros(1, dtype=torch.uint8), 1
    while step < axis.size:
        ahead, behind = (axis.rank + step) % axis.size, (axis.rank - step) % axis.size
        axis.exchange([(ahead, token)], [(behind, torch.empty_like(token))]).wait()
        step *= 2


def take_turns(axis: Axis, cases: Mapping[str, Case], calls: int = 1, turn: int = 0) -> dict[str, float]:
    """Seconds a call of each case on this rank, the mean of ``calls``; the order is the same on every rank.

    Everybody lines up before every call, so that a rank cannot run ahead and hide what a call costs the others.
    ``turn`` says which case begins: what follows what must not favour any.
    """
    seconds = dict.fromkeys(cases, 0.0)
    order = list(cases.items())
    for call in range(calls):
        first = (turn * calls + call) % len(order)
        for name, case in order[first:] + order[:first]:
            line_up(axis)
            start = time.perf_counter()
            case()
            seconds[name] += (time.perf_counter() - start) / calls
    return seconds


def examine(cases: Mapping[str, Case]) -> dict[str, tuple[Ledger, int | None]]:
    """What each case sends, and how much memory it takes beyond its inputs."""
    facts = {}
    for case in cases.values():
        case()  # the first call sets up what later ones reuse
    for name, case in cases.items():
        with record() as ledger:
            peak = peak_memory(case)
        facts[name] = ledger, peak
    return facts


def busy_seconds() -> float | None:
    """CPU time that all processes of this machine have used so far; None where Linux is not.

    What it grows by beyond a benchmark's own ranks was used by somebody else, and the figures are not those of a
    machine at rest.
    """
    try:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()
    except OSError:
        return None
    user, nice, system, _, _, interrupts, soft = (int(field) for field in fields[1:8])
    return (user + nice + system + interrupts + soft) / os.sysconf("SC_CLK_TCK")


def peak_memory(case: Case) -> int | None:
    """How many bytes the resident memory of this process rises at most during a call; None where Linux is not."""
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not reset.exists():
        return None

    def read(field: str) -> int:
        line = next(line for line in status.read_text().splitlines() if line.startswith(field))
        return int(line.split()[1]) * 1024

    try:
        ctypes.CDLL(None).malloc_trim(0)  # give back what earlier cases freed, so that this one must ask for it
        reset.write_text("5")  # forget the old peak
    except (OSError, AttributeError):
        return None
    before = read("VmRSS")
    case()
    return max(0, read("VmHWM") - before)


def sent_bytes() -> int | None:
    """Bytes sent on the TCP connections that are open now, whoever sent them; None where Linux is not."""
    descriptors = Path("/proc/self/fd")
    if not descriptors.exists() or not hasattr(socket, "TCP_INFO"):
        return None
    total = 0
    for entry in descriptors.iterdir():
        try:
            if not os.readlink(entry).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as one:
                if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM:
                    continue
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_SENT + 8)
        except OSError:  # closed meanwhile
            continue
        if len(info) < _BYTES_SENT + 8:  # an old kernel
            return None
        total += struct.unpack_from("Q", info, _BYTES_SENT)[0]
    return total
