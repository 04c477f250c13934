"""`weft layouts`: its figures against the plan of attention, and its picture."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from weft.cli import show_layouts
from weft.ops.attention.plan import count, plan_attention
from weft.ops.sequence.layout import LAYOUTS
from weft.ops.sequence.runs import lengths_of
from weft.report.layouts import draw_documents, share_out


def test_its_figures_are_those_of_the_plan() -> None:
    for ranks, seed in ((3, 0), (8, 1)):
        bounds = draw_documents(700 * ranks, 200, 1.5, seed)
        for one in share_out(bounds, ranks, None):
            plan = plan_attention(one.runs, lengths_of(one.runs, ranks), bounds, True, (-1, -1))
            sent = sum(count(plan.visible_to(owner, rank)) for owner in range(ranks) for rank in range(ranks))
            assert one.moved == pytest.approx(sent / bounds[-1])
            pairs = [plan.pairs(rank) for rank in range(ranks)]  # where tokens see themselves half
            assert [work * sum(pairs) / ranks for work in one.work] == pytest.approx(pairs, rel=0.05)
            assert sum(one.work) == pytest.approx(ranks)


def test_the_table_and_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show_layouts(ranks=4, tokens=512, picture=tmp_path / "layouts.svg")
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"| {LAYOUTS[-1]}")]
    assert len(rows) == 1 and float(rows[0].split("|")[2]) <= 1.02
    drawn = ElementTree.parse(tmp_path / "layouts.svg").getroot()
    titles = {title.text for title in drawn.iter("{http://www.w3.org/2000/svg}title")}
    assert titles == {f"rank {rank}" for rank in range(4)}


def test_the_docs_have_what_the_commands_make(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`weft layouts --picture docs/layouts.svg` and `weft layouts --ranks 64`, the same to the last character."""
    docs, cells = Path(__file__).parents[2] / "docs", {}
    for line in (docs / "attention.md").read_text().splitlines():
        if (row := re.fullmatch(r"\| (\w+) \| (\d+) (\|.*)", line)) is not None:
            cells[int(row[2]), row[1]] = row[3]
    for ranks in (8, 64):
        show_layouts(ranks=ranks, picture=tmp_path / f"{ranks}.svg")
        printed = capsys.readouterr().out
        for layout in LAYOUTS:
            assert f"| {layout} {cells[ranks, layout]}\n" in printed
    assert (tmp_path / "8.svg").read_text() == (docs / "layouts.svg").read_text()


def test_wrong_flags_are_told() -> None:
    with pytest.raises(ValueError, match="--ranks must be at least 1, got 0"):
        show_layouts(ranks=0)
    with pytest.raises(ValueError, match="--median must be at least 1 and --spread from 0 to 5, got 0"):
        show_layouts(median=0)
