"""Curves over steps and bars of bytes, as SVG text.

Every chart is drawn for a width: once for wide pages, once for narrow ones, with letters of the same size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from html import escape

from weft.report.scale import Point, Scale, fit, plain_number, size_of, spread, thin
from weft.report.style import family_class

WIDTHS = {"wide": 728, "narrow": 340}
LETTER = 6.4  # width of a letter of a label, on the wide side
COLUMN = 4  # pixels of a column in which points are thinned
LEFT = 56.0  # where plots begin: room for numbers, the same in all of them


@dataclass(frozen=True)
class Curve:
    """A line, or points if ``mark`` is a class of them, with a name at its end. ``style`` is a class of the sheet."""

    name: str
    style: str
    points: list[Point]
    mark: str = ""


def svg(kind: str, width: str, height: float, label: str, inside: list[str], more: str = "") -> str:
    """One picture; ``width`` is a key of WIDTHS."""
    box = f'viewBox="0 0 {WIDTHS[width]} {height:.0f}"'
    return (
        f'<svg class="{kind} {width}" {box} role="img" aria-label="{escape(label)}"{more}>\n'
        + "\n".join(inside)
        + "\n</svg>"
    )


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """Words whose baseline is at y."""
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{named}>{escape(words)}</text>'


def line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    """A straight line."""
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def rectangle(kind: str, x: float, y: float, width: float, height: float, title: str = "", more: str = "") -> str:
    """A rectangle, with words for a pointer that rests on it."""
    hint = f"><title>{escape(title)}</title></rect>" if title else "/>"
    return f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}"{more}{hint}'


def pieces(points: list[Point]) -> list[list[Point]]:
    """The points cut where one is not finite."""
    cut: list[list[Point]] = [[]]
    for point in points:
        if math.isfinite(point[1]):
            cut[-1].append(point)
        elif cut[-1]:
            cut.append([])
    return [piece for piece in cut if piece]


def plot(
    curves: list[Curve],
    steps: tuple[float, float],
    *,
    title: str,
    height: int,
    log: bool = False,
    zero: bool = False,
    words: Callable[[float], str] = plain_number,
    axis: bool = True,
    room: int = 9,
) -> str:
    """Curves over steps ``first..last``, for both widths. Values on a log scale must be positive or not finite.

    ``words`` writes the values at the ticks and ``axis`` says whether the numbers of the steps stand below. ``room`` is
    how many letters the names at the ends need: plots of one figure have the same, so that their steps are aligned.
    """
    values = [y for curve in curves for _, y in curve.points if math.isfinite(y)]
    if not values:
        return f'<p class="note">{escape(title)}: no finite value.</p>'
    first, last = steps
    drawn = []
    for width, pixels in WIDTHS.items():
        top, bottom = 26.0, height - (34.0 if axis else 8.0)
        up = fit(values, bottom, top, log=log, zero=zero)
        ticks = up.ticks(max(2, int((bottom - top) / 30)))
        left, right = LEFT, pixels - 14 - LETTER * room
        along = Scale(first, last, left, right)
        inside = [text(0, 12, title, "strong")]
        for tick in ticks:
            inside += [line("grid", left, up(tick), right, up(tick)), text(left - 8, up(tick) + 4, words(tick), "end")]
        inside.append(line("base", left, bottom, right, bottom))
        if axis:
            inside += step_axis(along, bottom, 10 if width == "wide" else 5)
        columns = int((right - left) / COLUMN)
        for curve in curves:
            inside += draw(curve, along, up, columns)
        inside += end_labels([c for c in curves if not c.mark], up, right, top, bottom)
        inside.append(line("rule", left, top, left, bottom))
        more = f' data-left="{left:.1f}" data-right="{right:.1f}"'
        drawn.append(
            svg("plot", width, height, f"{title} over steps: {', '.join(c.name for c in curves)}", inside, more)
        )
    return "\n".join(drawn)


def step_axis(along: Scale, bottom: float, count: int) -> list[str]:
    """Numbers of steps below a plot. Only whole ones: a run of one step has a scale from half a step before it."""
    drawn = []
    for tick in along.ticks(count):
        if tick == round(tick):
            x = along(tick)
            drawn += [line("base", x, bottom, x, bottom + 4), text(x, bottom + 17, f"{tick:,.0f}", "middle")]
    return [*drawn, text(along.end + 24, bottom + 17, "step")]


def draw(curve: Curve, along: Scale, up: Scale, columns: int) -> list[str]:
    """A point that stands alone is a dot, as a line through one point cannot be seen."""
    if curve.mark:
        finite = [point for point in thin(curve.points, columns // 2) if math.isfinite(point[1])]
        small = len(finite) > columns // 3  # so near to one another that they would hide the lines
        radius = (1.6 if small else 3.5) * (1.6 if curve.mark == "ring" else 1)
        return [f'<circle class="{curve.mark} {curve.style}" cx="{along(x):.1f}" cy="{up(y):.1f}" r="{radius:.1f}"/>'
                for x, y in finite]  # fmt: skip
    drawn = []
    for piece in pieces(thin(curve.points, columns)):
        if len(piece) == 1:
            x, y = along(piece[0][0]), up(piece[0][1])
            drawn.append(f'<circle class="dot {curve.style}" cx="{x:.1f}" cy="{y:.1f}" r="2"/>')
        else:
            places = "L".join(f"{along(x):.1f},{up(y):.1f}" for x, y in piece)
            drawn.append(f'<path class="curve {curve.style}" d="M{places}"/>')
    return drawn


def end_labels(curves: list[Curve], up: Scale, right: float, top: float, bottom: float) -> list[str]:
    """The names of curves where they end, moved apart."""
    found = [(curve, [y for _, y in curve.points if math.isfinite(y)]) for curve in curves]
    named = [(curve, up(values[-1])) for curve, values in found if values]
    places = spread([place for _, place in named], 15, top, bottom - 8)
    return [
        text(right + 10, y + 4, curve.name, f"named {curve.style}") for (curve, _), y in zip(named, places, strict=True)
    ]


def byte_bars(rows: list[tuple[str, float, float | None]], label: str) -> str:
    """Bars of (family, bytes of weft, bytes of plain pieces or None) on a log scale, for both widths."""
    sizes = [size for _, ours, plain in rows for size in (ours, plain or 0.0) if size > 0]
    if not sizes:
        return ""
    low, high = 10.0 ** math.floor(math.log10(min(sizes) / 1.5)), max(sizes)
    drawn = []
    for width, pixels in WIDTHS.items():
        names_above = width == "narrow"
        left, right = (0.0 if names_above else 132.0), pixels - (112.0 if names_above else 116.0)
        along = Scale(low, max(high, low * 10), left, right, log=True)
        inside: list[str] = []
        y = 8.0
        for family, ours, plain in rows:
            style = "all" if family == "all" else family_class(family)
            pair = [("weft", ours, "bar")] + ([] if plain is None else [("plain", plain, "bar plain")])
            if names_above:
                inside.append(text(0, y + 9, family, "strong"))
                y += 15
            else:
                inside.append(text(0, y + 7 * len(pair) + 3, family, "strong"))
            for who, size, kind in pair:
                end = along(size) if size > 0 else left
                said = f"{who} {size_of(size)}" if size > 0 else f"{who} nothing"
                if size > 0:
                    inside.append(rectangle(f"{kind} {style}", left, y, end - left, 10, f"{family}: {said}"))
                inside.append(text(end + 6, y + 9.5, said))
                y += 14
            y += 12
        for tick in along.ticks(6 if width == "wide" else 4):
            x = along(tick)
            inside.insert(0, line("grid", x, 0, x, y))
            inside.append(text(x, y + 16, size_of(tick, round_number=True), "middle" if x > left + 12 else ""))
        inside.append(line("base", left, y, right, y))
        drawn.append(svg("bars", width, y + 22, label, inside))
    return "\n".join(drawn)
