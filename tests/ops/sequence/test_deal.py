"""How chunks are dealt: balance, lengths, what travels, and that every rank finds the same at once."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import Counter
from itertools import accumulate, pairwise

import pytest

from weft.ops.attention.plan import count, plan_attention
from weft.ops.sequence.deal import Deal, _level, count_pairs, deal_chunks
from weft.ops.sequence.deal import __file__ as deal_file
from weft.ops.sequence.layout import shard_runs
from weft.ops.sequence.mask import Mask
from weft.ops.sequence.runs import Runs, deal_runs, join_chunks, lengths_of


def draw_documents(draw: random.Random, total: int) -> tuple[int, ...]:
    """Boundaries of lognormal documents."""
    middle, spread = draw.uniform(5, 8), draw.choice([0.5, 1.0, 1.5, 2.0])
    bounds = [0]
    while bounds[-1] < total:
        bounds.append(min(total, bounds[-1] + max(1, int(draw.lognormvariate(middle, spread)))))
    return tuple(bounds)


def draw_tree(draw: random.Random, total: int) -> Mask:
    """Shared prefixes, depth first: some questions with many answers each, some of which go on in several ways."""
    parents: list[int] = []
    lengths: list[int] = []
    path: list[int] = []  # the last node and its ancestors
    while (left := total - sum(lengths)) > 0:
        depth = len(path)
        del path[draw.choice([0, max(0, depth - 1), max(0, depth - 1), depth, depth // 2]) :]
        parents.append(path[-1] if path else -1)
        path.append(len(lengths))
        lengths.append(min(left, max(1, int(draw.lognormvariate(6, 1)))))
    return Mask.tree(parents, lengths)


def busiest(total: int, size: int, chunks: int, bounds: tuple[int, ...] | None, mask: Mask | None) -> float:
    """The busiest rank's work over the mean, counted again from the runs."""
    runs = deal_runs(total, size, chunks, () if bounds is None else (bounds,), mask)
    cuts = [run.offset for run in runs] + [total]
    works = count_pairs(cuts, (bounds or (0, total),)) if mask is None else mask.count(cuts)
    loads = Counter[int]()
    for run, work in zip(runs, works, strict=True):
        loads[run.rank] += work
    return max(loads.values()) * size / sum(works)


@pytest.mark.parametrize(("chunks", "most"), [(8, 1.06), (16, 1.02)])
@pytest.mark.parametrize("kind", ["packed", "tree"])
def test_work_is_balanced_and_tokens_are_equal_to_a_chunk(kind: str, chunks: int, most: float) -> None:
    draw = random.Random(chunks)
    for number in range(200):
        size = 2 + (7 * number) % 63
        total = size * draw.choice([512, 1000, 4096]) + draw.randrange(100)
        bounds = draw_documents(draw, total) if kind == "packed" else None
        mask = draw_tree(draw, total) if kind == "tree" else None
        assert busiest(total, size, chunks, bounds, mask) <= most
        deal = deal_chunks(total, size, chunks, () if bounds is None else (bounds,), mask)
        held = Counter(deal.ranks)
        assert len(held) == size and len(set(held.values())) == 1 and held[0] >= chunks
        lengths = lengths_of(deal_runs(total, size, chunks, () if bounds is None else (bounds,), mask), size)
        assert sum(lengths) == total and max(lengths) - min(lengths) <= total // len(deal.ranks)


@pytest.mark.parametrize("kind", ["packed", "tree"])
def test_without_further_cuts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of exactly so many chunks: as balanced, but where one chunk is too much work, which is the same for any deal."""
    monkeypatch.setattr("weft.ops.sequence.deal.TIMES", (1,))
    draw, over = random.Random(8), Counter[int]()
    for number in range(200):
        size = 2 + (7 * number) % 63
        total = size * draw.choice([512, 1000, 4096]) + draw.randrange(100)
        bounds = draw_documents(draw, total) if kind == "packed" else None
        mask = draw_tree(draw, total) if kind == "tree" else None
        documents = () if bounds is None else (bounds,)
        for chunks, most in ((16, 1.02), (8, 1.06)):
            found = deal_chunks.__wrapped__(total, size, chunks, documents, mask)
            works = count_pairs(found.cuts, documents) if mask is None else mask.count(found.cuts)
            assert len(works) == size * chunks
            least = (max(works) + sum(sorted(works)[: chunks - 1])) * size / sum(works)  # whoever has the heaviest
            assert found.busiest <= max(most, 1.03 * least)
            over[chunks] += found.busiest > most
    assert over[16] <= 2 and over[8] <= 20  # of 200


@pytest.mark.slow
@pytest.mark.parametrize(("chunks", "most"), [(8, 1.06), (16, 1.02)])
def test_balance_over_many_batches(chunks: int, most: float) -> None:
    draw = random.Random(0)
    for size in [*range(2, 65)] * 4:
        total = size * draw.choice([512, 1000, 4096]) + draw.randrange(100)
        assert busiest(total, size, chunks, draw_documents(draw, total), None) <= most
        assert busiest(total, size, chunks, None, draw_tree(draw, total)) <= most


def test_runs_are_every_token_once_in_the_order_of_the_sequence() -> None:
    draw = random.Random(3)
    for total in (0, 1, 5, 7, 64, 333, 1000):
        for size in (1, 2, 3, 5, 8):
            runs = shard_runs(total, "balanced", size, draw_documents(draw, total) if total else None)
            assert [run.offset for run in runs] == [0, *accumulate(run.length for run in runs)][:-1]
            assert sum(run.length for run in runs) == total and {run.rank for run in runs} == set(range(size))
            assert all(a.rank != b.rank for a, b in pairwise(runs))  # chunks that meet are one run
            for rank in range(size):
                mine = [run for run in runs if run.rank == rank]
                assert [run.start for run in mine] == [0, *accumulate(run.length for run in mine)][:-1]
            lengths = lengths_of(runs, size)
            assert min(lengths) >= 1 or total < size


def test_few_tokens_are_not_cut_into_crumbs() -> None:
    assert len(shard_runs(10**6, "balanced", 1)) == 1
    for total, chunks in ((7, 1), (8 * 9, 3), (8 * 100, 8)):
        assert len(deal_chunks(total, 8, 8, (), None).ranks) == 8 * chunks
    assert len(deal_chunks(8 * 100, 8, 2, (), None).ranks) == 8 * 2


def test_a_chunk_that_is_too_heavy_is_cut_further() -> None:
    """One document of the length of a rank among crumbs: the work of 8 chunks is nearly all there is."""
    bounds = (0, 4096, *range(4096 + 8, 8 * 4096 + 1, 8))
    deal = deal_chunks(8 * 4096, 8, 8, (bounds,), None)
    assert len(deal.ranks) > 8 * 8 and deal.busiest <= 1.02


def test_one_causal_document_is_dealt_nearly_as_zigzag() -> None:
    """In no more runs."""
    assert deal_chunks(8 * 1024, 8, None, (), None).busiest <= 1.02
    assert len(deal_runs(8 * 1024, 8, None, (), None)) <= 2 * 8


def sent(runs: Runs, size: int, bounds: tuple[int, ...]) -> int:
    """Tokens whose keys travel."""
    plan = plan_attention(runs, lengths_of(runs, size), bounds, True, (-1, -1))
    return sum(count(plan.visible_to(owner, reader)) for owner in range(size) for reader in range(size))


def test_chunks_of_a_document_are_kept_together() -> None:
    """Against the deal that gives the heaviest chunk left to whoever needs it, and scatters all documents."""
    draw, ours, scattered = random.Random(1), 0, 0
    for _ in range(5):
        bounds = draw_documents(draw, 16 * 1024)
        deal = deal_chunks(16 * 1024, 16, 8, (bounds,), None)
        level = Deal(deal.cuts, tuple(_level(count_pairs(deal.cuts, (bounds,)), 16)), 1.0)
        ours += sent(join_chunks(deal, 16), 16, bounds)
        scattered += sent(join_chunks(level, 16), 16, bounds)
    assert ours < 0.8 * scattered
    bounds = tuple(range(0, 16 * 1024 + 1, 1024))  # of as many tokens as a rank has
    assert sent(shard_runs(16 * 1024, "balanced", 16, bounds), 16, bounds) < 16 * 1024


PROGRAM = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("deal", sys.argv[1])
module = sys.modules["deal"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(*module.deal_chunks(40_000, 24, 8, (tuple(map(int, sys.argv[2].split())),), None).ranks)
"""


@pytest.mark.processes
def test_every_process_deals_alike() -> None:
    bounds = draw_documents(random.Random(5), 40_000)
    wanted = " ".join(map(str, deal_chunks(40_000, 24, 8, (bounds,), None).ranks))
    for seed in ("1", "2"):
        run = subprocess.run(
            [sys.executable, "-c", PROGRAM, deal_file, " ".join(map(str, bounds))], capture_output=True,
            text=True, check=True, env={"PYTHONHASHSEED": seed},
        )  # fmt: skip
        assert run.stdout.strip() == wanted


@pytest.mark.parametrize("documents", ["one", "many"])
def test_a_million_tokens_on_a_thousand_ranks_take_milliseconds(documents: str) -> None:
    total = 1 << 20
    bounds = () if documents == "one" else (draw_documents(random.Random(2), total),)
    deal_chunks.cache_clear()
    began = time.process_time()
    deal = deal_chunks(total, 1024, None, bounds, None)
    assert time.process_time() - began < 1.0  # measured: 0.02 to 0.15; of a machine that does other things too
    assert deal.busiest <= 1.02


def test_a_rank_has_a_few_runs() -> None:
    """About two where every document fits on a rank, about five where long ones lie on several."""
    draw = random.Random(4)
    for size in (4, 8, 24, 64):
        bounds = draw_documents(draw, 4096 * size)
        assert len(shard_runs(4096 * size, "balanced", size, bounds)) <= 6 * size
        short = tuple(accumulate((draw.randrange(200, 600) for _ in range(8 * size)), initial=0))
        assert len(shard_runs(short[-1], "balanced", size, short)) <= 3 * size


def test_ranks_send_and_receive_nearly_alike() -> None:
    """The ranks of a long document have equal parts of it, so none sends its keys for all."""
    draw, most, mean = random.Random(6), 0.0, 0.0
    for _ in range(8):
        bounds = [0]
        while bounds[-1] < 8 * 4096:
            bounds.append(min(8 * 4096, bounds[-1] + max(1, int(draw.lognormvariate(7, 1.5)))))
        runs = shard_runs(8 * 4096, "balanced", 8, tuple(bounds))
        plan = plan_attention(runs, lengths_of(runs, 8), tuple(bounds), True, (-1, -1))
        tokens = [[count(plan.visible_to(owner, reader)) for reader in range(8)] for owner in range(8)]
        traffic = [sum(tokens[rank]) + sum(row[rank] for row in tokens) for rank in range(8)]
        most, mean = most + max(traffic), mean + sum(traffic) / 8
    assert most < 1.25 * mean
