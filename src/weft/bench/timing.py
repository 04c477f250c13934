"""What a rank measures: seconds of cases that take turns, memory, and what the kernel counts of it."""

from __future__ import annotations

import ctypes
import math
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from weft.comm import Axis, Ledger, record

T = TypeVar("T")
Case = Callable[[], Any]
_BYTES_SENT = 200  # where tcpi_bytes_sent stands in Linux' struct tcp_info


@dataclass(frozen=True)
class Sample:
    """One call of a case on one rank: seconds of time and of CPU, and what it sent by the ledger and by the kernel.

    ``machine``: seconds of CPU that all processes of the machine used meanwhile. ``result``: what the case returned.
    """

    wall: float
    cpu: float = 0.0
    ledger: Ledger = field(default_factory=Ledger)
    kernel_sent: int | None = None
    machine: float | None = None
    result: Any = None


def line_up(axis: Axis) -> None:
    """Return when every rank has arrived: log2(P) rounds of one byte."""
    token, step = torch.zeros(1, dtype=torch.uint8), 1
    while step < axis.size:
        ahead, behind = (axis.rank + step) % axis.size, (axis.rank - step) % axis.size
        axis.exchange([(ahead, token)], [(behind, torch.empty_like(token))]).wait()
        step *= 2


def take_turns(
    axis: Axis, make: Callable[..., Mapping[str, Case]], args: Sequence[Any], calls: int, turn: int
) -> dict[str, Sample]:
    """Seconds of a call of each case of ``make(axis, *args)`` on this rank, the mean of ``calls``; nothing is recorded.

    Everybody lines up before every call, so that a rank cannot run ahead and hide what a call costs the others.
    The order is the same on every rank. ``turn`` says which case begins: what follows what must not favour any.
    """
    cases = make(axis, *args)
    seconds = dict.fromkeys(cases, 0.0)
    for call in range(calls):
        for name in in_turn(list(cases), turn * calls + call):
            line_up(axis)
            start = time.perf_counter()
            cases[name]()
            seconds[name] += (time.perf_counter() - start) / calls
    return {name: Sample(wall) for name, wall in seconds.items()}


def in_turn(names: list[T], turn: int) -> list[T]:
    """The same, beginning with another in each turn, and in steps of another width: each follows several others.

    >>> in_turn(list("abcde"), 0), in_turn(list("abcde"), 1)
    (['a', 'b', 'c', 'd', 'e'], ['b', 'd', 'a', 'c', 'e'])
    """
    count = len(names)
    widths = [width for width in range(1, count + 1) if math.gcd(width, count) == 1]
    first, width = turn % count, widths[turn % len(widths)]
    return [names[(first + width * place) % count] for place in range(count)]


def measure_each(axis: Axis, names: list[str], ready: Callable[[str], Case | None], turn: int) -> dict[str, Sample]:
    """One recorded call of each case, which ``ready(name)`` makes beforehand.

    None has no work for this rank, which waits meanwhile and uses no processor.
    """
    found = {}
    for name in in_turn(names, turn):
        case = ready(name)
        if case is not None:
            found[name] = measure(axis, case)
        else:
            line_up(axis)
            line_up(axis)
        del case  # what it holds may be large
    return {name: found[name] for name in names if name in found}


def measure(axis: Axis, case: Case) -> Sample:
    """One recorded call, everybody lined up before and after it."""
    line_up(axis)
    before, busy = sent_bytes(), busy_seconds()
    with record() as ledger:
        cpu, wall = time.process_time(), time.perf_counter()
        result = case()
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    line_up(axis)
    after, used = sent_bytes(), busy_seconds()
    kernel = None if before is None or after is None else after - before
    return Sample(wall, cpu, ledger, kernel, None if busy is None or used is None else used - busy, result)


def examine(axis: Axis, make: Callable[..., Mapping[str, Case]], *args: Any) -> dict[str, tuple[Ledger, int | None]]:
    """What each case of ``make(axis, *args)`` sends, and how much memory it takes beyond its inputs."""
    facts, cases = {}, make(axis, *args)
    for case in cases.values():
        case()  # the first call sets up what later ones reuse
    for name, case in cases.items():
        with record() as ledger:
            peak = peak_memory(case)
        facts[name] = ledger, peak
    return facts


def forward_and_backward(attend: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Case:
    """Of an attention whose output is shaped as its first input; gradients of all inputs."""
    grad = torch.ones_like(inputs[0])
    return lambda: torch.autograd.grad(attend(*inputs), inputs, grad)


@contextmanager
def use_threads(threads: int) -> Iterator[None]:
    """As many threads for torch's operators."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
