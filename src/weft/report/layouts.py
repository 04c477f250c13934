"""How layouts share out the attention work of a packed batch: a table, and a picture of who holds what."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from weft.ops.sequence.deal import Bounds, count_pairs
from weft.ops.sequence.layout import LAYOUTS, shard_runs
from weft.ops.sequence.runs import Runs
from weft.report.svg import WIDTHS, line, rectangle, text

LEFT, MIDDLE, GAP, STRIP = 86.0, 500.0, 24.0, 40.0  # of the picture: where strips begin and end; their distance, height


@dataclass(frozen=True)
class Share:
    """A layout of a batch: its runs, each rank's work over the mean, and the keys that travel for each token."""

    layout: str
    runs: Runs
    work: list[float]
    moved: float


def draw_documents(total: int, median: float, spread: float, seed: int) -> Bounds:
    """Boundaries of lognormal documents; ``spread`` is the deviation of the logarithm of their lengths."""
    draw, bounds = random.Random(seed), [0]
    while bounds[-1] < total:
        bounds.append(min(total, bounds[-1] + max(1, round(draw.lognormvariate(math.log(median), spread)))))
    return tuple(bounds)


def share_out(bounds: Bounds, ranks: int, chunks_per_rank: int | None) -> list[Share]:
    """Every layout of a batch of causal documents."""
    found = []
    for layout in LAYOUTS:
        runs = shard_runs(bounds[-1], layout, ranks, bounds, chunks_per_rank)
        pairs, moved = [0] * ranks, 0
        for run, work in zip(runs, count_pairs([run.offset for run in runs] + [bounds[-1]], (bounds,)), strict=True):
            pairs[run.rank] += work
        for rank in range(ranks):
            mine, seen = [run for run in runs if run.rank == rank], 0
            for run in mine:  # what its document has before it, as far as no earlier run has brought it
                begin = max(seen, bounds[bisect_right(bounds, run.offset) - 1])
                seen = run.offset + run.length
                moved += seen - begin - run.length if run.length and begin <= run.offset else 0
        found.append(Share(layout, runs, [work * ranks / sum(pairs) for work in pairs], moved / bounds[-1]))
    return found


def run_layouts(
    ranks: int, tokens: int, chunks_per_rank: int | None, median: float, spread: float, seed: int, picture: Path | None
) -> None:
    """Print the table, and write the picture if asked for."""
    bounds = draw_documents(ranks * tokens, median, spread, seed)
    longest = max(b - a for a, b in pairwise(bounds))
    shares = share_out(bounds, ranks, chunks_per_rank)
    title = f"{len(bounds) - 1} documents, {bounds[-1]:,} tokens on {ranks} ranks, the longest {longest:,}"
    print(f"{title}\n\n| layout | busiest rank, x mean work | runs of a rank | keys that travel, x all tokens |")
    print("|---|---|---|---|")
    for one in shares:
        print(f"| {one.layout} | {max(one.work):.3f} | {len(one.runs) / ranks:.1f} | {one.moved:.2f} |")
    if picture is not None:
        picture.write_text(draw(title, bounds, ranks, shares))
        print(f"\npicture: {picture.resolve()}")


def draw(title: str, bounds: Bounds, ranks: int, shares: list[Share]) -> str:
    """The documents, and for each layout the ranks of all tokens beside the work of each rank."""
    scale = (MIDDLE - LEFT) / bounds[-1]
    most = max(max(one.work) for one in shares)
    inside = [text(0, 14, title, "strong"), text(0, 46, "documents")]
    for number, (begin, end) in enumerate(pairwise(bounds)):
        inside.append(rectangle(f"d{number % 2}", LEFT + begin * scale, 34, (end - begin) * scale, 14))
    y = 34 + 14 + GAP
    width = (WIDTHS["wide"] - MIDDLE - GAP) / ranks
    for one in shares:
        inside.append(text(0, y + STRIP / 2 + 4, one.layout))
        for run in one.runs:
            inside.append(_of_rank(run.rank, ranks, LEFT + run.offset * scale, y, run.length * scale, STRIP))
        for rank, work in enumerate(one.work):
            high = STRIP * work / most
            inside.append(_of_rank(rank, ranks, MIDDLE + GAP + rank * width, y + STRIP - high, 0.8 * width, high))
        mean = y + STRIP - STRIP / most
        inside.append(line("mean", MIDDLE + GAP - 4, mean, WIDTHS["wide"], mean))
        inside.append(text(MIDDLE + GAP, y + STRIP + 13, f"ranks have up to {max(one.work):.2f} x mean work"))
        inside.append(text(LEFT, y + STRIP + 13, f"{one.moved:.2f} keys travel for each token"))
        y += STRIP + 13 + GAP
    style = (
        "text { font: 11px system-ui, sans-serif; fill: #1c1c1a } .strong { font-weight: 600 } .paper { fill: #fff } "
        ".d0 { fill: #6e6e6a } .d1 { fill: #c4c4be } .mean { stroke: #1c1c1a; stroke-dasharray: 3 2 }"
    )
    box = f"-16 0 {WIDTHS['wide'] + 32} {y:.0f}"
    background = '<rect class="paper" x="-16" width="100%" height="100%"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}">\n<style>{style}</style>\n{background}\n'
    return head + "\n".join(inside) + "\n</svg>\n"


def _of_rank(rank: int, ranks: int, x: float, y: float, width: float, height: float) -> str:
    """A rectangle in the colour of a rank."""
    colour = f' fill="hsl({360 * rank / ranks:.0f} 62% {60 - 16 * (rank % 2)}%)"'
    return rectangle("rank", x, y, width, height, f"rank {rank}", colour)
