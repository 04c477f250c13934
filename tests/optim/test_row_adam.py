"""`RowAdam`: its modes by their definitions, the torch.optim contract, and what it refuses."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from worlds import place, virtual_world

import weft
from weft import optim
from weft.comm.wire import SoloWire
from weft.optim.rows.skipped_steps import StepHistory
from weft.optim.rows.steps import AdamStep, RowCosts, Shard, step_dense, step_rows


def table_of(rows: int = 9, width: int = 3, **options) -> weft.ShardedEmbedding:
    torch.manual_seed(0)
    return weft.ShardedEmbedding(rows, width, dtype=torch.float64, **options)


def backward(table: weft.ShardedEmbedding, ids: list[int], step: int) -> Tensor:
    """A gradient for these ids that depends on the step; returns the loss."""
    loss = (table(torch.tensor(ids, dtype=torch.int64)) * (1 + 0.1 * step)).sin().sum()
    loss.backward()
    return loss.detach()


def lazy_by_definition(weight: Tensor, batches: list[list[int]], lr: float, decay: float) -> Tensor:
    """Rows with a gradient take one AdamW step with the bias corrections of all steps; the others stay as they are."""
    m, v = torch.zeros_like(weight), torch.zeros_like(weight)
    for number, ids in enumerate(batches, 1):
        leaf = weight.clone().requires_grad_()
        (leaf[ids] * (1 + 0.1 * (number - 1))).sin().sum().backward()
        for row in set(ids):
            m[row] = 0.9 * m[row] + 0.1 * leaf.grad[row]
            v[row] = 0.999 * v[row] + 0.001 * leaf.grad[row] ** 2
            hat_m, hat_v = m[row] / (1 - 0.9**number), v[row] / (1 - 0.999**number)
            weight[row] = weight[row] * (1 - lr * decay) - lr * hat_m / (hat_v.sqrt() + 1e-8)
    return weight


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lazy_is_its_definition(decay: float) -> None:
    batches = [[1, 2, 2], [3], [1, 8], [], [2, 3, 1], [8]] * 3
    table = table_of()
    wanted = lazy_by_definition(table.weight.detach().clone(), batches, 0.05, decay)
    optimizer = optim.RowAdam(table.parameters(), lr=0.05, weight_decay=decay, mode="lazy")
    for step, ids in enumerate(batches):
        backward(table, ids, step)
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(table.weight.detach(), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize("betas", [(0.5, 0.0), (0.0, 0.0), (0.5, 1e-30)])
def test_a_second_beta_of_nothing_is_that_of_torch(betas: tuple[float, float]) -> None:
    batches = [[1, 2], [3], [3], [3], [8], [3], [1, 2, 8]]

    def program(axis: weft.Axis) -> float:
        table, dense = place(table_of(group=axis)), table_of(group=axis.subset([axis.rank]))
        whole = dense.weight.detach().clone().requires_grad_()
        optimizer = optim.RowAdam(table.parameters(), lr=0.01, betas=betas, eps=0.1)
        adam = torch.optim.Adam([whole], lr=0.01, betas=betas, eps=0.1)
        for step, ids in enumerate(batches):
            backward(table, ids, step)
            whole.grad = None
            (whole[ids] * (1 + 0.1 * step)).sin().sum().backward()
            for one in (optimizer, adam):
                one.step()
            optimizer.zero_grad()
        return float((table.full_weight().cpu() - whole).detach().abs().max())

    assert max(virtual_world(3).run(program).results) < 1e-12


@pytest.mark.parametrize("width", [1, 3, 16, 31])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_both_ways_of_a_step_give_the_same_bits(width: int, dtype: torch.dtype) -> None:
    rows = 70_000 // width
    make = torch.Generator().manual_seed(width)

    def draw(kind: torch.dtype) -> Tensor:
        return torch.randn(rows, width, generator=make).to(kind)

    wide = torch.promote_types(dtype, torch.float32)
    start = draw(dtype), draw(wide), draw(wide).abs()
    places = torch.randperm(rows, generator=make)[: int(0.8 * rows)].sort().values
    grads = torch.randn(len(places), width, generator=make).to(wide)
    ends = []
    for way in (step_rows, step_dense):
        shard = Shard(*(x.clone() for x in start))
        way(shard, places, grads, AdamStep(7, 0.01, (0.9, 0.99), 1e-8, 0.1))
        ends.append((shard.weight, shard.exp_avg, shard.exp_avg_sq))
    for one, other, before in zip(*ends, start, strict=True):
        assert torch.equal(one, other)
        rest = torch.ones(rows, dtype=torch.bool)
        rest[places] = False
        assert torch.equal(one[rest], before[rest]) and not torch.equal(one, before)


@pytest.mark.parametrize("dense", [False, True])
def test_auto_says_what_it_picked(dense: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = RowCosts(copied=1.0, in_place=0.1 if dense else 10.0, kept=0.1)
    monkeypatch.setattr(RowCosts, "measure", staticmethod(lambda shard: costs))
    tables = [table_of(), table_of()]
    for table, mode in zip(tables, ("exact", "auto"), strict=True):
        optimizer = optim.RowAdam(table.parameters(), lr=0.05, weight_decay=0.1, mode=mode)
        with weft.record() as ledger:
            for step, ids in enumerate([[0, 1, 2, 3, 5, 6, 7, 8], [4], [0, 1, 2, 3, 4, 5, 6, 7, 8]]):
                backward(table, ids, step)
                optimizer.step()
                optimizer.zero_grad()
        picked = [event.operation for event in ledger.events if event.operation.startswith("RowAdam")]
        most = "RowAdam: dense" if dense and mode == "auto" else "RowAdam: rows"
        assert picked == [most, "RowAdam: rows", most]
    assert torch.equal(tables[0].full_weight(), tables[1].full_weight())


def test_costs_are_measured() -> None:
    shard = Shard(torch.zeros(10, 64), torch.zeros(10, 64), torch.zeros(10, 64))
    costs = RowCosts.measure(shard)
    assert costs.copied > 0 and costs.in_place > 0 and costs.kept >= 0
    assert RowCosts(2.0, 1.0, 1.0).prefer_dense(100, 100) and not RowCosts(2.0, 1.0, 1.0).prefer_dense(50, 100)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.95, 0.9), (0.0, 0.9)])
def test_skipped_steps_are_the_steps_one_by_one(betas: tuple[float, float], dtype: torch.dtype) -> None:
    """Long and short gaps, early and late, all magnitudes of v against eps, and a schedule with weight decay."""
    make = torch.Generator().manual_seed(0)
    for base, gap in ((0, 1), (0, 40), (0, 150), (700, 240)):
        history = StepHistory(base, betas, 1e-8, dtype)
        size = 10.0 ** torch.linspace(-9, 0, 24, dtype=torch.float64)
        m = torch.randn(24, generator=make, dtype=torch.float64) * size
        v = m.square() * (0.05 + torch.rand(24, generator=make, dtype=torch.float64))
        w = torch.randn(24, generator=make, dtype=torch.float64)
        start, first = (w, m, v), base + 3
        moved = torch.zeros(())
        for number in range(base + 1, first + gap + 1):
            lr = 1e-2 * (1 + 0.5 * torch.sin(torch.tensor(number / 9.0)).item())
            history.append(lr, 0.1)
            if number <= first:
                continue
            m, v = betas[0] * m, betas[1] * v
            move = lr / (1 - betas[0] ** number) * m / (v.sqrt() / (1 - betas[1] ** number) ** 0.5 + 1e-8)
            w, moved = w * (1 - lr * 0.1) - move, moved + move.abs()
        skipped = history.skipped(torch.tensor([first, first + gap // 2]))
        w0, m0, v0 = (x.to(dtype) for x in start)
        points = skipped.points if skipped.points.ndim == 1 else skipped.points[0]
        total = (skipped.amounts[0] / (v0.sqrt()[:, None] * points + 1e-8)).sum(1)
        found = skipped.weight[0] * w0 - m0 * total
        small = 1e-13 if dtype == torch.float64 else 2e-7
        assert ((found - w).abs() <= small * (w.abs() + moved + 1)).all(), (base, gap)
        torch.testing.assert_close(skipped.momentum[0] * m0, m.to(dtype), rtol=1e-5, atol=0)
        torch.testing.assert_close(skipped.variance[0] * v0, v.to(dtype), rtol=1e-5, atol=0)
        if dtype == torch.float32:
            assert skipped.points.shape[-1] <= {0.999: 12, 0.95: 32}.get(betas[1], 48)


def test_a_row_left_alone_for_long_comes_to_rest() -> None:
    table = table_of()
    plain = nn.Embedding(9, 3, dtype=torch.float64)
    plain.load_state_dict({"weight": table.weight.detach()})
    optimizer = optim.RowAdam(table.parameters(), lr=0.01)
    dense = torch.optim.Adam(plain.parameters(), lr=0.01)
    horizon = StepHistory(0, (0.9, 0.999), 1e-8, torch.float64).horizon
    for step in range(horizon + 40):
        ids = [1, 4] if step == 0 else [2]
        backward(table, ids, step)
        backward(plain, ids, step)
        optimizer.step()
        dense.step()
        optimizer.zero_grad()
        dense.zero_grad()
    assert not table.table.deferred.moves_without_gradient(torch.tensor([0])).any()
    assert table.table.deferred.moves_without_gradient(torch.tensor([1])).all()
    torch.testing.assert_close(table.full_weight(), plain.weight, rtol=1e-12, atol=1e-12)
    assert not table.table.deferred.moves_without_gradient(torch.tensor([1])).any()
    for step, ids in enumerate([[1], [1, 4]]):
        backward(table, ids, step)
        backward(plain, ids, step)
        optimizer.step()
        dense.step()
    torch.testing.assert_close(table.full_weight(), plain.weight, rtol=1e-12, atol=1e-12)


def test_groups_closures_schedulers_and_changed_settings() -> None:
    one, two = table_of(), table_of(rows=5)
    plain = [nn.Embedding(9, 3, dtype=torch.float64), nn.Embedding(5, 3, dtype=torch.float64)]
    for table, other in zip((one, two), plain, strict=True):
        other.load_state_dict({"weight": table.full_weight().detach()})

    def groups(first: nn.Module, second: nn.Module) -> list[dict]:
        return [{"params": first.parameters(), "lr": 0.1}, {"params": second.parameters(), "weight_decay": 0.2}]

    rows = optim.RowAdam(groups(one, two), lr=0.03)
    dense = torch.optim.AdamW(groups(*plain), lr=0.03, weight_decay=0.0)
    for optimizer, (first, second) in ((rows, (one, two)), (dense, plain)):
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        for step in range(12):
            optimizer.zero_grad()

            def closure(first=first, second=second, step=step) -> Tensor:
                return backward(first, [step % 4, 7], step) + backward(second, [step % 3], step)

            assert optimizer.step(closure) is not None
            schedule.step()
            if step == 6:
                for group in optimizer.param_groups:
                    group["betas"], group["eps"] = (0.8, 0.9), 1e-3
    for table, other in zip((one, two), plain, strict=True):
        torch.testing.assert_close(table.full_weight(), other.weight, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize("mode", ["exact", "lazy"])
def test_state_dict_round_trips_between_sizes_and_torch(mode: str) -> None:
    """Saved by 3 virtual ranks after 6 steps; 6 more on 2 ranks, in one process and with torch's AdamW."""

    def begin(axis: weft.Axis, saved: tuple[dict, dict] | None) -> tuple[weft.ShardedEmbedding, optim.RowAdam]:
        torch.manual_seed(0)
        table = weft.ShardedEmbedding(9, 3, dtype=torch.float64, group=axis)
        table = table if isinstance(axis.wire, SoloWire) else place(table)
        optimizer = optim.RowAdam(table.parameters(), lr=0.05, weight_decay=0.1, mode=mode)
        if saved is not None:
            table.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        return table, optimizer

    def train(axis: weft.Axis, steps: range, saved: tuple[dict, dict] | None = None) -> tuple[Tensor, dict, dict]:
        table, optimizer = begin(axis, saved)
        for step in steps:
            backward(table, [step % 5, 3], step)
            optimizer.step()
            optimizer.zero_grad()
        return table.full_weight().detach(), table.state_dict(), optimizer.state_dict()

    whole = virtual_world(3).run(lambda axis: train(axis, range(12))).results[0][0]
    half = virtual_world(3).run(lambda axis: train(axis, range(6))).results[0][1:]
    for size in (2, 1):
        for found in virtual_world(size).run(lambda axis: train(axis, range(6, 12), half)).results:
            torch.testing.assert_close(found[0], whole, rtol=1e-12, atol=1e-12)
    if mode == "exact":
        plain = nn.Embedding(9, 3, dtype=torch.float64)
        plain.load_state_dict(half[0])
        dense = torch.optim.AdamW(plain.parameters(), lr=0.05, weight_decay=0.1)
        dense.load_state_dict(half[1])
        for step in range(6, 12):
            dense.zero_grad()
            backward(plain, [step % 5, 3], step)
            dense.step()
        torch.testing.assert_close(plain.weight.detach(), whole, rtol=1e-12, atol=1e-12)
        table, optimizer = begin(weft.Axis.of(None), None)
        optimizer.load_state_dict(dense.state_dict())  # and back
        assert int(optimizer.state[table.weight]["step"]) == 12


@pytest.mark.parametrize("what", ["table", "moments"])
def test_loading_one_of_both_in_the_middle(what: str) -> None:
    """Rows that have missed steps make them before they, or their moments, are replaced."""
    table = table_of()
    plain = nn.Embedding(9, 3, dtype=torch.float64)
    plain.load_state_dict({"weight": table.weight.detach()})
    pairs = [
        (table, optim.RowAdam(table.parameters(), lr=0.05)),
        (plain, torch.optim.Adam(plain.parameters(), lr=0.05)),
    ]
    for either, optimizer in pairs:
        first = {"weight": either.weight.detach().clone()}
        for step in range(12):
            if step == 2:
                early = copy.deepcopy(optimizer.state_dict())
            if step == 6 and what == "table":
                either.load_state_dict(first)
            elif step == 6:
                optimizer.load_state_dict(early)
            backward(either, [0, 1, 2, 3] if step == 0 else [step % 2], step)
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(table.full_weight(), plain.weight, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["rows", "slices"])
def test_a_state_is_loaded_twice(kind: str) -> None:
    table, vector = table_of(), nn.Parameter(torch.ones(3))
    optimizer = optim.RowAdam(table.parameters(), lr=0.05) if kind == "rows" else optim.ShardedAdamW([vector], lr=0.05)
    backward(table, [1, 2], 0)
    vector.grad = torch.ones(3)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    for _ in range(3):
        optimizer.load_state_dict(copy.deepcopy(saved))
    again = optimizer.state_dict()
    assert again["param_groups"] == saved["param_groups"]
    for name, value in saved["state"][0].items():
        assert torch.equal(again["state"][0][name], value)


def test_bf16_tables_have_fp32_moments_that_survive_loading() -> None:
    torch.manual_seed(0)
    table = weft.ShardedEmbedding(9, 3, dtype=torch.bfloat16)
    optimizer = optim.RowAdam(table.parameters(), lr=0.05)
    for step in range(3):
        backward(table, [1, 2, 1], step)
        optimizer.step()
        optimizer.zero_grad()
    other = optim.RowAdam(table.parameters(), lr=0.05)
    other.load_state_dict(optimizer.state_dict())
    for name in ("exp_avg", "exp_avg_sq"):
        mine, theirs = (each.state[table.weight][name] for each in (optimizer, other))
        assert mine.dtype == theirs.dtype == torch.float32 and torch.equal(mine, theirs) and mine.abs().max() > 0


def test_what_cannot_be_right_is_refused() -> None:
    table = table_of()
    for words, options in (
        ("mode 'eager' is not one of exact, lazy, auto", {"mode": "eager"}),
        ("lr, eps and weight_decay must be finite and not negative, got -1.0", {"lr": -1.0}),
        (r"betas must be in \[0, 1\), got \(1.0, 0.9\)", {"betas": (1.0, 0.9)}),
        ("lr \\* weight_decay must be below 1, got 2.0 \\* 0.5", {"lr": 2.0, "weight_decay": 0.5}),
    ):
        with pytest.raises(ValueError, match=words):
            optim.RowAdam(table.parameters(), **options)
    with pytest.raises(TypeError, match=r"shape \[3, 2\] is not the weight of a weft.ShardedEmbedding"):
        optim.RowAdam([nn.Parameter(torch.ones(3, 2))])
    optimizer = optim.RowAdam(table.parameters())
    with pytest.raises(ValueError, match=r"exp_avg of parameter 0 is \[4, 3\] in the state, but the table is \[9, 3\]"):
        optimizer.load_state_dict(optim.RowAdam(table_of(rows=4).parameters()).state_dict())
    other = table_of()
    optimizer.add_param_group({"params": other.parameters()})
    before = table.weight.detach().clone()
    backward(table, [1], 0)
    optimizer.param_groups[1]["lr"] = -1.0  # of the second group: the first is not stepped either
    with pytest.raises(ValueError, match="must be finite and not negative"):
        optimizer.step()
    assert torch.equal(before, table.weight) and optimizer.state[table.weight]["step"] == 0


def test_state_is_there_before_the_first_step() -> None:
    table = table_of()
    assert set(optim.RowAdam(table.parameters()).state[table.weight]) == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.usefixtures("every_network")
def test_more_ranks_than_rows() -> None:
    def program(axis: weft.Axis) -> Tensor:
        torch.manual_seed(0)
        table = place(weft.ShardedEmbedding(2, 3, dtype=torch.float64, group=axis))
        optimizer = optim.RowAdam(table.parameters(), lr=0.05, weight_decay=0.1, mode="auto")
        for step in range(5):
            backward(table, [step % 2], step)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.load_state_dict(optimizer.state_dict())
        return table.full_weight().detach()

    wanted = virtual_world(1).run(program).results[0]
    for found in virtual_world(5).run(program).results:
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_another_optimizer_takes_over() -> None:
    table = table_of()
    plain = nn.Embedding(9, 3, dtype=torch.float64)
    plain.load_state_dict({"weight": table.weight.detach()})
    for either, kind in ((table, optim.RowAdam), (plain, torch.optim.Adam)):
        for ids in ([1, 2], [3], [3]), ([1], [4]):
            optimizer = kind(either.parameters(), lr=0.05)
            for step, some in enumerate(ids):
                backward(either, some, step)
                optimizer.step()
                optimizer.zero_grad()
    torch.testing.assert_close(table.full_weight(), plain.weight, rtol=1e-12, atol=1e-12)
