"""The report of a run: one HTML file with everything in it, made from what the run left in its folder; one picture.

Charts are SVG that weft writes, not matplotlib's: they read out values under the pointer, follow the reader's light or
dark theme and page width by CSS, and keep their letters as text. And every run writes a report, with no more installed
than weft itself needs.

Colours: Okabe and Ito's, which stay apart for colour-blind eyes, a little lighter on dark. A family has one colour
everywhere; vermilion is kept for waiting. Every chart is there twice, for wide and for narrow pages, and one is shown.
"""

from __future__ import annotations

import math
import re
import statistics
import sys
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Annotated

import tyro

from weft.report import figures
from weft.report.charts import byte_bars, draw_timeline
from weft.report.run import Run, read_run, write_page
from weft.report.svg import WIDTHS, short, text

# Whatever a run's files contain, the page loads nothing.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
MARGIN = 16  # of the picture


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
    """Write the report of a run's folder and return its path, ``RUN/report.html`` unless ``out`` is given.

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
    written = datetime.fromtimestamp((run.folder / "metrics.jsonl").stat().st_mtime, UTC)
    when = f"Trained with weft. Last step written {written:%Y-%m-%d %H:%M} UTC, in {run.folder.resolve()}"
    notes = run.notes + ([f"{beside.folder}: {words}" for words in beside.notes] if beside else [])
    parts = [
        f"<header>\n<h1>{title}</h1>\n<p>{escape(when)}</p>\n{summary(run)}\n</header>",
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


def write_picture(run: Path, out: Path) -> Path:
    """Bytes of a step beside those of plain pieces, and the timeline of a step, of a run that has both."""
    read = read_run(run)
    if not read.steps or read.plain is None or read.timeline is None:
        raise ValueError(
            f"report: --picture needs metrics.jsonl, plain.json and timeline.json in {run}; `weft demo` writes them"
        )
    ranks = len(read.timeline.ranks)
    parts = [
        (f"Sent in one training step by {ranks} ranks together (log scale): weft, and plain pieces for the same model",
         byte_bars(figures.byte_rows(read), "bytes")),
        ("The step on each rank: work, hatched where it waits; below it what is under way meanwhile",
         draw_timeline(read.timeline)),
    ]  # fmt: skip
    inside, y = [], float(MARGIN)
    for title, both in parts:
        wide = re.search(r'<svg class="\w+ wide" viewBox="0 0 (\d+) (\d+)".*?</svg>', both, re.DOTALL)
        assert wide is not None
        inside.append(text(0, y + 10, title, "strong"))
        inside.append(wide[0].replace("<svg ", f'<svg y="{y + 22:.0f}" width="{wide[1]}" height="{wide[2]}" ', 1))
        y += 22 + float(wide[2]) + 2 * MARGIN
    size = f"{-MARGIN} 0 {WIDTHS['wide'] + 2 * MARGIN} {y - MARGIN:.0f}"
    background = f'<rect x="{-MARGIN}" width="100%" height="100%" class="blank"/>'
    style = STYLE + "svg text { font-family: system-ui, sans-serif } svg { width: auto; margin: 0 }"
    write_page(
        out,
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}">\n<style>{style}</style>\n{background}\n'
        + "\n".join(inside) + "\n</svg>\n",
    )  # fmt: skip
    return out


STYLE = """
:root {
  --paper: #fff; --ink: #1c1c1a; --soft: #62625d; --line: #dededa; --work: #d5d5cf; --run: #0072b2; --beside: #1c1c1a;
  --wait: #c8480a;
}
.f0 { --c: #0072b2 } .f1 { --c: #56b4e9 } .f2 { --c: #009e73 } .f3 { --c: #e69f00 } .f4 { --c: #cc79a7 }
.f5 { --c: #6e6e6a } .fx { --c: #8c6d31 } .all { --c: var(--ink) }
@media screen and (prefers-color-scheme: dark) {
  :root {
    --paper: #161617; --ink: #e7e7e3; --soft: #a3a39c; --line: #35353a; --work: #47474c; --run: #4aa3df;
    --beside: #f2f2ee; --wait: #ff7a45;
  }
  .f0 { --c: #3f94d4 } .f1 { --c: #8fd0f5 } .f2 { --c: #2bb88d } .f3 { --c: #f0b53a } .f4 { --c: #dd98bd }
  .f5 { --c: #9a9a95 } .fx { --c: #b99a5b }
}
* { box-sizing: border-box }
html { -webkit-text-size-adjust: 100% }
body {
  margin: 0 auto; padding: 3.5rem 1.25rem 5rem; max-width: 48rem; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", Arial, sans-serif;
  font-variant-numeric: tabular-nums;
}
h1 { margin: 0; font-size: 1.75rem; font-weight: 600; line-height: 1.2; letter-spacing: -.01em }
h2 { margin: 0 0 .35rem; font-size: 1.125rem; font-weight: 600 }
p { margin: 0 0 .75rem; max-width: 42rem }
header p { margin: .35rem 0 0; color: var(--soft); overflow-wrap: anywhere }
dl { display: grid; grid-template-columns: repeat(3, 1fr); margin: 2rem 0 0; border-top: 1px solid var(--ink) }
dl > div { padding: .6rem .5rem .6rem 0; border-bottom: 1px solid var(--line) }
dt { color: var(--soft); font-size: .8125rem }
dd { margin: 0; font-size: 1.25rem; overflow-wrap: anywhere }
dd small { color: var(--soft); font-size: .8125rem }
figure { margin: 3.5rem 0 0; break-inside: avoid }
figure#config { break-inside: auto }
figcaption, .note { color: var(--soft); font-size: .875rem; max-width: 42rem }
figcaption { margin-top: .5rem } header + .note { margin-top: 1rem }
.readout { margin: 0; min-height: 1.4rem; font-size: .8125rem; color: var(--soft) }
svg { display: block; width: 100%; height: auto; margin-top: .75rem; overflow: visible }
svg.narrow { display: none }
svg.plot { touch-action: pan-y }
svg text { font-size: 12px; fill: var(--soft) }
svg text.strong { fill: var(--ink) }
.end { text-anchor: end } .middle { text-anchor: middle }
.grid { stroke: var(--line); stroke-width: 1; shape-rendering: crispEdges }
.base { stroke: var(--soft); stroke-width: 1; shape-rendering: crispEdges }
.curve { fill: none; stroke: var(--c); stroke-linejoin: round; stroke-linecap: round; stroke-width: 1.5 }
.dot { fill: var(--c) } .ring { fill: var(--paper); stroke: var(--c); stroke-width: 1.5 }
svg text.named { fill: var(--c) }
.run { --c: var(--run) } .beside { --c: var(--beside) } .plainly { --c: var(--soft) } .wait { --c: var(--wait) }
.curve.under { stroke-width: 5; stroke-opacity: .45 } .curve.beside { stroke-width: 1.1 }
.rule { stroke: var(--soft); stroke-width: 1; visibility: hidden }
.bar { fill: var(--c) } .bar.plain { fill-opacity: .22; stroke: var(--c); stroke-width: 1 }
.work { fill: var(--work); stroke: var(--paper); stroke-width: .5 }
.blank { fill: var(--paper) } .waiting { stroke: var(--wait); stroke-width: 1 }
.lane { fill: var(--c) }
.legend { display: flex; flex-wrap: wrap; gap: .1rem 1.1rem; margin: .5rem 0 0; padding: 0; list-style: none;
  font-size: .8125rem }
svg.swatch { display: inline-block; width: .7em; height: .7em; margin: 0 .4em 0 0 }
.scroll { overflow-x: auto }
table { border-collapse: collapse; margin-top: .75rem; font-size: .8125rem; width: 100% }
th { font-weight: 600; text-align: left; vertical-align: bottom; border-bottom: 1px solid var(--ink) }
th, td { padding: .25rem 1.1rem .25rem 0; vertical-align: top } th:last-child, td:last-child { padding-right: 0 }
td { border-bottom: 1px solid var(--line) }
th.n, td.n { text-align: right; white-space: nowrap }
tr.sum td { border-top: 1px solid var(--ink); font-weight: 600 }
td small { display: block; color: var(--soft); font-size: .75rem } #bytes td.name { min-width: 9.5rem }
#config td { overflow-wrap: anywhere } #config td.name { width: 40%; color: var(--soft) }
details { margin-top: .75rem; font-size: .875rem }
summary { cursor: pointer; color: var(--soft) }
code { font: .9em ui-monospace, "SF Mono", Menlo, Consolas, monospace }
@media (max-width: 600px) {
  body { padding: 1.75rem 1rem 3rem }
  dl { grid-template-columns: repeat(2, 1fr) }
  figure { margin-top: 2.5rem }
  svg.wide { display: none } svg.narrow { display: block; max-width: 27rem }
}
@media print {
  body { padding: 0; max-width: none; font-size: 11pt } .readout { display: none } summary { list-style: none }
  svg.wide { display: block } svg.narrow { display: none }
}
"""

# Read-outs: a rule at the step nearest to the pointer, and what every curve of the figure has there.
SCRIPT = """
for (const figure of document.querySelectorAll("figure[data-read]")) {
  const read = JSON.parse(figure.dataset.read), out = figure.querySelector(".readout");
  const first = +figure.dataset.first, last = +figure.dataset.last, plots = figure.querySelectorAll("svg.plot");
  const hint = out.textContent = "Point at a curve to read its values.";
  for (const plot of plots) {
    plot.addEventListener("pointermove", event => {
      const box = plot.getBoundingClientRect(), left = +plot.dataset.left, right = +plot.dataset.right;
      const x = (event.clientX - box.left) / box.width * plot.viewBox.baseVal.width;
      const step = first + (x - left) / (right - left) * (last - first);
      let at = 0;
      for (let i = 1; i < read.steps.length; i++)
        if (Math.abs(read.steps[i] - step) < Math.abs(read.steps[at] - step)) at = i;
      const values = read.series.filter(s => s[1][at] !== null).map(s => s[0] + " " + s[1][at]);
      out.textContent = "Step " + read.steps[at].toLocaleString("en") + ": " + values.join(", ");
      for (const other of plots) {
        const l = +other.dataset.left, r = +other.dataset.right, rule = other.querySelector(".rule");
        const place = l + (read.steps[at] - first) / (last - first) * (r - l);
        rule.setAttribute("x1", place); rule.setAttribute("x2", place); rule.style.visibility = "visible";
      }
    });
    plot.addEventListener("pointerleave", () => {
      out.textContent = hint;
      for (const other of plots) other.querySelector(".rule").style.visibility = "hidden";
    });
  }
}
"""
