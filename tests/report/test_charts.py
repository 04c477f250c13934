"""Scales, ticks, words of numbers and joined spans of a report's charts."""

from __future__ import annotations

import math
import random

import pytest

from weft.report.charts import merge
from weft.report.run import Span
from weft.report.svg import fit, log_ticks, round_ticks, short, size_of, spread, thin


def test_ticks_are_round_and_inside() -> None:
    assert round_ticks(0, 200, 10) == [0, 20, 40, 60, 80, 100, 120, 140, 160, 180, 200]
    assert round_ticks(-0.3, 1.1, 4) == [0, 0.5, 1.0]
    assert log_ticks(3e-6, 2e-3, 5) == pytest.approx([1e-5, 1e-4, 1e-3])
    assert log_ticks(1.5, 8, 5) == pytest.approx([2, 5])
    for low, high in ((2.0, 2.5), (1e-300, 2e-300), (-1e299, 1e299), (0, 3), (7, 7), (0, 0)):
        scale = fit([low, high], 0, 100)
        assert scale.low < low and scale.high > high and len(scale.ticks(5)) <= 8
    narrow = fit([2.0, 2.0 + 1e-15], 0, 100)
    assert narrow.low < narrow.high and len(narrow.ticks(5)) <= 8


def test_labels_are_moved_apart_in_their_order() -> None:
    assert spread([50, 50, 10], 15, 0, 100) == [50, 65, 10]
    assert spread([98, 99], 15, 0, 100) == [85, 100]


def test_thinning_keeps_first_last_and_extremes() -> None:
    noise = random.Random(1)
    points = [(float(x), noise.gauss(0, 1)) for x in range(10_000)]
    points[4000] = (4000.0, math.nan)
    kept = thin(points, 50)
    assert len(kept) <= 201 and kept == sorted(kept, key=lambda point: point[0])
    assert {points[0], points[-1], min(points[:4000], key=lambda p: p[1])} <= set(kept)
    assert any(math.isnan(y) for _, y in kept) and thin(points[:100], 50) == points[:100]


def test_words_of_numbers() -> None:
    assert [short(x) for x in (26_130.4, 2.14159, 3.14e-5, 0, math.nan)] == [
        "26,130", "2.142", "3.14e-5", "0", "not finite",
    ]  # fmt: skip
    assert [size_of(x) for x in (0, 999, 1000, 999_400, 999_600, 12_345_678, 831.3e6)] == [
        "0 B", "999 B", "1.00 kB", "999 kB", "1.00 MB", "12.3 MB", "831 MB",
    ]  # fmt: skip


def test_spans_are_joined_only_where_nobody_could_see_them_apart() -> None:
    def span(start: float, end: float, name: str = "a") -> Span:
        return Span(name, "REKLS", "work", start, end)

    assert merge([span(2, 3), span(0, 1)], 0.5, by_name=False) == [span(0, 1), span(2, 3)]
    assert merge([span(0, 5), span(1, 2), span(4, 6)], 0.0, by_name=False) == [span(0, 6)]
    assert merge([span(0, 5), span(5, 9, "b")], 0.5, by_name=True) == [span(0, 5), span(5, 9, "b")]
    assert merge([span(0, 5), span(5, 5.1, "b")], 0.5, by_name=True) == [span(0, 5.1)]
    assert merge([span(0, 5), span(5, 9, "b")], 0.5, by_name=False) == [span(0, 9, "a, b")]
