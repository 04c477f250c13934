"""What a step sent and waited for, by family, over all ranks; and the file it is written to."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weft.comm import Axis, Ledger

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

    >>> family_of("attention.backward"), family_of("sequence.tell")
    ('softmax attention', 'agreeing')
    """
    return _PREFIXES.get(operation.partition(".")[0], "agreeing")


@dataclass(frozen=True)
class StepTraffic:
    """One step: bytes sent by all ranks together, and seconds a rank stood waiting (the mean over ranks), by family."""

    bytes: dict[str, int]
    exposed: dict[str, float]
    seconds: float  # of the slowest rank

    @property
    def exposed_share(self) -> float:
        """Of the step's time."""
        return sum(self.exposed.values()) / self.seconds if self.seconds else 0.0


def share_traffic(world: Axis, ledger: Ledger, seconds: float) -> StepTraffic:
    """Everybody's figures put together; all ranks must call it."""
    sent, exposed = dict.fromkeys(FAMILIES, 0.0), dict.fromkeys(FAMILIES, 0.0)
    for event in ledger.events:
        sent[family_of(event.operation)] += event.bytes_sent
    for operation, start, end in ledger.exposed:
        exposed[family_of(operation)] += end - start
    mine = torch.tensor([*sent.values(), *exposed.values(), seconds], dtype=torch.float64)
    rows = torch.stack(world.begin("train.metrics").all_gather(mine).wait())
    total, count = rows.sum(0).tolist(), len(FAMILIES)
    return StepTraffic(
        {name: int(value) for name, value in zip(FAMILIES, total[:count], strict=True)},
        {name: value / world.size for name, value in zip(FAMILIES, total[count:-1], strict=True)},
        float(rows[:, -1].max()),
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
        """Go on after step ``after``: lines of later steps, of a run that was ended, are dropped."""
        path = folder / "metrics.jsonl"
        kept = [line for line in read_lines(path) if line["step"] <= after]
        fresh = path.with_suffix(".partial")
        fresh.write_text("".join(json.dumps(line) + "\n" for line in kept))
        os.replace(fresh, path)
        self._file = path.open("a", buffering=1)
        self._board = _open_board(folder, after)

    def write(self, line: Mapping[str, Any]) -> None:
        """Add a step."""
        self._file.write(json.dumps(line) + "\n")
        if self._board is not None:
            for name, value in line.items():
                for key, number in value.items() if isinstance(value, Mapping) else [("", value)]:
                    if name != "step":
                        self._board.add_scalar(f"{name}/{key}" if key else name, number, line["step"])

    def close(self) -> None:
        """Write out what is still in memory."""
        self._file.close()
        if self._board is not None:
            self._board.close()


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a metrics file; the last one may be half-written, where a run was killed."""
    if not path.is_file():
        return
    for text in path.read_text().splitlines():
        try:
            yield json.loads(text)
        except ValueError:
            return


def _open_board(folder: Path, after: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder / "tensorboard"), purge_step=after + 1)
