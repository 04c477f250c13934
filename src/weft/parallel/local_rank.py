"""What a rank that weft started on this machine has of the process that started it, and what it leaves for it."""

from __future__ import annotations

import os
import shutil
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_VARIABLE = "WEFT_LOCAL_RANK"


@dataclass(frozen=True)
class LocalRank:
    """``port``: of the store, on the loopback. ``lifeline``: a pipe that ends with the process that started the ranks.

    ``folder``: private to this run; ranks leave there whether they have joined, and the error that ended them.
    """

    rank: int
    port: int
    lifeline: int
    folder: Path

    def environment(self, size: int) -> dict[str, str]:
        """How a process is told that it is this rank of ``size``: as torchrun would, and where to meet."""
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
    def said(self) -> Path:
        """The file that takes its standard error."""
        return self.folder / f"stderr-{self.rank}"
