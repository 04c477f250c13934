"""What a person sees of a run: its settings, a line that moves, and what was sent by whom."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from weft.train.config import TrainConfig
from weft.train.metrics import FAMILIES
from weft.train.trainer import StepResult

EVERY = 10.0  # seconds between lines where they stay
_WHAT = {
    "linear attention": "states",
    "softmax attention": "keys, values, gradients",
    "embedding rows": "rows, gradients",
    "REKLS": "gradients, updates",
    "AdamW": "gradients, weights",
    "agreeing": "integers, losses",
}


def show_config(config: TrainConfig, facts: dict[str, Any]) -> None:
    """Print the settings that are not the default, and facts found out."""
    default = TrainConfig()
    changed = {name: value for name, value in vars(config).items() if value != getattr(default, name)}
    told = [*facts.items(), *changed.items()]
    print("  ".join(f"{name}={value}" for name, value in told), file=sys.stderr)


class ProgressLine:
    """A live line on a terminal, above which validation losses stay; elsewhere a line every ten seconds.

    The first step and the last have one everywhere else, too, and so has every validation loss.
    """

    def __init__(self, config: TrainConfig, done: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._steps, self._clock = config.steps, clock
        self._began, self._first, self._told = clock(), done, float("-inf")
        self._live: Progress | None = None
        if sys.stderr.isatty():
            columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(20), TextColumn("{task.fields[told]}"))
            self._live = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True))
            self._task = self._live.add_task("train", total=config.steps, completed=done, told="")
            self._live.start()

    def show(self, result: StepResult) -> None:
        """After a step."""
        told = f"loss {result.loss:.4f}  {result.tokens_per_second:,.0f} tokens/s"
        told += f"  exposed {100 * result.traffic.exposed_share:.0f} %"
        valid = "" if result.valid_loss is None else f"  validation loss {result.valid_loss:.4f}"
        line = f"step {result.step}/{self._steps}  {told}{valid}  ETA {self._left(result.step)}"
        now = self._clock()
        if self._live is not None:
            self._live.update(self._task, completed=result.step, told=told)
            if valid:
                self._live.console.print(line, highlight=False)
        elif valid or result.step == self._steps or now - self._told >= EVERY:
            self._told = now
            print(line, file=sys.stderr, flush=True)

    def _left(self, step: int) -> timedelta:
        """How long the steps that are left take, as fast as those of this life."""
        return timedelta(seconds=round((self._clock() - self._began) / (step - self._first) * (self._steps - step)))

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
        sent = sum(line["bytes"][family] for line in taken) / len(taken)
        exposed = sum(line["exposed"][family] for line in taken)
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
    totals = [0.0, 0.0]
    for family in FAMILIES:
        sent, other = sum(line["bytes"][family] for line in taken) / len(taken), plain.get(family, 0)
        totals = [totals[0] + sent, totals[1] + other]
        table.add_row(family, *_compared(sent, other), methods.get(family, ""))
    table.add_row("all", *_compared(*totals), "", style="bold")
    return table


def _whole(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lines with all figures but the first; at least one."""
    taken = [line for line in lines if _has_all(line)]
    return (
        taken[1:]
        or taken
        or [{"seconds": 1.0, "bytes": dict.fromkeys(FAMILIES, 0), "exposed": dict.fromkeys(FAMILIES, 0.0)}]
    )


def _has_all(line: dict[str, Any]) -> bool:
    numbers = [line.get("seconds")]
    for name in ("bytes", "exposed"):
        told = line.get(name)
        numbers += [told.get(family) for family in FAMILIES] if isinstance(told, dict) else [None]
    return all(isinstance(number, int | float) for number in numbers)


def _compared(sent: float, other: float) -> tuple[str, str, str]:
    return f"{sent / 1e6:.3f}", f"{other / 1e6:.3f}" if other else "", f"{other / sent:.1f}" if other and sent else ""
