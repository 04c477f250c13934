"""The report of a run: every figure is there, with the right numbers."""

from __future__ import annotations

import html
import json
import math
import re
import statistics
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import made_up_run
import pytest
from made_up_run import metrics, write_metrics, write_run
from report_page import figure, page_of, places, words

from weft.report.page import show_report
from weft.report.run import FAMILIES
from weft.report.svg import size_of

FIGURES = ("loss", "speed", "bytes", "timeline", "config")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "demo", steps=60)


def test_two_runs_on_as_many_ranks_have_two_names(run: Path, tmp_path: Path) -> None:
    loss = figure(page_of(run, write_run(tmp_path / "other", steps=60)), "loss")
    assert "over steps: 4 ranks, 4 ranks, beside" in loss


def test_every_figure_is_there_with_a_title_and_a_label(run: Path) -> None:
    page = page_of(run)
    assert re.findall(r'<figure id="(\w+)"', page) == list(FIGURES)
    for name in FIGURES:
        assert re.match(r'<figure id="\w+" aria-label="[^"]+"[^>]*>\s*<h2>[^<]+</h2>', figure(page, name))
    for name in FIGURES[:-1]:
        drawn = re.findall(r"<svg class=\"\w+ (wide|narrow)\"[^>]*>", figure(page, name))
        assert drawn.count("wide") == drawn.count("narrow") > 0
    labels = re.findall(r"<svg class=\"(?!swatch)[^>]*>", page)
    assert labels and all(re.search('role="img" aria-label="[^"]+"', label) for label in labels)


def test_the_head_has_the_numbers_of_the_run(run: Path) -> None:
    lines = metrics(60, seed=4)
    head = words(page_of(run).partition("</header>")[0])
    seconds = sum(line["seconds"] for line in lines)
    waited = sum(line["exposed_share"] * line["seconds"] for line in lines)
    assert f"Final loss {lines[-1]['loss']:.4g} " in head
    assert f"Validation loss {lines[49]['valid_loss']:.4g} step 50 " in head
    assert f"Steps 60 in {seconds:.0f} s" in head and "Ranks 4 " in head
    assert f"Tokens per second {statistics.median(x['tokens_per_second'] for x in lines):,.0f} median" in head
    assert f"Exposed communication {100 * waited / seconds:.1f} %" in head


def test_both_losses_are_drawn_and_their_largest_difference_is_told(run: Path, tmp_path: Path) -> None:
    lines = metrics(60)
    other = [dict(line, loss=line["loss"] * (1 + (0.004 if line["step"] == 33 else 1e-5))) for line in lines]
    write_metrics(run, lines)
    write_metrics(write_run(tmp_path / "one", ranks=1), other[:50])
    page = page_of(run, tmp_path / "one")
    assert "differ by at most 0.003984 relative (step 33, over 50 steps)" in figure(page, "loss")
    mine, beside, apart = places(page, "loss")
    assert len(mine) == 60 and len(beside) == 50 and len(apart) == 50
    assert all(abs(a[0] - b[0]) < 0.11 and abs(a[1] - b[1]) < 1.5 for a, b in zip(mine, beside, strict=False))
    assert apart[0][0] == mine[0][0] and min(apart, key=lambda place: place[1])[0] == mine[32][0]
    assert all(f">{name}</text>" in figure(page, "loss") for name in ("4 ranks", "one process"))
    assert figure(page, "loss").count('<circle class="dot run"') == 2 * 2  # validation at steps 25 and 50, both widths
    assert figure(page, "loss").count('<circle class="ring beside"') == 2 * 2


def test_equal_losses_are_called_equal(run: Path) -> None:
    assert "equal to the bit at all of 60 steps" in figure(page_of(run, run), "loss")


def test_bytes_are_compared_family_by_family(run: Path) -> None:
    text = words(figure(page_of(run), "bytes"))
    lines = metrics(60, seed=4)
    found = [text.rindex(f" {family} ") for family in made_up_run.FAMILIES]  # their rows in the table
    assert found == sorted(found)
    total = 0.0
    for family, (_, plain, method) in made_up_run.FAMILIES.items():
        ours = sum(line["bytes"][family] for line in lines) / 60
        exposed = 1000 * sum(line["exposed"][family] for line in lines) / 60
        total += ours
        ratio = "-" if not plain else f"{plain / ours:,.0f}x" if plain > 100 * ours else f"{plain / ours:.3g}x"
        below = f" plain: {method}" if method else ""
        assert f" {family}{below} {ours:,.0f} {plain:,.0f} {ratio} {exposed:.2f} " in text
        assert f" {family}: weft {size_of(ours)} " in text
    everything = sum(plain for _, plain, _ in made_up_run.FAMILIES.values())
    assert f" {total:,.0f} {everything:,.0f} {everything / total:.3g}x" in text


def test_bars_stand_on_a_log_scale(run: Path) -> None:
    wide = re.findall(r'<svg class="bars wide".*?</svg>', figure(page_of(run), "bytes"), re.DOTALL)[0]
    bars = re.findall(r'<rect class="(bar[^"]*)" [^>]*width="([\d.]+)"[^>]*><title>(.*?): \w+ ([\d.]+) (.)B', wide)
    sizes = {(kind, family): (float(number) * {"k": 1e3, "M": 1e6}[unit], float(width))
             for kind, width, family, number, unit in bars}  # fmt: skip
    assert len(sizes) == 13  # six families and all of them, twice, but for one that plain pieces do not have
    slopes = set()
    small = sizes["bar f5", "agreeing"]
    for size, width in sizes.values():
        if size != small[0]:
            slopes.add(round((width - small[1]) / math.log10(size / small[0]), 0))
    assert len(slopes) <= 2 and min(slopes) > 50  # one slope, but for rounding


def test_the_timeline_has_a_row_for_each_rank_and_kind(run: Path) -> None:
    seconds = [(0, "work", 0, 0.02), (0, "under way", 0.01, 0.03), (0, "exposed", 0.02, 0.03), (0, "work", 0.03, 0.05),
               (1, "work", 0, 0.04)]  # fmt: skip
    spans: list[list[dict[str, Any]]] = [[], []]
    for rank, kind, start, end in seconds:
        spans[rank].append({"name": "layer", "family": "REKLS", "kind": kind, "start": 7 + start, "end": 7 + end})
    content = {"step": 12, "ranks": [{"rank": rank, "spans": spans[rank]} for rank in (1, 0)]}
    (run / "timeline.json").write_text(json.dumps(content))
    drawn = figure(page_of(run), "timeline")
    text = words(drawn)
    assert "Timeline of step 12" in text
    assert "50 ms; a rank waits 10.0 % of it on average, 20.0 % at most." in text
    assert "rank 0 40.00 20.00 10.00 rank 1 40.00 0.00 0.00" in text
    wide = re.findall(r'<svg class="timeline wide".*?</svg>', drawn, re.DOTALL)[0]
    boxes = re.findall(r'<rect class="(work|lane f3|waiting)" x="([\d.]+)" y="([\d.]+)" width="([\d.]+)"', wide)
    kinds = [kind for kind, *_ in boxes]
    assert kinds == ["work", "work", "waiting", "lane f3", "work"]
    x, y, width = [[float(box[i]) for box in boxes] for i in (1, 2, 3)]
    assert x[2] == pytest.approx(x[0] + width[0], abs=0.2) and x[1] == pytest.approx(x[2] + width[2], abs=0.2)
    assert width[0] == pytest.approx(2 * width[2], abs=0.2) and y[0] == y[1] == y[2] < y[3] < y[4]


def test_each_family_has_a_lane_of_its_own(run: Path) -> None:
    drawn = re.findall(r'<svg class="timeline wide".*?</svg>', figure(page_of(run), "timeline"), re.DOTALL)[0]
    lanes = {(style, float(y)) for style, y in re.findall(r'<rect class="lane (f\d)" x="[\d.]+" y="([\d.]+)"', drawn)}
    assert len(lanes) == 4 * len(FAMILIES) == len({y for _, y in lanes})  # six families on each of four ranks


def test_the_configuration_is_flattened(run: Path) -> None:
    text = words(figure(page_of(run), "config"))
    assert "mesh.dp 2 mesh.cp 2 mesh.tp 1" in text and 'model.layers ["linear", ' in text and "data null" in text


def test_a_run_in_one_process_sent_nothing(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "one", steps=5, ranks=1, whole=False))
    assert "No bytes were sent" in figure(page, "bytes") and "Ranks 1 " in words(page)


@pytest.mark.parametrize("loss", [2.5, 0.0, -1.0, 1e-310, 1e299])
def test_one_step_is_enough(run: Path, loss: float) -> None:
    write_metrics(run, [dict(metrics(1)[0], loss=loss)])
    page = page_of(run, run)
    assert not places(page, "loss") and '<circle class="dot' in figure(page, "loss")
    assert "equal to the bit at all of 1 step." in page and ">1</text>" in figure(page, "loss")


def test_five_thousand_steps_stay_small_and_keep_their_extremes(tmp_path: Path) -> None:
    run = write_run(tmp_path / "long", steps=1)
    lines = metrics(5000)
    lines[3210]["loss"], lines[3217]["loss"] = 9.5, 0.25
    write_metrics(run, lines)
    write_metrics(write_run(tmp_path / "one", steps=1, ranks=1), metrics(5000, seed=1))
    page = page_of(run, tmp_path / "one")
    assert len(page) < 500_000
    mine = places(page, "loss")[0]
    assert len(mine) < 700
    left, right = mine[0][0], mine[-1][0]
    top, bottom = min(mine, key=lambda place: place[1]), max(mine, key=lambda place: place[1])
    assert top[0] == pytest.approx(left + 3210 / 4999 * (right - left), abs=0.2)
    assert bottom[0] == pytest.approx(left + 3217 / 4999 * (right - left), abs=0.2)
    read = json.loads(html.unescape(re.findall(r'data-read="([^"]*)"', page)[0]))
    assert dict(zip(read["steps"], read["series"][0][1], strict=True)).items() >= {3211: "9.5", 3218: "0.25"}.items()
    assert page.count("<tr>") < 400 and "one step in 50" in page


def test_families_that_are_not_known_come_last(run: Path) -> None:
    write_metrics(run, [{"step": 1, "loss": 2.0, "bytes": {"a new one": 10, **dict.fromkeys(reversed(FAMILIES), 20)}}])
    drawn = figure(page_of(run), "bytes")
    order = re.findall(r'<text x="0.0" [^>]*>([^<]*)</text>', re.findall(r"<svg.*?</svg>", drawn, re.DOTALL)[0])
    assert order == [*FAMILIES, "a new one", "all"]


def test_the_command_says_where_the_file_is(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "page.html"
    show_report(run, out=out)
    assert capsys.readouterr().out == f"report: {out}\n" and out.read_text().endswith("</html>\n")
    assert [path.name for path in out.parent.iterdir()] == ["page.html"] and not (run / "report.html").exists()


def test_a_picture_stands_alone(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Well-formed SVG with both charts; a run without them is refused."""
    show_report(run, out=tmp_path / "page.html", picture=tmp_path / "step.svg")
    assert str(tmp_path / "step.svg") in capsys.readouterr().out
    drawing = ElementTree.parse(tmp_path / "step.svg").getroot()
    kinds = [part.get("class") for part in drawing.iter("{http://www.w3.org/2000/svg}svg") if part.get("class")]
    assert kinds == ["bars wide", "timeline wide"] and drawing.get("viewBox")
    said = " ".join("".join(part.itertext()) for part in drawing.iter("{http://www.w3.org/2000/svg}text"))
    assert all(name in said for name in (*FAMILIES, "rank 0", "plain"))
    (run / "plain.json").unlink()
    with pytest.raises(ValueError, match=r"--picture needs metrics.jsonl, plain.json and timeline.json"):
        show_report(run, picture=tmp_path / "other.svg")
