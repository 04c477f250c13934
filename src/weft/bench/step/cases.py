"""`weft bench step`: optimizer steps of a small model, with the exchange of gradients, beside DDP and ZeRO."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

from weft.bench.ranks import Measured, RankPool, fill_table, highest_megabytes
from weft.bench.report import Column, Layout, Report
from weft.bench.step.runs import Method, Sizes, digest, measure_peak, prepare, sample, set_up
from weft.bench.timing import Sample

SEQUENCE, ZERO = "{}, in sequence", "DDP + ZeRO AdamW"
COLUMNS = (
    Column("case", "ranks"),
    Column("method", "method"),
    Column("milliseconds", "wall ms", "{:,.0f}"),
    Column("to_sequence", "x sequence", "{:.2f}", lambda m: m.faster_than(SEQUENCE.format(m.case.split(",")[0]))),
    Column("to_zero", "x ZeRO", "{:.2f}", lambda m: m.faster_than(ZERO)),
    Column("cpu_milliseconds", "CPU ms", "{:,.0f}"),
    Column("megabytes", "MB sent", "{:,.1f}", lambda m: highest_megabytes(rank.kernel_sent for rank in m.of()[-1])),
    Column("ledger_megabytes", "by ledger", "{:,.1f}", lambda m: m.megabytes),
    Column("exposed_milliseconds", "exposed ms", "{:,.0f}", lambda m: 1e3 * statistics.median(_exposed(m))),
    Column("peak_megabytes", "peak MB", "{:,.0f}"),
    Column("samples", None),
    Column("weights", None),
)
OF_WEFT = ("to_sequence", "ledger_megabytes", "exposed_milliseconds")


def _exposed(measured: Measured) -> list[float]:
    """The waits of the rank that waits most, in each turn."""
    return [max(sum(event.waited for event in rank.ledger.events) for rank in turn) for turn in measured.of()]


def methods_on(ranks: int) -> list[Method]:
    """What is compared on so many ranks."""
    found = []
    for matrices, word in (("rekls", "REKLS"), ("adamw", "AdamW")):
        found.append(Method(SEQUENCE.format(word), "sequence", matrices, ranks))
        found.append(Method(f"{word}, overlapped", "overlapped", matrices, ranks))
    return [*found, Method("DDP + AdamW", "ddp", "adamw", ranks), Method(ZERO, "zero", "adamw", ranks)]


def run(pool: RankPool, report: Report, repeats: int, warm_steps: int, sizes: Sizes, only: tuple[str, ...]) -> None:
    """Measure, adding the rows of a number of ranks as soon as it is done. Methods take turns.

    ``only``: those whose names begin so.
    """
    counts = [count for count in (2, 4) if count <= pool.size]
    if not counts:
        raise ValueError(f"bench step compares steps over 2 and 4 ranks, got {pool.size}")
    title = (
        f"one step of {sizes.blocks} blocks (h {sizes.width}), a {sizes.rows} x {sizes.width} table, "
        f"{sizes.vocabulary} token embeddings, {sizes.tokens} tokens of a rank"
    )
    report.tables["step"] = Layout(title, COLUMNS)
    pool.run(set_up)
    with report.progress(len(counts) * repeats, "step") as advance:
        for count in counts:
            methods = [one for one in methods_on(count) if not only or one.name.startswith(only)]
            if not methods:
                known = ", ".join(one.name for one in methods_on(count))
                raise ValueError(f"--methods {' '.join(only)}: no method's name begins so; there are {known}")
            facts = _facts(pool, methods, sizes)
            pool.run(prepare, methods, sizes, warm_steps)
            fill_table(report, "step", partial(_take, pool, facts, repeats), repeats, advance, facts)


def _take(pool: RankPool, facts: dict[str, dict[str, Any]], repeats: int, turn: int) -> list[dict[str, Sample]]:
    """A sample of every method; after the last one its weights become a fact."""
    taken = pool.run(sample, list(facts), turn)
    if turn == repeats:
        weights = pool.run(digest)
        for name, known in facts.items():
            known["weights"] = [rank[name] for rank in weights if name in rank]
    return taken


def _facts(pool: RankPool, methods: list[Method], sizes: Sizes) -> dict[str, dict[str, Any]]:
    """What is known of every method before it is sampled."""
    return {
        method.name: {
            "case": f"{method.ranks}", "method": method.name, "weights": [],
            "peak_megabytes": highest_megabytes(pool.run(measure_peak, method, sizes)),
            **({} if method.is_weft else dict.fromkeys(OF_WEFT)),
        }
        for method in methods
    }  # fmt: skip
