"""The figures of a report as HTML: loss, speed, bytes, timeline, configuration."""

from __future__ import annotations

import json
import math
from collections.abc import Sized
from html import escape

from weft.report.charts import COLUMN, Curve, byte_bars, draw_timeline, legend, length, plot
from weft.report.run import Run, Step, family_class, in_order
from weft.report.svg import WIDTHS, Point, colour_swatch, plain_number, short, size_of, thin

ROWS = 100  # of the table behind a figure; all steps are in metrics.jsonl


def figure(name: str, title: str, inside: list[str], more: str = "") -> str:
    """One figure of the page; parts that are empty are left out."""
    body = "\n".join(part for part in inside if part)
    return f'<figure id="{name}" aria-label="{escape(title)}"{more}>\n<h2>{escape(title)}</h2>\n{body}\n</figure>'


def note(words: str) -> str:
    """A sentence in place of what is not there."""
    return f'<p class="note">{escape(words)}</p>'


def table(heads: list[str], rows: list[list[str]], kinds: list[str], *, last_is_sum: bool = False) -> str:
    """Cells are HTML already. The kind of a column is a class: ``name``, ``n`` for numbers or ``words``."""

    def cells(tag: str, row: list[str]) -> str:
        return "".join(f'<{tag} class="{kind}">{cell}</{tag}>' for kind, cell in zip(kinds, row, strict=True))

    lines = [f"<tr>{cells('th', heads)}</tr>"]
    for place, row in enumerate(rows):
        kind = ' class="sum"' if last_is_sum and place == len(rows) - 1 else ""
        lines.append(f"<tr{kind}>{cells('td', row)}</tr>")
    return '<div class="scroll"><table>\n' + "\n".join(lines) + "\n</table></div>"


def details(summary: str, inside: str) -> str:
    """Something a reader may open."""
    return f"<details><summary>{escape(summary)}</summary>\n{inside}\n</details>"


def count_steps(steps: Sized) -> str:
    """How many there are, in words."""
    return "1 step" if len(steps) == 1 else f"{len(steps):,} steps"


def step_range(*runs: list[Step]) -> tuple[float, float]:
    """First and last step of all runs; a single step gets half a step on both sides."""
    numbers = [step.number for steps in runs for step in steps]
    first, last = min(numbers), max(numbers)
    return (first, last) if last > first else (first - 0.5, last + 0.5)


def curve_of(steps: list[Step], key: str) -> list[Point]:
    """A number of each step, over steps."""
    return [(step.number, getattr(step, key)) for step in steps]


def finite(points: list[Point]) -> list[Point]:
    """The points whose value is finite."""
    return [point for point in points if math.isfinite(point[1])]


def differences(run: list[Step], beside: list[Step]) -> list[Point]:
    """Relative difference of the losses at steps that both runs have, where both are finite."""
    others = {step.number: step.loss for step in beside}
    pairs = [(step.number, step.loss, others[step.number]) for step in run if step.number in others]
    return finite([
        (number, 0.0 if mine == other else abs(mine - other) / abs(other) if other else math.nan)
        for number, mine, other in pairs
    ])  # fmt: skip


def read_outs(series: list[tuple[str, list[Point]]], steps: tuple[float, float]) -> str:
    """Attributes of a figure from which the script reads: the values of all curves at the steps that are drawn."""
    columns = WIDTHS["wide"] // COLUMN // 2
    shown = sorted({x for _, points in series for x, _ in thin(points, columns)})
    named = []
    for name, points in series:
        at = dict(points)
        named.append((name, [short(at[x]) if x in at else None for x in shown]))
    content = escape(json.dumps({"steps": shown, "series": named}, separators=(",", ":"), ensure_ascii=False))
    return f' data-read="{content}" data-first="{steps[0]}" data-last="{steps[1]}"'


def numbers_table(series: list[tuple[str, list[Point]]]) -> str:
    """The numbers of curves behind a figure: every step, or as many at equal distances as a table may have."""
    steps = sorted({x for _, points in series for x, _ in points})
    every = max(1, math.ceil(len(steps) / ROWS))
    shown = steps[::every] + ([steps[-1]] if (len(steps) - 1) % every else [])
    columns = [dict(points) for _, points in series]
    rows = [[f"{step:,.0f}", *(short(at[step]) if step in at else "" for at in columns)] for step in shown]
    summary = "Numbers" if every == 1 else f"Numbers, one step in {every}; all of them are in metrics.jsonl"
    heads = ["step", *(escape(name) for name, _ in series)]
    return details(summary, table(heads, rows, ["n"] * len(heads)))


def loss_figure(run: Run, beside: Run | None) -> str:
    """Both losses on one plot, and how far they are apart."""
    other = beside.steps if beside else []
    name, other_name = run.name, beside.name if beside else ""
    if name == other_name:
        other_name += ", beside"
    mine = Curve(name, "run under" if other else "run", curve_of(run.steps, "loss"))
    theirs = Curve(other_name, "beside", curve_of(other, "loss"))
    valid = Curve(f"{name}, validation", "run", finite(curve_of(run.steps, "valid_loss")), mark="dot")
    their_valid = Curve(f"{other_name}, validation", "beside", finite(curve_of(other, "valid_loss")), mark="ring")
    steps = step_range(run.steps, other)
    curves = [curve for curve in (mine, theirs, their_valid, valid) if curve.points]
    series = [(curve.name, curve.points) for curve in (mine, valid, theirs, their_valid) if curve.points]
    values = [y for curve in curves for _, y in finite(curve.points)]
    steep = bool(values) and min(values) > 0 and max(values) > 100 * min(values)
    title = "Training loss, log scale" if steep else "Training loss"
    letters = max(len("difference"), len(name), len(other_name))
    inside = ['<p class="readout"></p>', plot(curves, steps, title=title, height=300, log=steep, letters=letters)]
    caption = []
    if other:
        apart = differences(run.steps, other)
        caption.append(say_difference(apart))
        if above := [point for point in apart if point[1] > 0]:
            series.append(("relative difference", apart))
            small = [Curve("difference", "plainly", above)]
            small_title = "Relative difference of the two, log scale"
            inside.append(plot(small, steps, title=small_title, height=130, log=True, letters=letters))
    elif beside is None:
        caption.append("The same run in one process can be drawn over it: give its folder as --beside.")
    else:
        caption.append(f"{beside.folder} has no whole step: no second curve.")
    if valid.points:
        both = ", filled and open for the two runs" if their_valid.points else ""
        caption.append(f"Points: loss on the held-out part{both}.")
    caption += [said for said in (say_broken(run, name), say_broken(beside, other_name)) if said]
    inside += [f"<figcaption>{escape(' '.join(caption))}</figcaption>", numbers_table(series)]
    return figure("loss", "Loss", inside, read_outs(series, steps))


def say_difference(apart: list[Point]) -> str:
    """The largest relative difference, in a sentence."""
    if not apart:
        return "The two runs have no step in common."
    step, largest = max(apart, key=lambda point: point[1])
    many = count_steps(apart)
    if largest == 0:
        return f"The losses of the two runs are equal to the bit at all of {many}."
    return f"The losses of the two runs differ by at most {short(largest)} relative (step {step:,.0f}, over {many})."


def say_broken(run: Run | None, name: str) -> str:
    """Where a loss is not finite, in a sentence; nothing if it is everywhere."""
    broken = [step.number for step in run.steps if not math.isfinite(step.loss)] if run else []
    if not broken:
        return ""
    return f"The loss of {name} is not finite at {count_steps(broken)}, first at step {broken[0]:,}."


def speed_figure(run: Run) -> str:
    """Tokens per second, and the share of a step in which ranks wait."""
    steps = step_range(run.steps)
    speed = curve_of(run.steps, "tokens_per_second")
    share = [(step, 100 * value) for step, value in curve_of(run.steps, "exposed_share")]
    above, below = "Tokens per second", "Exposed communication, share of the step"
    fast, waits = Curve("tokens/s", "run", speed), Curve("exposed", "wait", share)
    inside = ['<p class="readout"></p>', plot([fast], steps, title=above, height=170, zero=True, axis=False)]
    inside.append(plot([waits], steps, title=below, height=190, zero=True, words=lambda y: f"{plain_number(y)} %"))
    words = "Exposed: the time in which a rank does nothing but wait for others, mean over ranks."
    series = [("tokens/s", speed), ("exposed %", share)]
    inside += [f"<figcaption>{escape(words)}</figcaption>", numbers_table(series)]
    return figure("speed", "Speed", inside, read_outs(series, steps))


def byte_rows(run: Run) -> list[tuple[str, float, float | None]]:
    """(family, bytes of a step, those of plain pieces if they are known), and "all" at the end."""
    counted, plain = [step for step in run.steps if step.bytes], run.plain
    families = in_order([*(f for step in counted for f in step.bytes), *(plain.bytes if plain else ())])
    ours = {f: sum(step.bytes.get(f, 0.0) for step in counted) / max(1, len(counted)) for f in families}
    theirs = {f: plain.bytes.get(f, 0.0) for f in families} if plain else None
    bars = [(f, ours[f], theirs[f] if theirs else None) for f in families]
    return [*bars, ("all", sum(ours.values()), sum(theirs.values()) if theirs else None)]


def bytes_figure(run: Run) -> str:
    """Bytes of one step by family: the mean over the run, against one step of plain pieces."""
    counted, plain = [step for step in run.steps if step.bytes], run.plain
    bars = byte_rows(run)
    families = [f for f, _, _ in bars[:-1]]
    exposed = {f: 1000 * sum(s.exposed.get(f, 0.0) for s in counted) / max(1, len(counted)) for f in families}
    title = "Bytes sent per step"
    if not bars[-1][1] and not bars[-1][2]:
        return figure("bytes", title, [note("No bytes were sent, as in a run in one process.")])
    heads = ["family", "weft, bytes", *(["plain, bytes", "plain / weft"] if plain else []), "exposed, ms"]
    rows = []
    for f, mine, other in bars:
        name = f if f == "all" else f"{colour_swatch(f'bar {family_class(f)}')}{escape(f)}"
        if f != "all" and plain and plain.methods.get(f):
            name += f"<small>plain: {escape(plain.methods[f])}</small>"
        compared = [] if other is None else [f"{other:,.0f}", ratio(other, mine)]
        rows.append([name, f"{mine:,.0f}", *compared, f"{sum(exposed.values()) if f == 'all' else exposed[f]:.2f}"])
    average = f"mean over {count_steps(counted)}"
    caption = f"Sum over ranks; weft: {average}. Log scale. Exposed: time waited per step, mean over ranks."
    if not plain:
        caption += " There is no plain.json in the run's folder, so there is nothing to compare with."
    label = f"{title}: " + ", ".join(f"{f} {size_of(mine)}" for f, mine, _ in bars[:-1])
    inside = [byte_bars(bars, label), f"<figcaption>{escape(caption)}</figcaption>"]
    return figure("bytes", title, [*inside, table(heads, rows, ["name"] + ["n"] * (len(heads) - 1), last_is_sum=True)])


def ratio(plain: float, ours: float) -> str:
    """How many times more plain pieces send."""
    if plain <= 0 or ours <= 0:
        return "-"
    return f"{plain / ours:,.0f}x" if plain >= 100 * ours else f"{plain / ours:.3g}x"


def timeline_figure(run: Run) -> str:
    """One step on all ranks."""
    timeline = run.timeline
    if timeline is None:
        words = "There is no timeline.json with spans in the run's folder."
        return figure("timeline", "Timeline of one step", [note(words)])
    title = "Timeline of one step" if timeline.step is None else f"Timeline of step {timeline.step:,}"
    rows = [
        [f"rank {rank}", *(f"{1000 * length(spans, kind):.2f}" for kind in ("work", "under way", "exposed"))]
        for rank, spans in timeline.ranks
    ]
    shares = [length(spans, "exposed") / timeline.seconds for _, spans in timeline.ranks]
    caption = (
        f"{1000 * timeline.seconds:.3g} ms; a rank waits {100 * sum(shares) / len(shares):.1f} % of it on average, "
        f"{100 * max(shares):.1f} % at most. Upper row: work, with waits over it. Below: what is under way meanwhile."
    )
    numbers = details("Numbers", table(["", "work, ms", "under way, ms", "exposed, ms"], rows, ["name", "n", "n", "n"]))
    drawn = [draw_timeline(timeline), legend(timeline), f"<figcaption>{escape(caption)}</figcaption>", numbers]
    return figure("timeline", title, drawn)


def config_figure(run: Run) -> str:
    """The settings of the run."""
    title = "Configuration"
    if not run.config:
        return figure("config", title, [note("There is no config.json with settings in the run's folder.")])
    rows = [[escape(key), escape(value)] for key, value in run.config.items()]
    return figure("config", title, [table(["setting", "value"], rows, ["name", "words"])])
