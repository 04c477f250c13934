"""One step on all ranks as SVG: what each rank computes, what is under way meanwhile, and where it waits."""

from __future__ import annotations

from html import escape

from weft.report.charts import LETTER, WIDTHS, line, rectangle, svg, text
from weft.report.run import Span, Timeline, in_order
from weft.report.scale import Scale, plain_number
from weft.report.style import family_class

WORK, LANE, GAP = 20, 6, 18  # heights: of the row of work, of a family's lane, between ranks


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
            inside += [line("grid", x, 0, x, bottom), text(x, bottom + 16, plain_number(tick), "middle")]
        inside += [line("base", left, bottom, right, bottom), text(0, bottom + 16, "ms")]
        for place, (name, (_, spans)) in enumerate(zip(names, timeline.ranks, strict=True)):
            y = each * place + GAP / 2
            inside.append(text(0, y + WORK / 2 + 4, name, "strong"))
            inside += draw_work(spans, along, y, nearest)
            inside += draw_waits(spans, along, y, nearest, hatch)
            for lane, family in enumerate(lanes):
                under_way = [span for span in spans if span.kind == "under way" and span.family == family]
                top = y + WORK + 2 + (LANE + 1) * lane
                for span in merge(under_way, nearest, by_name=False):
                    start, end = along(span.start), along(span.end)
                    hint = f"{family} under way: {span.name}, {took(span)}"
                    inside.append(
                        rectangle(f"lane {family_class(family)}", start, top, max(0.8, end - start), LANE, hint)
                    )
        drawn.append(svg("timeline", width, height, f"One step on {len(names)} ranks, in milliseconds", inside))
    return "\n".join(drawn)


def draw_work(spans: list[Span], along: Scale, y: float, nearest: float) -> list[str]:
    """Pieces of work, with their names where there is room."""
    drawn = []
    for span in merge([s for s in spans if s.kind == "work"], nearest, by_name=True):
        start, end = along(span.start), along(span.end)
        drawn.append(rectangle("work", start, y, max(0.5, end - start), WORK, f"{span.name}: {took(span)}"))
        if LETTER * len(span.name) + 8 < end - start:
            drawn.append(text((start + end) / 2, y + WORK / 2 + 4, span.name, "middle strong"))
    return drawn


def draw_waits(spans: list[Span], along: Scale, y: float, nearest: float, hatch: str) -> list[str]:
    """Paper below, hatching over it, and a line around, so that a wait shows on work and on nothing."""
    drawn = []
    for span in merge([s for s in spans if s.kind == "exposed"], nearest, by_name=False):
        start, size = along(span.start), max(1.0, along(span.end) - along(span.start))
        drawn.append(rectangle("blank", start, y, size, WORK))
        hint = f"waits for {span.family}: {span.name}, {took(span)}"
        drawn.append(rectangle("waiting", start, y, size, WORK, hint, f' fill="url(#{hatch})"'))
    return drawn


def took(span: Span) -> str:
    """How long a span is, and since when."""
    return f"{1000 * (span.end - span.start):.3g} ms from {1000 * span.start:.3g} ms"


def legend(timeline: Timeline) -> str:
    """What the colours of a timeline mean."""
    families = [(f"lane {family_class(family)}", f"{family} under way") for family in families_of(timeline)]
    kinds = [("work", "work"), *families]
    items = [f"<li>{swatch(kind)}{escape(words)}</li>" for kind, words in kinds]
    square = '<rect class="bar wait" width="4" height="10"/><rect class="bar wait" x="7" width="3" height="10"/>'
    items.append(f"<li>{swatch_of(square)}waiting (exposed)</li>")
    return f'<ul class="legend">{"".join(items)}</ul>'


def swatch(kind: str) -> str:
    """A small square in the colour of a class."""
    return swatch_of(f'<rect class="{kind}" width="10" height="10"/>')


def swatch_of(inside: str) -> str:
    """A small square with something in it."""
    return f'<svg class="swatch" viewBox="0 0 10 10" aria-hidden="true">{inside}</svg>'
