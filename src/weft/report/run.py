"""What a report reads: the files of a run's folder, as numbers that can be drawn.

Nothing in the files is trusted. A number that is missing, of another kind or not finite becomes NaN, a line that is no
step is counted and left out, a file that cannot be read becomes a note.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

# Families in the order of every figure and table.
FAMILIES = ("linear attention", "softmax attention", "embedding rows", "REKLS", "AdamW", "agreeing")
KINDS = ("work", "under way", "exposed")
LARGEST = 1e300  # beyond it differences overflow; such a number is drawn as if it were infinite


def in_order(families: Iterable[str]) -> list[str]:
    """The known families first, in their order, then the others by name."""
    known = {name: place for place, name in enumerate(FAMILIES)}
    return sorted(set(families), key=lambda name: (known.get(name, len(FAMILIES)), name))


def family_class(family: str) -> str:
    """The class of the stylesheet that sets a family's colour, ``--c``."""
    return f"f{FAMILIES.index(family)}" if family in FAMILIES else "fx"


@dataclass(frozen=True)
class Step:
    """One line of metrics.jsonl. Bytes are summed over ranks, exposed seconds are the mean over ranks."""

    number: int
    loss: float
    valid_loss: float
    seconds: float
    tokens_per_second: float
    exposed_share: float
    bytes: dict[str, float]
    exposed: dict[str, float]


@dataclass(frozen=True)
class Plain:
    """What the same model and step sends with plain pieces, in bytes summed over ranks."""

    bytes: dict[str, float]
    methods: dict[str, str]
    ranks: int | None


@dataclass(frozen=True)
class Span:
    """A piece of time of one rank, in seconds: work, communication under way, or waiting for it (exposed)."""

    name: str
    family: str
    kind: str
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """One step on all ranks, from second 0."""

    step: int | None
    ranks: list[tuple[int, list[Span]]]
    seconds: float


@dataclass
class Run:
    """Everything a report knows of one run. ``steps`` are in order of their numbers, each there once."""

    folder: Path
    steps: list[Step]
    config: dict[str, str] | None = None
    plain: Plain | None = None
    timeline: Timeline | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def ranks(self) -> int | None:
        """How many ranks ran it, by its timeline, its plain pieces or its configuration."""
        if self.timeline is not None:
            return len(self.timeline.ranks)
        if self.plain is not None and self.plain.ranks is not None:
            return self.plain.ranks
        last_words = {key.rpartition(".")[2]: value for key, value in (self.config or {}).items()}
        sizes = {key: int(value) for key, value in last_words.items() if re.fullmatch("[0-9]{1,7}", value)}
        for key in ("ranks", "world_size"):
            if sizes.get(key, 0) > 0:
                return sizes[key]
        mesh = [sizes[key] for key in ("dp", "cp", "tp") if key in sizes]
        return math.prod(mesh) if mesh and min(mesh) > 0 else None

    @property
    def name(self) -> str:
        """What its curves are called."""
        if self.ranks is None:
            folder = self.folder.resolve().name
            return folder if len(folder) <= 18 else folder[:17] + "…"
        return "one process" if self.ranks == 1 else f"{self.ranks} ranks"


def write_page(path: Path, text: str) -> None:
    """Write a file, whole or not at all; ValueError if there can be no such file, OSError if the disk is full."""
    try:
        if path.exists() and not path.is_file():
            what = "a folder" if path.is_dir() else "not a file"
            raise ValueError(f"report: {path} is {what}; give the name of a file")
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            partial.write_text(text, encoding="utf-8", errors="replace")
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise ValueError(f"report: {path} cannot be written: {error.strerror}; give the name of a file") from None


def read_run(folder: Path) -> Run:
    """Read a run's folder. ValueError if there is no metrics.jsonl; every other file may be missing."""
    metrics, run = folder / "metrics.jsonl", Run(folder, [])
    try:
        if not metrics.is_file():
            words = "give the folder of a run, as named by weft train --out"
            raise ValueError(f"report: {folder} has no metrics.jsonl; {words}")
        run.steps, unreadable = read_steps(metrics)
        if unreadable:
            lines = "1 line" if unreadable == 1 else f"{unreadable} lines"
            are = "is" if unreadable == 1 else "are"
            run.notes.append(f"{lines} of {metrics.name} could not be read and {are} left out.")
        if (config := read_object(run, "config.json")) is not None:
            run.config = dict(flatten(config))
        if (plain := read_object(run, "plain.json")) is not None:
            run.plain = to_plain(plain)
        if (timeline := read_object(run, "timeline.json")) is not None:
            run.timeline = to_timeline(timeline)
    except OSError as error:
        raise ValueError(f"report: {error.filename or folder} cannot be read: {error.strerror}") from None
    return run


def read_steps(path: Path) -> tuple[list[Step], int]:
    """The steps, and how many lines were none.

    A half-written last line is what a killed run leaves: it counts for neither. A run that was resumed may have written
    a step twice: the later line holds.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    found = [to_step(parse(line)) for line in text.split("\n") if line.strip()]
    if found and found[-1] is None and not text.endswith("\n"):
        found.pop()
    steps = {step.number: step for step in found if step is not None}
    return [steps[number] for number in sorted(steps)], found.count(None)


def read_object(run: Run, name: str) -> dict[str, Any] | None:
    """A JSON object of the run's folder; None if it is not there, and with a note if it is something else."""
    path = run.folder / name
    if not path.is_file():
        return None
    content = parse(path.read_text(encoding="utf-8", errors="replace"))
    if not isinstance(content, dict):
        run.notes.append(f"{name} is not a whole JSON object and is left out.")
        return None
    return content


def parse(text: str) -> Any:
    """The JSON value, or None."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def to_step(line: Any) -> Step | None:
    """A step from a line, or None if it is none."""
    if not isinstance(line, dict) or (step := to_count(line.get("step"))) is None:
        return None
    names = ("loss", "valid_loss", "seconds", "tokens_per_second", "exposed_share")
    numbers = {name: to_number(line.get(name)) for name in names}
    return Step(step, **numbers, bytes=sizes(line.get("bytes")), exposed=sizes(line.get("exposed")))


def to_plain(content: dict[str, Any]) -> Plain:
    """The bytes of plain pieces, as far as they are there."""
    methods = content.get("methods")
    words = {str(family): str(method) for family, method in methods.items()} if isinstance(methods, dict) else {}
    return Plain(sizes(content.get("bytes")), words, to_count(content.get("ranks")) or None)


def to_timeline(content: dict[str, Any]) -> Timeline | None:
    """None if no rank has a span."""
    ranks: list[tuple[int, list[Span]]] = []
    for place, entry in enumerate(as_list(content.get("ranks"))):
        if not isinstance(entry, dict):
            continue
        found = (to_span(span) for span in as_list(entry.get("spans")))
        number = to_count(entry.get("rank"))
        ranks.append((place if number is None else number, [span for span in found if span is not None]))
    spans = [span for _, of_rank in ranks for span in of_rank]
    if not spans:
        return None
    zero = min(span.start for span in spans)
    moved = [
        (rank, [replace(span, start=span.start - zero, end=span.end - zero) for span in of_rank])
        for rank, of_rank in sorted(ranks, key=lambda entry: entry[0])
    ]
    return Timeline(to_count(content.get("step")), moved, max(span.end for span in spans) - zero)


def to_span(entry: Any) -> Span | None:
    """A span, or None if it has no known kind or no length."""
    if not isinstance(entry, dict) or entry.get("kind") not in KINDS:
        return None
    start, end = to_number(entry.get("start")), to_number(entry.get("end"))
    if not end > start:  # NaN too
        return None
    return Span(str(entry.get("name", "")), str(entry.get("family", "")), entry["kind"], start, end)


def as_list(value: Any) -> list[Any]:
    """The value if it is a list, or an empty one."""
    return value if isinstance(value, list) else []


def sizes(value: Any) -> dict[str, float]:
    """Counts of bytes or seconds by family; what can be neither is left out."""
    if not isinstance(value, dict):
        return {}
    found = {str(family): to_number(size) for family, size in value.items()}
    return {family: size for family, size in found.items() if 0 <= size < 2**63}


def to_number(value: Any) -> float:
    """The number, or NaN for what is none or not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -LARGEST < value < LARGEST:
        return math.nan
    return float(value) if abs(value) > 1 / LARGEST else 0.0


def to_count(value: Any) -> int | None:
    """The whole number from zero on, or None."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**53:
        return None
    return value


def flatten(value: dict[str, Any], before: str = "") -> list[tuple[str, str]]:
    """Settings as (dotted name, text)."""
    pairs: list[tuple[str, str]] = []
    for key, inner in value.items():
        if isinstance(inner, dict) and inner and before.count(".") < 20:
            pairs += flatten(inner, f"{before}{key}.")
        else:
            pairs.append((f"{before}{key}", inner if isinstance(inner, str) else json.dumps(inner)))
    return pairs
