"""What a step gave, sent and waited for, over all ranks: brought together, written to a file, shown to a person."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from weft.comm import Axis, Ledger
from weft.report.run import FAMILIES
from weft.train.config import TrainConfig
from weft.train.run_folder import split_lines, write_whole

EVERY = 10.0  # seconds between lines where they stay
_PREFIXES = {
    "linear_attention": "linear attention",
    "delta_rule": "linear attention",
    "short_conv": "linear attention",
    "attention": "softmax attention",
    "embedding": "embedding rows",
    "BigramHashEmbedding": "embedding rows",
    "RowAdam": "embedding rows",
    "REKLS": "REKLS",
    "ShardedAdamW": "AdamW",
}
_WHAT = {
    "linear attention": "states, halos",
    "softmax attention": "keys, values, gradients",
    "embedding rows": "rows, gradients",
    "REKLS": "gradients, updates",
    "AdamW": "gradients, weights",
    "agreeing": "integers",
}


def family_of(operation: str) -> str:
    """The family of a ledger's operation; what ranks exchange beside all families is "agreeing".

    >>> family_of("attention.backward"), family_of("sequence.metadata")
    ('softmax attention', 'agreeing')
    """
    return _PREFIXES.get(operation.partition(".")[0], "agreeing")


@dataclass(frozen=True)
class StepResult:
    """What a step gave, the same on every rank.

    By family: bytes sent by all ranks together, and seconds a rank stood waiting (the mean over ranks).
    """

    step: int
    loss: float
    norm: float
    tokens: int
    bytes: dict[str, int]
    exposed: dict[str, float]
    seconds: float  # of the slowest rank
    signal: int = 0  # the highest that a rank was sent: all end after the same step
    valid_loss: float | None = None

    @property
    def exposed_share(self) -> float:
        """Of the step's time."""
        return sum(self.exposed.values()) / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks together."""
        return self.tokens / self.seconds

    def line(self) -> dict[str, Any]:
        """For metrics.jsonl."""
        one = {
            "step": self.step, "loss": self.loss, "norm": self.norm, "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second, "bytes": self.bytes, "exposed": self.exposed,
            "exposed_share": self.exposed_share,
        }  # fmt: skip
        return one if self.valid_loss is None else {**one, "valid_loss": self.valid_loss}


def gather_floats(axis: Axis, operation: str, mine: Sequence[float]) -> Tensor:
    """Every rank's numbers by rank, ``[P, n]`` in fp64, to the bit; all ranks must call it.

    They travel as the integers of one call: one round, and on many ranks log2(P) messages of each of them.
    """
    bits = torch.tensor(mine, dtype=torch.float64).view(torch.int64).tolist()
    return torch.tensor(axis.begin(operation, metadata=bits).metadata.wait()).view(torch.float64)


def gather_step(world: Axis, ledger: Ledger, seconds: float, signal: int, loss: float) -> tuple[Tensor, dict[str, Any]]:
    """(every rank's loss ``[P]``, figures for `StepResult`) of a step, in one gather; all ranks must call it.

    ``signal``: one that this rank was sent, or 0.
    """
    sent, exposed = dict.fromkeys(FAMILIES, 0.0), dict.fromkeys(FAMILIES, 0.0)
    for event in ledger.events:
        sent[family_of(event.operation)] += event.bytes_sent
    for operation, start, end in ledger.exposed:
        exposed[family_of(operation)] += end - start
    rows = gather_floats(world, "train.metrics", [*sent.values(), *exposed.values(), seconds, signal, loss])
    total, count = rows.sum(0).tolist(), len(FAMILIES)
    return rows[:, -1], {
        "bytes": {name: int(value) for name, value in zip(FAMILIES, total[:count], strict=True)},
        "exposed": {name: value / world.size for name, value in zip(FAMILIES, total[count:-3], strict=True)},
        "seconds": float(rows[:, -3].max()),
        "signal": int(rows[:, -2].max()),
    }


def spans_of(ledger: Ledger, began: float, ended: float) -> list[dict[str, Any]]:
    """One rank's step for a timeline: messages under way, waits, and work in between; seconds from its beginning."""

    def span(name: str, family: str, kind: str, start: float, end: float) -> dict[str, Any]:
        return {"name": name, "family": family, "kind": kind, "start": start, "end": end}

    spans = [
        span(event.operation, family_of(event.operation), "under way", event.start - began, event.end - began)
        for event in ledger.events
        if event.end is not None
    ]
    at = 0.0
    for operation, start, end in ledger.exposed:
        start, end = max(at, start - began), end - began
        if end > start:
            spans.append(span("work", "work", "work", at, start))
            spans.append(span(operation, family_of(operation), "exposed", start, end))
            at = end
    return [*spans, span("work", "work", "work", at, ended - began)]


class MetricsFile:
    """``metrics.jsonl`` of a run, a line for each step; TensorBoard too where it is installed."""

    def __init__(self, folder: Path, after: int) -> None:
        """Go on after step ``after``: lines of later steps, which are made again, are dropped, and half a last line."""
        self._path = folder / "metrics.jsonl"
        lines = split_lines(self._path.read_bytes() if os.path.isfile(self._path) else b"")
        if lines and lines[-1][1] is None:
            lines.pop()
        kept = [text for text, line in lines if line is None or line["step"] <= after]
        write_whole(self._path, b"".join(text + b"\n" for text in kept))
        self._file = self._path.open("a", buffering=1)
        self._board: Any = None
        with suppress(ImportError):
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=after + 1)

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
        """Write out what is still in memory, as far as there is space."""
        with suppress(OSError):  # a full disk, as `write` has said
            self._file.close()
        if self._board is not None:
            self._board.close()


def show_config(config: TrainConfig, facts: dict[str, Any]) -> None:
    """Print the settings that are not the default, and facts found out."""
    default = TrainConfig()
    changed = {name: value for name, value in vars(config).items() if value != getattr(default, name)}
    print("  ".join(f"{name}={value}" for name, value in (*facts.items(), *changed.items())), file=sys.stderr)


class ProgressLine:
    """A live line on a terminal, above which validation losses stay; elsewhere a line every ten seconds.

    The first step and the last have one everywhere else, too, and so has every validation loss.
    """

    def __init__(self, config: TrainConfig, done: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._steps, self._clock = config.steps, clock
        self._began, self._first, self._printed = clock(), done, float("-inf")
        self._live: Progress | None = None
        if sys.stderr.isatty():
            columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(20), TextColumn("{task.fields[figures]}"))
            self._live = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True))
            self._task = self._live.add_task("train", total=config.steps, completed=done, figures="")
            self._live.start()

    def show(self, result: StepResult) -> None:
        """After a step."""
        figures = f"loss {result.loss:.4f}  {result.tokens_per_second:,.0f} tokens/s"
        figures += f"  exposed {100 * result.exposed_share:.0f} %"
        valid = "" if result.valid_loss is None else f"  validation loss {result.valid_loss:.4f}"
        now, left = self._clock(), self._steps - result.step
        eta = timedelta(seconds=round((now - self._began) / (result.step - self._first) * left))  # as fast as this life
        line = f"step {result.step}/{self._steps}  {figures}{valid}  ETA {eta}"
        if self._live is not None:
            self._live.update(self._task, completed=result.step, figures=figures)
            if valid:
                self._live.console.print(line, highlight=False)
        elif valid or not left or now - self._printed >= EVERY:
            self._printed = now
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave the line as it is."""
        if self._live is not None:
            self._live.stop()


def traffic_table(lines: Iterable[dict[str, Any]], ranks: int) -> Table:
    """Bytes and exposed seconds of each family, the mean over steps but the first, which sets up connections."""
    taken = _whole(lines)
    seconds = sum(line["seconds"] for line in taken)
    table = Table(title=f"A step on {ranks} ranks", title_justify="left")
    for name in ("family", "what is sent", "MB, all ranks", "exposed ms", "% of step"):
        table.add_column(name, justify="left" if name in ("family", "what is sent") else "right")
    for family in FAMILIES:
        sent, exposed = _mean_bytes(taken, family), sum(line["exposed"][family] for line in taken)
        share = 100 * exposed / seconds
        table.add_row(family, _WHAT[family], f"{sent / 1e6:.3f}", f"{1e3 * exposed / len(taken):.1f}", f"{share:.1f}")
    return table


def compare_table(
    lines: Iterable[dict[str, Any]], plain: Mapping[str, int], methods: Mapping[str, str], ranks: int
) -> Table:
    """Bytes of each family in a step beside those of plain pieces."""
    taken = _whole(lines)
    table = Table(title=f"Sent in a step by {ranks} ranks together, MB", title_justify="left")
    for name in ("family", "weft", "plain pieces", "x", "the plain piece"):
        table.add_column(name, justify="left" if name in ("family", "the plain piece") else "right")
    sizes = {family: (_mean_bytes(taken, family), plain.get(family, 0)) for family in FAMILIES}
    everything = sum(sent for sent, _ in sizes.values()), sum(other for _, other in sizes.values())
    for family, (sent, other) in (*sizes.items(), ("all", everything)):
        compared = (f"{other / 1e6:.3f}" if other else "", f"{other / sent:.1f}" if other and sent else "")
        style = "bold" if family == "all" else None
        table.add_row(family, f"{sent / 1e6:.3f}", *compared, methods.get(family, ""), style=style)
    return table


def _mean_bytes(lines: list[dict[str, Any]], family: str) -> float:
    return sum(line["bytes"][family] for line in lines) / len(lines)


def _whole(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lines with all figures but the first; at least one."""
    taken = [line for line in lines if _has_all(line)]
    none = {"seconds": 1.0, "bytes": dict.fromkeys(FAMILIES, 0), "exposed": dict.fromkeys(FAMILIES, 0.0)}
    return taken[1:] or taken or [none]


def _has_all(line: dict[str, Any]) -> bool:
    numbers = [line.get("seconds")]
    for name in ("bytes", "exposed"):
        by_family = line.get(name)
        numbers += [by_family.get(family) for family in FAMILIES] if isinstance(by_family, dict) else [None]
    return all(isinstance(number, int | float) for number in numbers)
