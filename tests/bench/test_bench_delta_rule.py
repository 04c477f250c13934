"""The benchmark of the delta rule: its baselines compute what they should, and its tables say what they must."""

from __future__ import annotations

import pytest
import torch
from worlds import virtual_world

import weft
from weft.bench.delta_rule import cases
from weft.bench.delta_rule.account import PRODUCTS, count_work
from weft.bench.delta_rule.baselines import by_gather, by_heads, with_nothing_sent
from weft.bench.delta_rule.cases import MODELS, NAIVE, PASSES, flops, make_cases, make_inputs
from weft.bench.linear_attention.cases import VIRTUAL_COLUMNS, simulate
from weft.bench.ranks import RankPool
from weft.bench.report import Layout, Report
from weft.bench.timing import Case
from weft.comm.wire import SoloWire
from weft.world.machine import PRESETS

TOKENS, HEADS, DIM = 70, 4, 8


@pytest.mark.parametrize("gate", ["none", "scalar", "vector"])
@pytest.mark.parametrize("recipe", [by_gather, by_heads])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_baselines_give_outputs_and_gradients_of_the_whole_sequence(recipe, gate: str, size: int) -> None:
    whole = [x.detach().double().requires_grad_() for x in make_inputs(size * TOKENS, 0, gate, HEADS, DIM)]
    alone = virtual_world(1).run(lambda axis: weft.delta_rule(*whole, group=axis)[0]).results[0]
    weight = torch.randn(alone.shape, dtype=torch.float64)
    wanted = torch.autograd.grad((alone * weight).sum(), whole)

    def program(axis: weft.Axis) -> list[torch.Tensor]:
        mine = slice(axis.rank * TOKENS, (axis.rank + 1) * TOKENS)
        local = [x[:, mine].detach().requires_grad_() for x in whole]
        o = recipe(axis, *local, *[None] * (5 - len(local)))
        grads = torch.autograd.grad((o * weight[:, mine]).sum(), local)
        return [o.detach(), *grads]

    found = virtual_world(size).run(program).results
    for index, right in enumerate([alone.detach(), *wanted]):
        torch.testing.assert_close(torch.cat([one[index] for one in found], 1), right, rtol=0, atol=1e-11)


def test_heads_that_cannot_be_dealt_are_refused() -> None:
    with pytest.raises(ValueError, match="4 and 4 heads cannot be dealt to 3 ranks"):
        virtual_world(3).run(lambda axis: by_heads(axis, *make_inputs(8, 0, "scalar", HEADS, DIM)))


def test_what_is_computed_with_nothing_sent_is_the_work_of_the_operation() -> None:
    """Rank 0 has the operation's own results, and no rank sends."""

    def program(axis: weft.Axis) -> tuple[torch.Tensor, ...]:
        local = make_inputs(TOKENS, axis.rank, "scalar", HEADS, DIM)
        results = []
        for o in (with_nothing_sent(axis, *local), weft.delta_rule(*local, group=weft.Axis.over(SoloWire()))[0]):
            results += [o.detach(), *torch.autograd.grad(o.sum(), local)]
        return tuple(results)

    run = virtual_world(3).run(program)
    assert sum(ledger.bytes_sent for ledger in run.ledgers) == 0
    for found in run.results:
        for one, other in zip(found[: len(found) // 2], found[len(found) // 2 :], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dim", [8, 16])
def test_two_ranks_compute_no_more_than_half_of_one_process(dim: int) -> None:
    """Products of weft on either rank, with heads in groups; what fla's recipe adds is counted too."""
    work = virtual_world(2).run(lambda axis: count_work(axis, make_cases, 128, 4, dim)).results
    half = work[0][cases.ALL_TOKENS][0] / 2
    for rank in work:
        assert rank[cases.LOCAL][0] == rank[cases.OURS][0] == rank[cases.UNSENT][0] == pytest.approx(half)
        assert rank[cases.LOCAL][1] < rank[cases.UNSENT][1] < rank[cases.OURS][1]
    assert max(rank[cases.GATHER][0] for rank in work) > 1.04 * half


def test_flops_are_those_of_the_algorithm_at_chunk_64() -> None:
    assert flops(64, 1, 128, both=False) == pytest.approx(2 * 4.50e6, rel=1e-3)
    assert 3 < flops(64, 1, 128, both=True) / flops(64, 1, 128, both=False) < 4


def test_tokens_that_do_not_fit_are_refused() -> None:
    for ranks, tokens in ((2, 96), (3, 64)):
        pool = RankPool(ranks, True, lambda run, *args: [])
        with pytest.raises(ValueError, match=f"--tokens {tokens} must be a multiple of 64 .* and of the {ranks} ranks"):
            cases.run(pool, Report({}, None, False, {}), repeats=1, tokens=tokens, heads=2, h100_ranks=())


@pytest.mark.parametrize("is_installed", [True, False])
def test_tables_of_the_benchmark(monkeypatch, capsys, is_installed: bool) -> None:
    if not is_installed:
        monkeypatch.setattr(cases, "fla", lambda module, name: None)
    monkeypatch.setattr(cases, "H100_TOKENS", 1024)  # with fewer, what all-to-alls send is nothing
    pool = RankPool(1, True, lambda run, *args: [run(weft.Axis.over(SoloWire()), *args)])
    report = Report({}, None, False, {})
    cases.run(pool, report, repeats=1, tokens=64, heads=2, h100_ranks=(8, 3))
    rows = {(row["table"], row["case"]): row for row in report.rows}
    for model in MODELS:
        for dim, way in ((dim, way) for dim in cases.DIMS for way in PASSES):
            row = rows["kernel", f"{model}, K=V={dim}, {way}"]
            assert row["milliseconds"] > 0 and row["percent_of_matmul"] > 0
            assert (row["times_faster"] is not None) == (row["naive_percent"] is not None) == is_installed
    assert not any(name.endswith(NAIVE) for _, name in rows)
    for way in PASSES:
        mine = {row["kind"]: row for row in report.rows if row["table"] == "operators" and row["case"] == way}
        assert sum(row["percent"] for row in mine.values()) == pytest.approx(100)
        assert mine[PRODUCTS]["gflop"] > 0.9 * mine[PRODUCTS]["counted"] > 0
        assert all(row["calls"] > 0 for row in mine.values())
    assert rows["ranks, 64", cases.ALL_TOKENS]["to_one_process"] == 1
    assert all(row["gflop"] > 0 and row["calls"] > 0 for (table, _), row in rows.items() if table == "ranks, 64")
    assert all(rows["h100, 8 ranks", recipe]["to_weft"] > 1 for recipe in (cases.GATHER, cases.HEADS_ALIKE))
    assert ("h100, 3 ranks", cases.HEADS_ALIKE) not in rows and ("h100, 3 ranks", cases.GATHER) in rows
    said = "fla-core is not installed: no rows of its naive operations"
    assert (said in capsys.readouterr().err) == (not is_installed)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [8, 16, 64])
def test_ahead_of_both_recipes_from_8_h100s_on(ranks: int) -> None:
    shown = (cases.OURS, cases.GATHER, cases.HEADS_ALIKE)
    made = cases._h100_cases(ranks)
    report = Report({}, None, shown=False)
    report.tables["h100"] = Layout("", VIRTUAL_COLUMNS)

    def of_shown(axis: weft.Axis) -> dict[str, Case]:
        return {name: case for name, case in made(axis).items() if name in shown}

    simulate(report, "h100", ranks, PRESETS["h100"], of_shown)
    faster = {row["case"]: row["to_weft"] for row in report.rows if row["case"] != cases.OURS}
    assert cases.GATHER in faster and all(times > 1.3 for times in faster.values()), faster
