"""Curves over steps, bars of bytes and the timeline of a step on all ranks, as SVG text."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from html import escape

from weft.report import svg
from weft.report.run import Span, Timeline, family_class, in_order
from weft.report.svg import LETTER, WIDTHS, Point, Scale, fit, plain_number, size_of, spread, thin

COLUMN = 4  # pixels of a column in which points are thinned
LEFT = 56.0  # where plots begin: space for numbers, the same in all of them
WORK, LANE, GAP = 20, 6, 18  # heights: of the row of work, of a family's lane, between ranks


@dataclass(frozen=True)
class Curve:
    """A line, or points if ``mark`` is a class of them, with a name at its end. ``style`` is a class of the sheet."""

    name: str
    style: str
    points: list[Point]
    mark: str = ""


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
    letters: int = 9,
) -> str:
    """Curves over steps ``first..last``, for both widths. Values on a log scale must be positive or not finite.

    ``words`` writes the values at the ticks and ``axis`` says whether the numbers of the steps stand below. ``letters``
    is how many the names at the ends need: plots of one figure have the same, so that their steps are aligned.
    """
    values = [y for curve in curves for _, y in curve.points if math.isfinite(y)]
    if not values:
        return f'<p class="note">{escape(title)}: no finite value.</p>'
    label = f"{title} over steps: {', '.join(curve.name for curve in curves)}"
    drawn = []
    for width, pixels in WIDTHS.items():
        top, bottom = 26.0, height - (34.0 if axis else 8.0)
        up = fit(values, bottom, top, log=log, zero=zero)
        left, right = LEFT, pixels - 14 - LETTER * letters
        along = Scale(*steps, left, right)
        inside = [svg.text(0, 12, title, "strong")]
        for tick in up.ticks(max(2, int((bottom - top) / 30))):
            y = up(tick)
            inside += [svg.line("grid", left, y, right, y), svg.text(left - 8, y + 4, words(tick), "end")]
        inside.append(svg.line("base", left, bottom, right, bottom))
        if axis:
            inside += step_axis(along, bottom, 10 if width == "wide" else 5)
        columns = int((right - left) / COLUMN)
        for curve in curves:
            inside += draw(curve, along, up, columns)
        inside += end_labels([c for c in curves if not c.mark], up, right, top, bottom)
        inside.append(svg.line("rule", left, top, left, bottom))
        more = f' data-left="{left:.1f}" data-right="{right:.1f}"'
        drawn.append(svg.drawing("plot", width, height, label, inside, more))
    return "\n".join(drawn)


def step_axis(along: Scale, bottom: float, count: int) -> list[str]:
    """Numbers of steps below a plot. Only whole ones: a run of one step has a scale from half a step before it."""
    drawn = []
    for tick in along.ticks(count):
        if tick == round(tick):
            x = along(tick)
            drawn += [svg.line("base", x, bottom, x, bottom + 4), svg.text(x, bottom + 17, f"{tick:,.0f}", "middle")]
    return [*drawn, svg.text(along.end + 24, bottom + 17, "step")]


def draw(curve: Curve, along: Scale, up: Scale, columns: int) -> list[str]:
    """A point that stands alone is a dot, as a line through one point cannot be seen."""
    if curve.mark:
        finite = [point for point in thin(curve.points, columns // 2) if math.isfinite(point[1])]
        small = len(finite) > columns // 3  # so near to one another that they would hide the lines
        radius = (1.6 if small else 3.5) * (1.6 if curve.mark == "ring" else 1)
        return [f'<circle class="{curve.mark} {curve.style}" cx="{along(x):.1f}" cy="{up(y):.1f}" r="{radius:.1f}"/>'
                for x, y in finite]  # fmt: skip
    drawn = []
    for is_finite, points in itertools.groupby(thin(curve.points, columns), lambda point: math.isfinite(point[1])):
        piece = list(points) if is_finite else []
        if len(piece) == 1:
            x, y = along(piece[0][0]), up(piece[0][1])
            drawn.append(f'<circle class="dot {curve.style}" cx="{x:.1f}" cy="{y:.1f}" r="2"/>')
        elif piece:
            places = "L".join(f"{along(x):.1f},{up(y):.1f}" for x, y in piece)
            drawn.append(f'<path class="curve {curve.style}" d="M{places}"/>')
    return drawn


def end_labels(curves: list[Curve], up: Scale, right: float, top: float, bottom: float) -> list[str]:
    """The names of curves where they end, moved apart."""
    found = [(curve, [y for _, y in curve.points if math.isfinite(y)]) for curve in curves]
    named = [(curve, up(values[-1])) for curve, values in found if values]
    places = spread([place for _, place in named], 15, top, bottom - 8)
    return [
        svg.text(right + 10, y + 4, curve.name, f"named {curve.style}")
        for (curve, _), y in zip(named, places, strict=True)
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
                inside.append(svg.text(0, y + 9, family, "strong"))
                y += 15
            else:
                inside.append(svg.text(0, y + 7 * len(pair) + 3, family, "strong"))
            for who, size, kind in pair:
                end = along(size) if size > 0 else left
                said = f"{who} {size_of(size)}" if size > 0 else f"{who} nothing"
                if size > 0:
                    inside.append(svg.rectangle(f"{kind} {style}", left, y, end - left, 10, f"{family}: {said}"))
                inside.append(svg.text(end + 6, y + 9.5, said))
                y += 14
            y += 12
        for tick in along.ticks(6 if width == "wide" else 4):
            x = along(tick)
            inside.insert(0, svg.line("grid", x, 0, x, y))
            inside.append(svg.text(x, y + 16, size_of(tick, round_number=True), "middle" if x > left + 12 else ""))
        inside.append(svg.line("base", left, y, right, y))
        drawn.append(svg.drawing("bars", width, y + 22, label, inside))
    return "\n".join(drawn)


def merge(spans: list[Span], nearest: float, *, by_name: bool) -> list[Span]:
    """Spans that overlap or are nearer than can be seen, joined.

    With ``by_name`` only those of one name, or so short that they could not be seen by themselves.
    """
    joined: list[Span] = []
    for span in sorted(spans, key=lambda s: (s.start, s.end)):
        before = joined[-1] if joined else None
        if before is None or span.start - before.end > nearest:
            joined.append(span)
            continue
        longer = max(before, span, key=lambda s: s.end - s.start)
        shorter = before if longer is span else span
        if by_name and before.name != span.name and shorter.end - shorter.start > 2 * nearest:
            joined.append(span)
            continue
        name = longer.name if by_name or before.name == span.name else joined_names(before.name, span.name)
        joined[-1] = Span(name, longer.family, span.kind, before.start, max(before.end, span.end))
    return joined


def joined_names(one: str, other: str) -> str:
    """Names of spans that became one; a long list is cut."""
    if other in one.split(", ") or one.endswith("…"):
        return one
    return f"{one}, {other}" if len(one) + len(other) < 60 else f"{one}, …"


def length(spans: list[Span], kind: str) -> float:
    """Seconds in which at least one span of a kind is on."""
    return sum(span.end - span.start for span in merge([s for s in spans if s.kind == kind], 0.0, by_name=False))


def families_of(timeline: Timeline) -> list[str]:
    """Families that have something under way."""
    return in_order(span.family for _, spans in timeline.ranks for span in spans if span.kind == "under way")


def draw_timeline(timeline: Timeline) -> str:
    """A row for each rank, for both widths: work with waits over it, below it a lane for each family under way."""
    lanes = families_of(timeline)
    each = WORK + (LANE + 1) * len(lanes) + GAP
    height = each * len(timeline.ranks) + 30.0
    names = [f"rank {rank}" for rank, _ in timeline.ranks]
    drawn = []
    for width, pixels in WIDTHS.items():
        left, right = 12 + LETTER * max(len(name) for name in names), pixels - 12.0
        along = Scale(0.0, timeline.seconds, left, right)
        milliseconds = Scale(0.0, 1000 * timeline.seconds, left, right)
        nearest = 0.4 * timeline.seconds / (right - left)
        bottom = each * len(timeline.ranks) + 2.0
        hatch = f"hatch-{width}"
        inside = [
            f'<defs><pattern id="{hatch}" width="5" height="5" patternUnits="userSpaceOnUse" '
            'patternTransform="rotate(45)"><rect class="bar wait" width="2.6" height="5"/></pattern></defs>'
        ]
        for tick in milliseconds.ticks(10 if width == "wide" else 4):
            x = milliseconds(tick)
            inside += [svg.line("grid", x, 0, x, bottom), svg.text(x, bottom + 16, plain_number(tick), "middle")]
        inside += [svg.line("base", left, bottom, right, bottom), svg.text(0, bottom + 16, "ms")]
        for place, (name, (_, spans)) in enumerate(zip(names, timeline.ranks, strict=True)):
            y = each * place + GAP / 2
            inside.append(svg.text(0, y + WORK / 2 + 4, name, "strong"))
            rows = [("work", spans, y), ("exposed", spans, y)]
            for lane, family in enumerate(lanes):
                of_family = [span for span in spans if span.family == family]
                rows.append(("under way", of_family, y + WORK + 2 + (LANE + 1) * lane))
            for kind, found, top in rows:
                alike = [span for span in found if span.kind == kind]
                for span in merge(alike, nearest, by_name=kind == "work"):
                    inside += draw_span(span, along, top, hatch)
        drawn.append(svg.drawing("timeline", width, height, f"One step on {len(names)} ranks, in milliseconds", inside))
    return "\n".join(drawn)


def draw_span(span: Span, along: Scale, y: float, hatch: str) -> list[str]:
    """Work with its name where there is space; a wait so that it shows on work and on nothing; or a piece of a lane."""
    start, end = along(span.start), along(span.end)
    took = f"{1000 * (span.end - span.start):.3g} ms from {1000 * span.start:.3g} ms"
    if span.kind == "work":
        drawn = [svg.rectangle("work", start, y, max(0.5, end - start), WORK, f"{span.name}: {took}")]
        if LETTER * len(span.name) + 8 < end - start:
            drawn.append(svg.text((start + end) / 2, y + WORK / 2 + 4, span.name, "middle strong"))
        return drawn
    if span.kind == "exposed":  # paper below, hatching over it, and a line around
        size, hint = max(1.0, end - start), f"waits for {span.family}: {span.name}, {took}"
        hatching = svg.rectangle("waiting", start, y, size, WORK, hint, f' fill="url(#{hatch})"')
        return [svg.rectangle("blank", start, y, size, WORK), hatching]
    kind, hint = f"lane {family_class(span.family)}", f"{span.family} under way: {span.name}, {took}"
    return [svg.rectangle(kind, start, y, max(0.8, end - start), LANE, hint)]


def legend(timeline: Timeline) -> str:
    """What the colours of a timeline mean."""
    kinds = [("work", "work")]
    kinds += [(f"lane {family_class(family)}", f"{family} under way") for family in families_of(timeline)]
    hatched = '<rect class="bar wait" width="4" height="10"/><rect class="bar wait" x="7" width="3" height="10"/>'
    items = [*((svg.colour_swatch(kind), words) for kind, words in kinds), (svg.swatch(hatched), "waiting (exposed)")]
    return f'<ul class="legend">{"".join(f"<li>{square}{escape(words)}</li>" for square, words in items)}</ul>'
