"""Reports of runs whose files are missing, half-written or hostile: the page stays whole and says what is wrong."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest
from made_up_run import metrics, write_metrics, write_run
from report_page import figure, page_of, places, words

from weft.report.page import write_report
from weft.report.run import read_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "demo", steps=60)


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    run = write_run(tmp_path / "bare", steps=5, whole=False)
    (run / "config.json").unlink()
    page = page_of(run)
    assert "--beside" in figure(page, "loss") and "no plain.json" in figure(page, "bytes")
    assert "no timeline.json" in figure(page, "timeline") and "no config.json" in figure(page, "config")
    assert "plain" not in words(figure(page, "bytes")).replace("plain.json", "")
    assert "Ranks - " in words(page) and ">bare</text>" in page


def test_a_half_written_last_line_is_ignored_and_a_broken_one_is_told(run: Path) -> None:
    lines = metrics(10)
    half = json.dumps(metrics(11)[-1])[:57]
    write_metrics(run, lines, end=half)
    page = page_of(run)
    assert "Steps 10 " in words(page) and "could not be read" not in page
    # The run went on: the half line stands in the middle, joined to the next, and steps came a second time.
    again = [dict(line, loss=3.25) for line in lines[7:]]
    write_metrics(run, lines, end=half + "".join(json.dumps(line) + "\n" for line in again))
    page = page_of(run)
    assert "1 line of metrics.jsonl could not be read" in page
    assert [step.loss == 3.25 for step in read_run(run).steps] == [False] * 8 + [True] * 2
    assert "Final loss 3.25 " in words(page) and "Steps 10 " in words(page)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, None, "low", 10**400, 1e305, True])
def test_a_loss_that_is_no_number_breaks_the_line_only(run: Path, bad: Any) -> None:
    write_metrics(run, [dict(line, loss=bad) if line["step"] in (20, 21, 23) else line for line in metrics(60)])
    page = page_of(run)
    assert [len(piece) for piece in places(page, "loss")] == [19, 37] and page.count('r="2"') == 2  # step 22 is a dot
    assert "is not finite at 3 steps, first at step 20" in figure(page, "loss")
    drawn = "".join(re.findall(r"<svg.*?</svg>", page, re.DOTALL))
    assert not re.search(r'="[^"]*\b(nan|inf)\b', drawn)


def test_a_run_without_any_finite_number_still_has_a_report(run: Path) -> None:
    write_metrics(run, [{"step": 3, "loss": math.nan}, {"step": 4}])
    page = page_of(run)
    assert "no finite value" in figure(page, "loss") and "Final loss not finite" in words(page)
    assert not re.search(r'="[^"]*\b(nan|inf)\b', page)


def test_everything_from_files_is_escaped(tmp_path: Path) -> None:
    evil = "</title></script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&\ud800"
    run = write_run(tmp_path / "<i>demo", steps=3)
    line = {"step": 1, "loss": 2.0, "bytes": {evil: 5}, "exposed": {evil: 1.0}}
    write_metrics(run, [line])
    span = {"name": evil, "family": evil, "start": 0, "end": 1}
    spans = [dict(span, kind=kind) for kind in ("work", "under way", "exposed")]
    (run / "timeline.json").write_text(json.dumps({"step": 1, "ranks": [{"rank": 0, "spans": spans}]}))
    (run / "plain.json").write_text(json.dumps({"bytes": {evil: 50}, "methods": {evil: evil}, "ranks": 4}))
    (run / "config.json").write_text(json.dumps({evil: {evil: evil}}))
    page = page_of(run)
    assert page.count("<script>") == 1 and "<img" not in page and "<i>" not in page
    assert page.count("&lt;img src=x onerror=alert(1)&gt;&quot;&#x27;&amp;?") > 10


@pytest.mark.parametrize("content", ["", "[1, 2", "null", "[]", "7", "[" * 99_999, '{"ranks": 4}', '{"ranks": [{}, 3]}',
    '{"ranks": [{"rank": -1, "spans": [3, {"kind": "work", "start": 2, "end": 1}]}], "bytes": [], "methods": 3}',
])  # fmt: skip
def test_files_of_another_form_are_left_out(run: Path, content: str) -> None:
    for name in ("timeline.json", "plain.json", "config.json"):
        (run / name).write_text(content)
    page = page_of(run)
    assert "no timeline.json" in figure(page, "timeline")
    if not content.startswith("{"):
        assert page.count("is not a whole JSON object") == 3


def test_numbers_that_nobody_sends_do_not_break_it(run: Path) -> None:
    noise = random.Random(5)
    odd = [math.nan, -1, 0, 1e-320, 1e308, 10**500, "x", None, [], {}, 2**70, 0.5]
    keys = ("loss", "valid_loss", "seconds", "tokens_per_second", "exposed_share", "bytes", "exposed", "step")
    for _ in range(60):
        lines: list[dict[str, Any]] = [{"step": 1, "loss": 1.0}]
        for step in range(2, 6):
            line: dict[str, Any] = {"step": step, **{key: noise.choice(odd) for key in keys[: noise.randrange(9)]}}
            lines.append(line | {"bytes": {"REKLS": noise.choice(odd)}, "exposed": {"AdamW": noise.choice(odd)}})
        write_metrics(run, lines)
        drawn = "".join(re.findall(r"<svg.*?</svg>", page_of(run, run), re.DOTALL))
        assert not re.search(r'="[^"]*\b(nan|inf)\b', drawn)


def test_an_empty_run_beside_is_said_and_a_missing_one_refused(run: Path, tmp_path: Path) -> None:
    beside = write_run(tmp_path / "one", ranks=1)
    write_metrics(beside, [], end='{"step": 1, "lo')
    assert f"{beside} has no whole step" in figure(page_of(run, beside), "loss")
    (beside / "metrics.jsonl").unlink()
    before = (run / "report.html").read_text()
    with pytest.raises(ValueError, match=rf"^report: {re.escape(str(beside))} has no metrics.jsonl; [^\n]*$"):
        write_report(run, beside=beside)
    assert (run / "report.html").read_text() == before
    write_metrics(beside, [dict(line, step=line["step"] + 100) for line in metrics(5)])
    assert "no step in common" in figure(page_of(run, beside), "loss")


def test_folders_that_are_no_run_are_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ValueError, match=r"^report: .* has no metrics.jsonl; [^\n]*$"):
            write_report(folder)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"^report: .*metrics.jsonl has no whole step; [^\n]*$"):
        write_report(tmp_path)
    write_metrics(tmp_path, metrics(2))
    with pytest.raises(ValueError, match=r"^report: .* is a folder; [^\n]*$"):
        write_report(tmp_path, out=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_report_that_cannot_be_written_leaves_the_old_one(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_report(run).write_text("old")

    def full(path: Path, text: str, **_: Any) -> int:
        with path.open("w") as file:
            file.write(text[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        write_report(run)
    assert (run / "report.html").read_text() == "old" and not list(run.glob(".report*"))
