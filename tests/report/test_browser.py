"""The report in a browser without a screen: it draws every figure, says nothing on its console and asks for nothing."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from made_up_run import write_run

from weft.report.page import write_report

pytestmark = pytest.mark.processes
NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--enable-logging=stderr", "--v=0",
]  # fmt: skip

# Written into a copy of the page: what is shown and how large, and what a pointer over the first curve reads.
PROBE = """
const found = {refused: 0, wide: innerWidth, page: document.documentElement.scrollWidth, sizes: {}, read: []};
document.addEventListener("securitypolicyviolation", () => found.refused++);
const box = e => { const b = e.getBoundingClientRect(); return [b.width, b.height]; };
for (const figure of document.querySelectorAll("figure")) {
  const shown = [...figure.querySelectorAll("svg:not(.swatch)")].filter(e => getComputedStyle(e).display !== "none");
  found.sizes[figure.id] = [box(figure), ...shown.map(box)];
  const ink = [...figure.querySelectorAll("svg:not(.swatch) > :is(path, rect, circle)")].filter(e => box(e)[0] > 0);
  found.read.push([figure.id, ink.length]);
}
const plot = [...document.querySelectorAll("#loss svg.plot")].find(e => box(e)[0] > 0);
const b = plot.getBoundingClientRect();
const scale = b.width / plot.viewBox.baseVal.width;
const middle = b.left + scale * (+plot.dataset.left + +plot.dataset.right) / 2;
plot.dispatchEvent(new PointerEvent("pointermove", {clientX: middle, clientY: b.top + 50}));
found.readout = document.querySelector("#loss .readout").textContent;
found.rule = getComputedStyle(plot.querySelector(".rule")).visibility;
plot.dispatchEvent(new PointerEvent("pointerleave"));
found.after = document.querySelector("#loss .readout").textContent;
found.paper = getComputedStyle(document.body).backgroundColor;
const said = document.createElement("pre"); said.id = "probe"; said.textContent = JSON.stringify(found);
document.body.append(said);
"""


@pytest.fixture(scope="module")
def browser() -> str:
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("no browser found: the report was not rendered")
    return found


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "one", ranks=1, whole=False)
    return write_report(write_run(folder / "demo"), beside=folder / "one")


def look(browser: str, page: Path, folder: Path, *more: str) -> tuple[dict[str, Any], list[str]]:
    """What the probe found in a page, and the lines of its console."""
    copy = folder / "page.html"
    copy.write_text(page.read_text().replace("</body>", f"<script>{PROBE}</script></body>"))
    profile = folder / "profile"
    words = [browser, *FLAGS, f"--user-data-dir={profile}", *more, "--dump-dom", copy.as_uri()]
    result = subprocess.run(words, capture_output=True, text=True, timeout=90)
    assert result.returncode == 0, result.stderr
    console = [line for line in result.stderr.splitlines() if "CONSOLE" in line]
    said = re.search(r'<pre id="probe">(.*?)</pre>', result.stdout, re.DOTALL)
    assert said is not None, (console, result.stdout[-500:])
    return json.loads(html.unescape(said[1])), console


@pytest.mark.parametrize(
    ("window", "dark"),
    [("1100,2600", False), pytest.param("500,2600", True, marks=pytest.mark.slow)],
    ids=["wide", "narrow, dark"],
)
def test_a_browser_shows_every_figure(browser: str, report: Path, tmp_path: Path, window: str, dark: bool) -> None:
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    found, console = look(browser, report, tmp_path, f"--window-size={window}", scheme)
    assert console == [] and found["refused"] == 0
    charts = {"loss": 2, "speed": 2, "bytes": 1, "timeline": 1, "config": 0}
    assert {name: len(sizes) - 1 for name, sizes in found["sizes"].items()} == charts
    for sizes in found["sizes"].values():
        assert all(width > 300 and height > 50 for width, height in sizes)
    assert all(ink >= 2 for name, ink in found["read"] if name != "config")
    assert found["page"] <= found["wide"]  # nothing to scroll sideways
    assert re.fullmatch(r"Step 10[01]: 4 ranks [\d.]+, .*one process [\d.]+, .*difference [\de.-]+", found["readout"])
    assert found["rule"] == "visible" and found["after"] == "Point at a curve to read its values."
    assert found["paper"] == ("rgb(22, 22, 23)" if dark else "rgb(255, 255, 255)")


def test_the_page_refers_to_nothing_outside(report: Path) -> None:
    page = report.read_text()
    assert re.findall(r"https?:|//[a-z]|@import|(?:src|href)=", page) == []
    assert re.findall(r"url\([^)]*\)", page) and all(
        url.startswith("url(#") for url in re.findall(r"url\([^)]*\)", page)
    )
    assert "default-src 'none'" in page


def test_the_console_is_heard(browser: str, report: Path, tmp_path: Path) -> None:
    """The first test would not see an error if this one failed."""
    broken = tmp_path / "broken.html"
    broken.write_text(report.read_text().replace("</figure>", "<script>missing()</script></figure>", 1))
    _, console = look(browser, broken, tmp_path)
    assert len(console) == 1 and "missing is not defined" in console[0]
