"""Which addresses the processes of a run listen on, as the kernel says."""

from __future__ import annotations

import ipaddress
import os
import subprocess
import time
from pathlib import Path

MARK = "WEFT_TEST_RUN"  # an environment variable: its value is found in every process of a run, whoever its parent is
_LISTENING = "0A"


def listening_addresses() -> dict[int, str]:
    """{inode of a listening TCP socket: its address} of this machine."""
    found = {}
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == _LISTENING:
                words = bytes.fromhex(local.partition(":")[0])  # 32-bit words, each as the machine keeps it
                raw = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
                found[int(inode)] = str(ipaddress.ip_address(raw))
    return found


def sockets_of(process: int) -> set[int]:
    """Inodes of its sockets; none if it is gone."""
    found = set()
    try:
        for entry in os.scandir(f"/proc/{process}/fd"):
            target = os.readlink(entry.path)
            if target.startswith("socket:["):
                found.add(int(target[8:-1]))
    except OSError:
        pass
    return found


def processes_of(run: str) -> list[int]:
    """Of the run whose mark this is."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"{MARK}={run}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def addresses_of(processes: list[int]) -> dict[int, set[str]]:
    """What each of them listens on, if anything."""
    known = listening_addresses()
    found = {process: {known[inode] for inode in sockets_of(process) if inode in known} for process in processes}
    return {process: addresses for process, addresses in found.items() if addresses}


def watch(command: list[str], run: str, seconds: float, **more: str) -> tuple[dict[int, set[str]], int, str]:
    """Run a command and look again and again: what its processes have listened on, its status and what it said."""
    seen: dict[int, set[str]] = {}
    environment = {**os.environ, MARK: run, **more}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        end = time.monotonic() + seconds
        while process.poll() is None and time.monotonic() < end:
            for one, addresses in addresses_of(processes_of(run)).items():
                seen.setdefault(one, set()).update(addresses)
            time.sleep(0.3)  # listeners stay as long as their processes
        process.kill()
        assert process.stderr is not None
        return seen, process.wait(), process.stderr.read()


def beyond_loopback(seen: dict[int, set[str]]) -> set[str]:
    """Addresses that other hosts can reach."""
    return {
        address for addresses in seen.values() for address in addresses if not ipaddress.ip_address(address).is_loopback
    }
