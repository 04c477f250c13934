"""What a step sent and waited for, by family, over all ranks; and the file it is written to."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weft.comm import Axis, Ledger
from weft.train.small_file import is_plain_file, write_whole

FAMILIES = ("linear attention", "softmax attention", "embedding rows", "REKLS", "AdamW", "agreeing")
_PREFIXES = {
    "linear_attention": "linear attention",
    "attention": "softmax attention",
    "embedding": "embedding rows",
    "BigramHashEmbedding": "embedding rows",
    "RowAdam": "embedding rows",
    "REKLS": "REKLS",
    "ShardedAdamW": "AdamW",
}


def family_of(operation: str) -> str:
    """The family of a ledger's operation; what ranks tell each other beside all families is "agreeing".

    >>> family_of("attention.backward"), family_of("sequence.metadata")
    ('softmax attention', 'agreeing')
    """
    return _PREFIXES.get(operation.partition(".")[0], "agreeing")


@dataclass(frozen=True)
class StepTraffic:
    """One step: bytes sent by all ranks together, and seconds a rank stood waiting (the mean over ranks), by family."""

    bytes: dict[str, int]
    exposed: dict[str, float]
    seconds: float  # of the slowest rank
    signal: int = 0  # the highest that a rank was sent: all end after the same step

    @property
    def exposed_share(self) -> float:
        """Of the step's time."""
        return sum(self.exposed.values()) / self.seconds if self.seconds else 0.0


def share_traffic(world: Axis, ledger: Ledger, seconds: float, signal: int = 0) -> StepTraffic:
    """Everybody's figures put together; all ranks must call it. ``signal``: one that this rank was sent, or 0."""
    sent, exposed = dict.fromkeys(FAMILIES, 0.0), dict.fromkeys(FAMILIES, 0.0)
    for event in ledger.events:
        sent[family_of(event.operation)] += event.bytes_sent
    for operation, start, end in ledger.exposed:
        exposed[family_of(operation)] += end - start
    mine = torch.tensor([*sent.values(), *exposed.values(), seconds, signal], dtype=torch.float64)
    rows = torch.stack(world.begin("train.metrics").all_gather(mine).wait())
    total, count = rows.sum(0).tolist(), len(FAMILIES)
    return StepTraffic(
        {name: int(value) for name, value in zip(FAMILIES, total[:count], strict=True)},
        {name: value / world.size for name, value in zip(FAMILIES, total[count:-2], strict=True)},
        float(rows[:, -2].max()),
        int(rows[:, -1].max()),
    )


def spans_of(ledger: Ledger, began: float, ended: float) -> list[dict[str, Any]]:
    """One rank's step for a timeline: messages under way, waits, and work in between; seconds from its beginning."""
    spans = [
        {"name": event.operation, "family": family_of(event.operation), "kind": "under way",
         "start": event.start - began, "end": event.end - began}
        for event in ledger.events if event.end is not None
    ]  # fmt: skip
    at = 0.0
    for operation, start, end in ledger.exposed:
        start, end = max(at, start - began), end - began
        if end <= start:
            continue
        spans.append({"name": "work", "family": "work", "kind": "work", "start": at, "end": start})
        spans.append({"name": operation, "family": family_of(operation), "kind": "exposed", "start": start, "end": end})
        at = end
    spans.append({"name": "work", "family": "work", "kind": "work", "start": at, "end": ended - began})
    return spans


class MetricsFile:
    """``metrics.jsonl`` of a run, a line for each step; TensorBoard too where it is installed."""

    def __init__(self, folder: Path, after: int) -> None:
        """Go on after step ``after``: lines of later steps, which are made again, are dropped, and half a last line."""
        self._path = folder / "metrics.jsonl"
        before = self._path.read_bytes() if is_plain_file(self._path) else b""
        lines = split_lines(before)
        half = bool(lines) and lines[-1][1] is None
        kept = [text for text, step in lines[: -1 if half else None] if step is None or step <= after]
        write_whole(self._path, b"".join(line + b"\n" for line in kept))
        self._file = self._path.open("a", buffering=1)
        self._board = _open_board(folder, after)

    def write(self, line: Mapping[str, Any]) -> None:
        """Add a step. An OSError names the file."""
        try:
            self._file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from None
        if self._board is not None:
            for name, value in line.items():
                for key, number in value.items() if isinstance(value, Mapping) else [("", value)]:
                    if name != "step":
                        self._board.add_scalar(f"{name}/{key}" if key else name, number, line["step"])

    def close(self) -> None:
        """Write out what is still in memory, as far as there is room."""
        try:
            self._file.close()
        except OSError:
            pass  # a full disk, of which `write` has told
        if self._board is not None:
            self._board.close()


def split_lines(content: bytes) -> list[tuple[bytes, int | None]]:
    """(line, its step) of a metrics file; None for a line that is no step, where something broke it."""
    found: list[tuple[bytes, int | None]] = []
    for text in content.split(b"\n"):
        if not text.strip():
            continue
        line = _parse(text)
        found.append((text, None if line is None else line["step"]))
    return found


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The steps of a metrics file. Lines that are none, as where a run was killed, are passed over."""
    if not is_plain_file(path):
        return
    for text in path.read_bytes().split(b"\n"):
        if (line := _parse(text)) is not None:
            yield line


def _parse(text: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) and type(line.get("step")) is int else None


def _open_board(folder: Path, after: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder / "tensorboard"), purge_step=after + 1)
