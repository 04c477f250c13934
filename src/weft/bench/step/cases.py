"""`weft bench step`: optimizer steps of a small model, with the exchange of gradients, beside DDP and ZeRO."""

from __future__ import annotations

import statistics
from typing import Any

from weft.bench.ranks import RankPool
from weft.bench.report import Column, Layout, Report
from weft.bench.step.runs import Method, Sample, Sizes, digest, measure_peak, prepare, sample, set_up

COLUMNS = (
    Column("case", "ranks", "{}"),
    Column("method", "method", "{}"),
    Column("milliseconds", "wall ms", "{:,.0f}"),
    Column("to_sequence", "x sequence", "{:.2f}"),
    Column("to_zero", "x ZeRO", "{:.2f}"),
    Column("cpu_milliseconds", "CPU ms", "{:,.0f}"),
    Column("megabytes", "MB sent", "{:,.1f}"),
    Column("ledger_megabytes", "by ledger", "{:,.1f}"),
    Column("exposed_milliseconds", "exposed ms", "{:,.0f}"),
    Column("peak_megabytes", "peak MB", "{:,.0f}"),
)
SEQUENCE, ZERO = "{}, in sequence", "DDP + ZeRO AdamW"


def methods_on(ranks: int) -> list[Method]:
    """What is compared on so many ranks."""
    found = []
    for matrices, word in (("rekls", "REKLS"), ("adamw", "AdamW")):
        found.append(Method(SEQUENCE.format(word), "sequence", matrices, ranks))
        found.append(Method(f"{word}, overlapped", "overlapped", matrices, ranks))
    return [*found, Method("DDP + AdamW", "ddp", "adamw", ranks), Method(ZERO, "zero", "adamw", ranks)]


def layouts(sizes: Sizes) -> dict[str, Layout]:
    """The table of this benchmark."""
    title = (
        f"one step of {sizes.blocks} blocks (h {sizes.width}), a {sizes.rows} x {sizes.width} table, "
        f"{sizes.vocabulary} token embeddings, {sizes.tokens} tokens of a rank"
    )
    return {"step": Layout(title, COLUMNS)}


def run(pool: RankPool, report: Report, repeats: int, warm_steps: int, sizes: Sizes, only: tuple[str, ...]) -> None:
    """Measure, adding the rows of a number of ranks as soon as it is done. Methods take turns.

    ``only``: those whose names begin so.
    """
    counts = [count for count in (2, 4) if count <= pool.size]
    if not counts:
        raise ValueError(f"bench step compares steps over 2 and 4 ranks, got {pool.size}")
    pool.run(set_up)
    with report.progress(len(counts) * repeats, "step") as advance:
        for count in counts:
            methods = [one for one in methods_on(count) if not only or one.name.startswith(only)]
            if not methods:
                known = ", ".join(one.name for one in methods_on(count))
                raise ValueError(f"--methods {' '.join(only)}: no method's name begins so; there are {known}")
            peaks = {method.name: pool.run(measure_peak, method, sizes) for method in methods}
            pool.run(prepare, methods, sizes, warm_steps)
            samples: list[list[dict[str, Sample]]] = []
            try:
                for turn in range(repeats + 1):
                    first = turn % len(methods)
                    taken = pool.run(sample, methods[first:] + methods[:first], turn)
                    if turn:  # the first warms up
                        samples.append(taken)
                        advance()
            finally:  # Ctrl-C keeps what was measured
                weights = pool.run(digest) if len(samples) == repeats else []
                for method in methods if samples else ():
                    digests = [rank[method.name] for rank in weights if method.name in rank]
                    report.add("step", {**_row(method, samples, peaks[method.name]), "weights": digests})


def _row(method: Method, samples: list[list[dict[str, Sample]]], peaks: list[int | None]) -> dict[str, Any]:
    """``samples[turn][rank][method]``. Ratios are taken sample by sample: what else the machine did slowed both."""

    def turns(name: str) -> list[list[Sample]]:
        return [[rank[name] for rank in turn if name in rank] for turn in samples]

    def wall(name: str) -> list[float]:
        return [max(part.wall for part in turn) for turn in turns(name)]

    def faster_than(name: str) -> float | None:
        if name not in samples[0][0]:
            return None
        return statistics.median(other / own for other, own in zip(wall(name), wall(method.name), strict=True))

    mine = turns(method.name)
    sent = [part.bytes_sent for part in mine[-1] if part.bytes_sent is not None]
    known = [peak for peak in peaks if peak is not None]
    of_weft = {
        "to_sequence": faster_than(SEQUENCE.format("REKLS" if method.matrices == "rekls" else "AdamW")),
        "ledger_megabytes": max(part.ledger_bytes for part in mine[-1]) / 1e6,
        "exposed_milliseconds": 1e3 * statistics.median(max(part.exposed for part in turn) for turn in mine),
    }
    return {
        "case": f"{method.ranks}",
        "method": method.name,
        "milliseconds": 1e3 * statistics.median(wall(method.name)),
        "to_zero": faster_than(ZERO),
        "cpu_milliseconds": 1e3 * statistics.median(sum(part.cpu for part in turn) for turn in mine),
        "megabytes": max(sent) / 1e6 if sent else None,
        "peak_megabytes": max(known) / 1e6 if known else None,
        "samples": len(samples),
        **(of_weft if method.is_weft else dict.fromkeys(of_weft)),
    }
