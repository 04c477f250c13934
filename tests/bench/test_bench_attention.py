"""`weft bench attention --packed`: its documents, what its cases compute, and its tables."""

from __future__ import annotations

import json
import math
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from worlds import virtual_world

import weft
from weft.bench.attention import packed
from weft.bench.report import Report
from weft.cli import main
from weft.ops.sequence.layout import LAYOUTS


@pytest.mark.parametrize(("tokens", "longest", "median"), [(1, 0, 8), (500, 0, 8), (8192, 4096, 128)])
def test_documents_fill_the_batch(tokens: int, longest: int, median: int) -> None:
    bounds = packed.documents(tokens, longest, median)
    assert bounds[0] == 0 and bounds[-1] == tokens and all(a < b for a, b in pairwise(bounds))
    assert bounds == packed.documents(tokens, longest, median)
    assert not longest or longest in {b - a for a, b in pairwise(bounds)}


def test_every_layout_computes_the_same_gradients() -> None:
    bounds = packed.documents(60, longest=24, median=6)
    make = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, 60, heads, 8, generator=make, dtype=torch.float64) for heads in (4, 2, 2)]
    wanted = packed.alone(bounds, whole)()

    def program(axis: weft.Axis) -> list[float]:
        errors = []
        for layout in LAYOUTS:
            where = weft.sequence(total=60, layout=layout, cu_seqlens=bounds, group=axis)
            grads = packed.by_layout(axis, layout, bounds, whole)()
            mine = [weft.shard(x, 1, sequence=where) for x in wanted]
            errors += [(a - b).abs().max().item() for a, b in zip(grads, mine, strict=True)]
        return errors

    assert max(max(errors) for errors in virtual_world(3).run(program).results) < 1e-12


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_is_computed_with_nothing_sent_is_the_work_of_the_deal(ranks: int) -> None:
    """By the time of products alone, which is that of weft's own on the busiest rank."""
    bounds = packed.documents(600, longest=240, median=60)
    whole = [torch.empty(1, 600, heads, 8, device="meta") for heads in (4, 2, 2)]
    machine = weft.world.Machine(0.0, math.inf, flops=1e9)
    unsent = weft.world.VirtualWorld(ranks, machine).run(lambda axis: packed.unsent(axis, bounds, whole)())
    ours = weft.world.VirtualWorld(ranks, machine).run(
        lambda axis: packed.by_layout(axis, "balanced", bounds, whole)()
    )  # fmt: skip
    assert unsent.elapsed == pytest.approx(ours.elapsed, rel=1e-6)
    sent = {event.operation for ledger in unsent.ledgers for event in ledger.events if event.sends}
    assert not {name for name in sent if name.startswith("local")} and "attention" not in sent


def test_the_work_of_ranks_is_counted() -> None:
    """One causal document of 16 tokens: the second half has 100 of 136 scores, but in blocks 64 + 32 of 128."""
    assert packed.imbalance("contiguous", (0, 16), 2) == 1.5 and packed.imbalance("zigzag", (0, 16), 2) == 1.0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_its_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "packed.json"
    flags = f"bench attention --packed --tokens 256 --repeats 1 --json {out}"
    flags += " --h100-ranks 2 --h100-tokens 2048 --h100-batches 2"
    monkeypatch.setattr(sys, "argv", ["weft", *flags.split()])
    main()
    rows = {(row["table"], row["case"]): row for row in json.loads(out.read_text())["rows"]}
    for table in ("packed", "packed, 2 H100"):
        unsent = set() if "H100" in table else {packed.UNSENT}
        wanted = {packed.ONE, *unsent, *(f"weft, {one}" for one in LAYOUTS)}
        assert {case for name, case in rows if name == table} == wanted
        for layout in LAYOUTS:
            row = rows[table, f"weft, {layout}"]
            assert row["milliseconds"] > 0 and row["to_share"] > 0 and row["busiest"] >= 1
            assert "H100" not in table or 0.5 < row["to_bound"] < 10


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("ranks", "faster"), [(8, 1.6), (64, 2.0)])
def test_balanced_batches_are_faster_than_zigzag_on_h100s(ranks: int, faster: float) -> None:
    report = Report({}, None, shown=False)
    packed.simulate(report, ranks, 16384, 3 if ranks > 8 else 7)
    row = next(row for row in report.rows if row["case"] == "weft, balanced")
    assert row["to_zigzag"] >= faster and row["to_bound"] <= 1.05
