"""The report of a run: one HTML file with everything in it, made from what the run left in its folder."""

from __future__ import annotations

import math
import statistics
import sys
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Annotated

import tyro

from weft.report import figures
from weft.report.picture import write_picture
from weft.report.run import Run, read_run, write_page
from weft.report.scale import short
from weft.report.style import SCRIPT, STYLE

# Whatever a run's files contain, the page loads nothing.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def show_report(
    run: Annotated[Path, tyro.conf.Positional],
    beside: Path | None = None,
    out: Path | None = None,
    picture: Path | None = None,
) -> None:
    """Write the report of a run as one HTML file that opens without a network, and say where it is.

    Args:
        run: The folder of the run.
        beside: The folder of the same run in one process: both loss curves are drawn.
        out: The file to write; report.html in the run's folder if not given.
        picture: Also write an .svg file of what a step sends, and when.
    """
    try:
        if picture is not None:
            print(f"picture: {write_picture(run, picture).resolve()}")
        print(f"report: {write_report(run, beside=beside, out=out).resolve()}")
    except OSError as error:
        print(f"report: {error.filename} could not be written: {error.strerror}", file=sys.stderr)
        sys.exit(1)


def write_report(run: Path, *, beside: Path | None = None, out: Path | None = None) -> Path:
    """Write the report of a run's folder and return its path, ``RUN/report.html`` unless told otherwise.

    ``beside`` is the folder of the same run in one process, whose losses are drawn over those of ``run``. The file is
    whole or not there: it is written under another name first.

    Example: ``write_report(Path("runs/demo"), beside=Path("runs/demo-1"))``
    """
    target = run / "report.html" if out is None else out
    read, other = read_run(run), None if beside is None else read_run(beside)
    if not read.steps:
        raise ValueError(f"report: {run / 'metrics.jsonl'} has no whole step; a run writes a line after each step")
    write_page(target, assemble(read, other))
    return target


def assemble(run: Run, beside: Run | None) -> str:
    """The whole page."""
    title = escape(f"Training run {run.folder.resolve().name}")
    notes = run.notes + ([f"{beside.folder}: {words}" for words in beside.notes] if beside else [])
    parts = [
        f"<header>\n<h1>{title}</h1>\n<p>{escape(subtitle(run))}</p>\n{summary(run)}\n</header>",
        *(figures.note(words) for words in notes),
        figures.loss_figure(run, beside),
        figures.speed_figure(run),
        figures.bytes_figure(run),
        figures.timeline_figure(run),
        figures.config_figure(run),
    ]
    head = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark">\n<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n'
    )
    return f"{head}<body>\n" + "\n".join(parts) + f"\n<script>{SCRIPT}</script>\n</body>\n</html>\n"


def subtitle(run: Run) -> str:
    """When the run ended, and where it is."""
    written = datetime.fromtimestamp((run.folder / "metrics.jsonl").stat().st_mtime, UTC)
    return f"Trained with weft. Last step written {written:%Y-%m-%d %H:%M} UTC, in {run.folder.resolve()}"


def summary(run: Run) -> str:
    """The numbers on top."""
    steps = run.steps
    valid = [step for step in steps if math.isfinite(step.valid_loss)]
    speeds = [step.tokens_per_second for step in steps if math.isfinite(step.tokens_per_second)]
    seconds = sum(step.seconds for step in steps if step.seconds > 0)
    timed = [step for step in steps if step.seconds > 0 and math.isfinite(step.exposed_share)]
    waited = sum(step.exposed_share * step.seconds for step in timed)
    lasted = sum(step.seconds for step in timed)
    items = [
        ("Final loss", short(steps[-1].loss), ""),
        ("Validation loss", *((short(valid[-1].valid_loss), f"step {valid[-1].number:,}") if valid else ("-", ""))),
        ("Steps", f"{len(steps):,}", f"in {seconds:,.0f} s" if seconds else ""),
        ("Ranks", "-" if run.ranks is None else f"{run.ranks:,}", ""),
        ("Tokens per second", f"{statistics.median(speeds):,.0f}" if speeds else "-", "median"),
        ("Exposed communication", f"{100 * waited / lasted:.1f} %" if lasted else "-", "of the time of all steps"),
    ]
    cells = [f"<div><dt>{name}</dt><dd>{escape(value)} <small>{more}</small></dd></div>" for name, value, more in items]
    return f"<dl>{''.join(cells)}</dl>"
