"""One picture of a run, as an SVG file that stands alone: what a step sends, and when."""

from __future__ import annotations

import re
from pathlib import Path

from weft.report.charts import WIDTHS, byte_bars, text
from weft.report.figures import byte_rows
from weft.report.run import read_run, write_page
from weft.report.style import STYLE
from weft.report.timeline import draw_timeline

MARGIN = 16


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
         byte_bars(byte_rows(read), "bytes")),
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
