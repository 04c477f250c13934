"""What a benchmark shows and keeps: a table on the terminal, rows with a header in a JSON file."""

from __future__ import annotations

import itertools
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table


@dataclass(frozen=True)
class Column:
    """A column of the table: the row's key, the heading (None: only in the file) and how a value is written.

    ``value`` finds it in what was measured of a case (`Measured`), where without it the key is the name of it.
    """

    key: str
    heading: str | None
    form: str = "{}"
    value: Callable[[Any], Any] | None = None

    def find(self, measured: Any, known: Mapping[str, Any]) -> Any:
        """The value of a case, if it is not ``known`` already."""
        if self.key in known:
            return known[self.key]
        return getattr(measured, self.key) if self.value is None else self.value(measured)


@dataclass(frozen=True)
class Layout:
    """One table: its title and columns. Rows that share the first column stand together."""

    title: str
    columns: tuple[Column, ...]


@dataclass
class Report:
    """Rows of one benchmark, in one or more tables.

    With ``path`` every added row is on disk at once, so that nothing is lost.
    """

    tables: dict[str, Layout]
    path: Path | None
    shown: bool = True
    header: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, table: str, row: dict[str, Any]) -> None:
        """Keep a row of ``table``."""
        self.rows.append({"table": table, **row})
        if self.path is not None and self.shown:
            draft = self.path.with_name(self.path.name + ".part")
            draft.write_text(json.dumps({"header": self.header, "rows": self.rows}, indent=1))
            draft.replace(self.path)

    @contextmanager
    def progress(self, steps: int, label: str) -> Iterator[Callable[[], None]]:
        """A bar on a terminal; elsewhere a line at the start and one when the first sample has been kept."""
        if not self.shown or not sys.stderr.isatty():
            taken = itertools.count()
            if self.shown:
                print(f"{label}: warming up", file=sys.stderr)
            yield lambda: None if next(taken) or not self.shown else print(f"{label}: measuring", file=sys.stderr)
            return
        with Progress(console=Console(stderr=True)) as bar:
            task = bar.add_task(label, total=steps)
            yield lambda: bar.advance(task)

    def show(self) -> None:
        """Print the tables that have rows."""
        if not self.shown:
            return
        console = Console(width=None if sys.stdout.isatty() else 140)
        for name, layout in self.tables.items():
            rows = [row for row in self.rows if row["table"] == name]
            if rows:
                console.print(_draw(layout, rows))
        if self.path is not None:
            Console(stderr=True).print(f"written: {self.path}")


def _draw(layout: Layout, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=layout.title)
    columns = [column for column in layout.columns if column.heading is not None]
    for column in columns:
        table.add_column(column.heading or "", justify="left" if column.form == "{}" else "right")
    group = [row[layout.columns[0].key] for row in rows]
    for index, row in enumerate(rows):
        if index and group[index] != group[index - 1] and len(set(group)) < len(group):
            table.add_section()
        cells = ((column, row.get(column.key)) for column in columns)
        table.add_row(*("" if value is None else column.form.format(value) for column, value in cells))
    return table


def describe_machine(**facts: Any) -> dict[str, Any]:
    """The header of a report: where, with what and from which commit it was measured."""
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": _commit(),
        **facts,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _commit() -> str | None:
    here = Path(__file__).parent
    try:
        git = ["git", "-C", str(here)]
        name = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        dirty = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return name.stdout.strip() + ("+changes" if dirty.stdout.strip() else "")
