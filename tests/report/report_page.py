"""Pieces of a report's page, for tests."""

from __future__ import annotations

import html
import re
from pathlib import Path

from weft.report.page import write_report


def page_of(run: Path, beside: Path | None = None) -> str:
    return write_report(run, beside=beside).read_text()


def figure(page: str, name: str) -> str:
    found = re.search(rf'<figure id="{name}".*?</figure>', page, re.DOTALL)
    assert found is not None, f"no figure {name}"
    return found[0]


def words(text: str) -> str:
    """What a reader sees of a piece of HTML."""
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", text)))


def places(page: str, name: str, kind: str = "curve") -> list[list[tuple[float, float]]]:
    """The points of the lines of a figure, as drawn for wide pages."""
    wide = "".join(re.findall(r'<svg class="plot wide".*?</svg>', figure(page, name), re.DOTALL))
    lines = re.findall(rf'<path class="{kind}[^"]*" d="M([^"]*)"', wide)
    return [[tuple(map(float, place.split(","))) for place in one.split("L")] for one in lines]  # type: ignore[misc]
