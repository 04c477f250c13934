"""Pieces of a chart as SVG text: shapes, scales from values to places, round numbers for ticks, words for numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]
WIDTHS = {"wide": 728, "narrow": 340}  # every chart is drawn for wide and for narrow pages, with letters of one size
LETTER = 6.4  # width of a letter of a label, on the wide side


def drawing(kind: str, width: str, height: float, label: str, inside: list[str], more: str = "") -> str:
    """A whole chart; ``width`` is a key of WIDTHS."""
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


def swatch(inside: str) -> str:
    """A small square with shapes of 10 x 10 in it."""
    return f'<svg class="swatch" viewBox="0 0 10 10" aria-hidden="true">{inside}</svg>'


def colour_swatch(kind: str) -> str:
    """A small square in the colour of a class."""
    return swatch(f'<rect class="{kind}" width="10" height="10"/>')


@dataclass(frozen=True)
class Scale:
    """Maps ``low..high`` to ``start..end``, linearly or by logarithm."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self, count: int) -> list[float]:
        """About ``count`` round numbers within the scale."""
        return log_ticks(self.low, self.high, count) if self.log else round_ticks(self.low, self.high, count)


def round_ticks(low: float, high: float, count: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten: of the least step that needs no more than about ``count``."""
    rough = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return [place * step for place in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float, count: int) -> list[float]:
    """Powers of ten, not all if there are many; with less than two of them, 1, 2 and 5 times powers of ten."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    if last > first:
        return [10.0**power for power in range(first, last + 1, max(1, math.ceil((last - first + 1) / count)))]
    fine = [factor * 10.0**power for power in range(first - 1, last + 1) for factor in (1, 2, 5)]
    return [tick for tick in fine if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]


def fit(values: list[float], start: float, end: float, *, log: bool = False, zero: bool = False) -> Scale:
    """The scale that holds all values, with a little margin; one value gets some on both sides."""
    low, high = min(values), max(values)
    if log:
        return Scale(low / 1.3, high * 1.3, start, end, log=True)
    if zero:
        low, high = min(0.0, low), max(0.0, high) * 1.08
    margin = 0.0 if zero and high > low else 0.05 * (high - low) or abs(high) * 0.1 or 1.0
    return Scale(low if zero else low - margin, high + margin, start, end)


def thin(points: list[Point], columns: int) -> list[Point]:
    """At most four points for each column of the plot: its first, lowest, highest and last. No extreme is lost.

    Points are in order of x. A point that is not finite stays, as the first one of its column: it breaks the line.
    """
    if len(points) <= 4 * columns:
        return points
    first, length = points[0][0], points[-1][0] - points[0][0]
    kept: set[int] = set()
    columns_of: dict[int, list[int]] = {}
    for place, (x, _) in enumerate(points):
        columns_of.setdefault(min(columns - 1, int((x - first) / length * columns)), []).append(place)
    for column in columns_of.values():
        finite = [place for place in column if math.isfinite(points[place][1])]
        kept.update([place for place in column if not math.isfinite(points[place][1])][:1])
        if finite:
            by_value = sorted(finite, key=lambda place: points[place][1])
            kept.update((finite[0], finite[-1], by_value[0], by_value[-1]))
    return [points[place] for place in sorted(kept)]


def spread(places: list[float], apart: float, low: float, high: float) -> list[float]:
    """Places of labels moved until they are ``apart``, in the same order, within low..high if there is space."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    moved = list(places)
    floor = low
    for index in order:
        moved[index] = floor = max(moved[index], floor)
        floor += apart
    ceiling = high
    for index in reversed(order):
        moved[index] = ceiling = min(moved[index], ceiling)
        ceiling -= apart
    return moved


def short(value: float) -> str:
    """A number with four digits that count, thousands apart: 26,130 or 2.141 or 3.14e-5."""
    if not math.isfinite(value):
        return "not finite"
    if value == 0:
        return "0"
    if abs(value) >= 1e7 or abs(value) < 1e-4:
        return scientific(f"{value:.2e}")
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def scientific(written: str) -> str:
    """1e-5 for 1.00e-05."""
    mantissa, exponent = written.split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def plain_number(value: float) -> str:
    """A tick: no digit more than it needs."""
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-4:
        return scientific(f"{value:.6e}")
    return f"{value:,.6f}".rstrip("0").rstrip(".")


def size_of(count: float, *, round_number: bool = False) -> str:
    """Bytes in words, with three digits that count: 1.23 MB. A round number needs fewer: 10 kB."""
    unit = "B"
    for larger in ("kB", "MB", "GB", "TB", "PB", "EB"):
        if count < 999.5:
            break
        count, unit = count / 1000, larger
    if round_number or unit == "B":
        return f"{plain_number(round(count, 3))} {unit}"
    digits = 2 if count < 9.995 else 1 if count < 99.95 else 0
    return f"{count:.{digits}f} {unit}"
