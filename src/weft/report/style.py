"""The stylesheet and the script of a report.

Colours: Okabe and Ito's, which stay apart for colour-blind eyes, a little lighter on dark. A family has one colour
everywhere; vermilion is kept for waiting. Every chart is there twice, for wide and for narrow pages, and one is shown.
"""

from __future__ import annotations

from weft.report.run import FAMILIES


def family_class(family: str) -> str:
    """The class that sets a family's colour, ``--c``."""
    return f"f{FAMILIES.index(family)}" if family in FAMILIES else "fx"


STYLE = """
:root {
  --paper: #fff; --ink: #1c1c1a; --soft: #62625d; --line: #dededa; --work: #d5d5cf; --run: #0072b2; --beside: #1c1c1a;
  --wait: #c8480a;
}
.f0 { --c: #0072b2 } .f1 { --c: #56b4e9 } .f2 { --c: #009e73 } .f3 { --c: #e69f00 } .f4 { --c: #cc79a7 }
.f5 { --c: #6e6e6a } .fx { --c: #8c6d31 } .all { --c: var(--ink) }
@media screen and (prefers-color-scheme: dark) {
  :root {
    --paper: #161617; --ink: #e7e7e3; --soft: #a3a39c; --line: #35353a; --work: #47474c; --run: #4aa3df;
    --beside: #f2f2ee; --wait: #ff7a45;
  }
  .f0 { --c: #3f94d4 } .f1 { --c: #8fd0f5 } .f2 { --c: #2bb88d } .f3 { --c: #f0b53a } .f4 { --c: #dd98bd }
  .f5 { --c: #9a9a95 } .fx { --c: #b99a5b }
}
* { box-sizing: border-box }
html { -webkit-text-size-adjust: 100% }
body {
  margin: 0 auto; padding: 3.5rem 1.25rem 5rem; max-width: 48rem; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", Arial, sans-serif;
  font-variant-numeric: tabular-nums;
}
h1 { margin: 0; font-size: 1.75rem; font-weight: 600; line-height: 1.2; letter-spacing: -.01em }
h2 { margin: 0 0 .35rem; font-size: 1.125rem; font-weight: 600 }
p { margin: 0 0 .75rem; max-width: 42rem }
header p { margin: .35rem 0 0; color: var(--soft); overflow-wrap: anywhere }
dl { display: grid; grid-template-columns: repeat(3, 1fr); margin: 2rem 0 0; border-top: 1px solid var(--ink) }
dl > div { padding: .6rem .5rem .6rem 0; border-bottom: 1px solid var(--line) }
dt { color: var(--soft); font-size: .8125rem }
dd { margin: 0; font-size: 1.25rem; overflow-wrap: anywhere }
dd small { color: var(--soft); font-size: .8125rem }
figure { margin: 3.5rem 0 0; break-inside: avoid }
figure#config { break-inside: auto }
figcaption, .note { color: var(--soft); font-size: .875rem; max-width: 42rem }
figcaption { margin-top: .5rem } header + .note { margin-top: 1rem }
.readout { margin: 0; min-height: 1.4rem; font-size: .8125rem; color: var(--soft) }
svg { display: block; width: 100%; height: auto; margin-top: .75rem; overflow: visible }
svg.narrow { display: none }
svg.plot { touch-action: pan-y }
svg text { font-size: 12px; fill: var(--soft) }
svg text.strong { fill: var(--ink) }
.end { text-anchor: end } .middle { text-anchor: middle }
.grid { stroke: var(--line); stroke-width: 1; shape-rendering: crispEdges }
.base { stroke: var(--soft); stroke-width: 1; shape-rendering: crispEdges }
.curve { fill: none; stroke: var(--c); stroke-linejoin: round; stroke-linecap: round; stroke-width: 1.5 }
.dot { fill: var(--c) } .ring { fill: var(--paper); stroke: var(--c); stroke-width: 1.5 }
svg text.named { fill: var(--c) }
.run { --c: var(--run) } .beside { --c: var(--beside) } .plainly { --c: var(--soft) } .wait { --c: var(--wait) }
.curve.under { stroke-width: 5; stroke-opacity: .45 } .curve.beside { stroke-width: 1.1 }
.rule { stroke: var(--soft); stroke-width: 1; visibility: hidden }
.bar { fill: var(--c) } .bar.plain { fill-opacity: .22; stroke: var(--c); stroke-width: 1 }
.work { fill: var(--work); stroke: var(--paper); stroke-width: .5 }
.blank { fill: var(--paper) } .waiting { stroke: var(--wait); stroke-width: 1 }
.lane { fill: var(--c) }
.legend { display: flex; flex-wrap: wrap; gap: .1rem 1.1rem; margin: .5rem 0 0; padding: 0; list-style: none;
  font-size: .8125rem }
svg.swatch { display: inline-block; width: .7em; height: .7em; margin: 0 .4em 0 0 }
.scroll { overflow-x: auto }
table { border-collapse: collapse; margin-top: .75rem; font-size: .8125rem; width: 100% }
th { font-weight: 600; text-align: left; vertical-align: bottom; border-bottom: 1px solid var(--ink) }
th, td { padding: .25rem 1.1rem .25rem 0; vertical-align: top } th:last-child, td:last-child { padding-right: 0 }
td { border-bottom: 1px solid var(--line) }
th.n, td.n { text-align: right; white-space: nowrap }
tr.sum td { border-top: 1px solid var(--ink); font-weight: 600 }
td small { display: block; color: var(--soft); font-size: .75rem } #bytes td.name { min-width: 9.5rem }
#config td { overflow-wrap: anywhere } #config td.name { width: 40%; color: var(--soft) }
details { margin-top: .75rem; font-size: .875rem }
summary { cursor: pointer; color: var(--soft) }
code { font: .9em ui-monospace, "SF Mono", Menlo, Consolas, monospace }
@media (max-width: 600px) {
  body { padding: 1.75rem 1rem 3rem }
  dl { grid-template-columns: repeat(2, 1fr) }
  figure { margin-top: 2.5rem }
  svg.wide { display: none } svg.narrow { display: block; max-width: 27rem }
}
@media print {
  body { padding: 0; max-width: none; font-size: 11pt } .readout { display: none } summary { list-style: none }
  svg.wide { display: block } svg.narrow { display: none }
}
"""

# Read-outs: a rule at the step nearest to the pointer, and what every curve of the figure has there.
SCRIPT = """
for (const figure of document.querySelectorAll("figure[data-read]")) {
  const read = JSON.parse(figure.dataset.read), out = figure.querySelector(".readout");
  const first = +figure.dataset.first, last = +figure.dataset.last, plots = figure.querySelectorAll("svg.plot");
  const hint = out.textContent = "Point at a curve to read its values.";
  for (const plot of plots) {
    plot.addEventListener("pointermove", event => {
      const box = plot.getBoundingClientRect(), left = +plot.dataset.left, right = +plot.dataset.right;
      const x = (event.clientX - box.left) / box.width * plot.viewBox.baseVal.width;
      const step = first + (x - left) / (right - left) * (last - first);
      let at = 0;
      for (let i = 1; i < read.steps.length; i++)
        if (Math.abs(read.steps[i] - step) < Math.abs(read.steps[at] - step)) at = i;
      const values = read.series.filter(s => s[1][at] !== null).map(s => s[0] + " " + s[1][at]);
      out.textContent = "Step " + read.steps[at].toLocaleString("en") + ": " + values.join(", ");
      for (const other of plots) {
        const l = +other.dataset.left, r = +other.dataset.right, rule = other.querySelector(".rule");
        const place = l + (read.steps[at] - first) / (last - first) * (r - l);
        rule.setAttribute("x1", place); rule.setAttribute("x2", place); rule.style.visibility = "visible";
      }
    });
    plot.addEventListener("pointerleave", () => {
      out.textContent = hint;
      for (const other of plots) other.querySelector(".rule").style.visibility = "hidden";
    });
  }
}
"""
