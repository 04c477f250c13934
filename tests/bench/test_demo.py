"""`weft demo`: what a person sees of it, on few steps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from weft.bench.train.demo import free_folder


def test_folders_that_are_taken(tmp_path: Path) -> None:
    assert free_folder(tmp_path / "demo") == tmp_path / "demo"
    for name in ("demo", "demo-2"):
        (tmp_path / name).mkdir()
    assert free_folder(tmp_path / "demo") == tmp_path / "demo-3"


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(1200)
def test_the_demo(tmp_path: Path) -> None:
    weft = [sys.executable, "-c", "from weft.cli import main; main()", "demo", "--steps", "4", "--ranks", "2"]
    done = subprocess.run(weft, cwd=tmp_path, capture_output=True, text=True, timeout=1100)
    assert done.returncode == 0, done.stderr
    assert "the two runs are at most" in done.stdout and "dense gradient" in done.stdout
    report = Path(done.stdout.strip().splitlines()[-1].removeprefix("report: "))
    assert report == (tmp_path / "demo" / "report.html").resolve()
    page = report.read_text()
    assert all(f'id="{name}"' in page for name in ("loss", "speed", "bytes", "timeline", "config"))
    losses = [
        [json.loads(line)["loss"] for line in (tmp_path / "demo" / run / "metrics.jsonl").read_text().splitlines()]
        for run in ("2-ranks", "one-process")
    ]
    assert all(abs(one - other) < 1e-3 * other for one, other in zip(*losses, strict=True))
    sent = json.loads((tmp_path / "demo" / "2-ranks" / "metrics.jsonl").read_text().splitlines()[-1])["bytes"]
    assert all(sent[family] > 0 for family in ("linear attention", "softmax attention", "embedding rows", "REKLS"))
