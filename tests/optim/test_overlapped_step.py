"""`OverlappedStep` on virtual ranks: the bits of its parts one after the other, in every order."""

from __future__ import annotations

import itertools

import pytest
import torch
from mixed_model import (
    Mixed,
    assert_all_have,
    backward,
    ids_of,
    overlapped,
    parts_of,
    train_alone,
    train_in_sequence,
    train_overlapped,
)
from torch import Tensor
from worlds import every, place, virtual_world

import weft
from weft import optim

pytestmark = pytest.mark.usefixtures("every_network")


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("early", [False, True])
def test_it_is_three_optimizers_on_averaged_gradients(size: int, early: bool, every_network: str) -> None:
    """In one process, with gradients averaged by hand and torch's AdamW; with accumulation and without."""
    for micros in every((1, 3)):
        wanted = train_alone(size, 4, micros)
        found = virtual_world(size).run(lambda axis, n=micros: train_overlapped(axis, 4, n, overlap_backward=early))
        if every_network != "sim":
            assert_all_have(wanted, found.results)
        for mine in found.results:  # matmuls of the model may round otherwise on a device
            torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [2, 3])
def test_every_order_has_the_same_bits(size: int) -> None:
    wanted = virtual_world(size).run(lambda axis: train_in_sequence(axis, 2)).results[0]
    for order in every(list(itertools.permutations(range(3)))):
        for early in (False, True):
            options = {"order": order, "overlap_backward": early, "bucket_bytes": 100}
            found = virtual_world(size).run(lambda axis, o=options: train_overlapped(axis, 2, **o)).results
            assert_all_have(wanted, found)


def test_tables_come_first_or_last_and_other_parts_as_listed() -> None:
    """Gradients of tables leave in the backward, which comes to them last."""
    axis = weft.Axis.of(None)

    def order(**options) -> list[tuple[str, int]]:
        return [(unit.name, unit.bucket) for unit in overlapped(Mixed(axis), axis, **options).units]

    tables, others = [("RowAdam", 0), ("RowAdam", 1)], [("ShardedAdamW", 0), ("REKLS", 0)]
    for places in ((1, 0, 2), (1, 2, 0), (2, 1, 0)):
        assert order(order=places) == tables + others
        assert order(order=places, overlap_backward=True) == others + tables


@pytest.mark.parametrize(
    ("size", "mode"), [(1, "exact"), (2, "lazy"), (2, "auto"), pytest.param(4, "exact", marks=pytest.mark.slow)]
)
def test_low_precision_and_the_modes_of_tables(size: int, mode: str) -> None:
    """bf16 with fp32 masters and moments; tables whose rows lie still for some steps."""
    for dtype in every((torch.bfloat16, torch.float64)):
        wanted = virtual_world(size).run(lambda axis, d=dtype: train_in_sequence(axis, 5, 2, d, mode)).results[0]
        found = virtual_world(size).run(
            lambda axis, d=dtype: train_overlapped(axis, 5, 2, d, mode, overlap_backward=True)
        )
        assert_all_have(wanted, found.results)


def test_buckets_of_any_size_have_the_same_bits() -> None:
    wanted = virtual_world(3).run(lambda axis: train_in_sequence(axis, 3)).results[0]
    for bucket_bytes in every((1, 60, 300, 1 << 20)):
        found = virtual_world(3).run(
            lambda axis, b=bucket_bytes: train_overlapped(axis, 3, bucket_bytes=b, overlap_backward=True)
        )
        assert_all_have(wanted, found.results)

    def names(axis: weft.Axis, bucket_bytes: int) -> int:
        return len(overlapped(Mixed(axis), axis, bucket_bytes=bucket_bytes).units)

    few, many = (virtual_world(3).run(lambda axis, b=b: names(axis, b)).results[0] for b in (1 << 20, 60))
    assert few == 4 and many == 8


def test_data_by_tensor_ranks() -> None:
    """REKLS over two axes, where gradients travel in two hops, beside AdamW on one: as each of them alone."""
    grads = [torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]

    def program(axis: weft.Axis, joined: bool) -> list[Tensor]:
        row, column = divmod(axis.rank, 2)
        tensor, data = axis.subset([2 * row, 2 * row + 1]), axis.subset([column, column + 2])
        shards = place([torch.nn.Parameter(torch.ones(3, 8) * (1 + n)) for n in range(5)])
        vectors = [place(torch.nn.Parameter(torch.ones(7)))]
        parts: list[optim.StepPart] = [
            optim.REKLS(
                [{"params": shards, "partition_dim": 0}], lr=0.1, variant="stable", group=tensor, data_group=data
            ),
            optim.ShardedAdamW(vectors, lr=0.1, group=data),
        ]
        steps = [optim.OverlappedStep(parts[::-1], bucket_bytes=100)] if joined else parts
        if not joined:
            parts[0].cut(100)
            parts[1].cut(100)
        for grad in grads:
            for number, shard in enumerate(shards):
                shard.grad = place(grad[row + number % 3][3 * column : 3 * column + 3].clone())
            vectors[0].grad = place(grad[row, 0, :7].clone())
            for step in steps:
                step.step()
        return [p.detach() for p in (*shards, *vectors)]

    apart, together = (virtual_world(4).run(lambda axis, j=j: program(axis, j)).results for j in (False, True))
    for one, other in zip(apart, together, strict=True):
        assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_largest_norm_counts_everything_once(size: int) -> None:
    """Against torch's clip on the whole, averaged gradients of one process."""

    def alone() -> float:
        axis = weft.Axis.of(None)
        total: list[Tensor] = []
        for rank in range(size):
            model = Mixed(axis)
            model(ids_of(0, 0, rank)).backward()
            dense = [p.grad for p in (*model.matrices, *model.vectors) if p.grad is not None]
            found = [*dense, *(table.weight.grad.to_dense() for table in (model.table, model.second))]
            total = found if not total else [a + b for a, b in zip(total, found, strict=True)]
        return float(torch.cat([(grad / size).flatten() for grad in total]).double().norm())

    def program(axis: weft.Axis, clip: float, early: bool) -> tuple[float, list[Tensor]]:
        model = Mixed(axis)
        optimizer = overlapped(model, axis, clip=clip, overlap_backward=early)
        backward(model, axis, 0, 1)
        optimizer.step()
        return optimizer.norm, model.values()

    norm = alone()
    loose = virtual_world(size).run(lambda axis: train_overlapped(axis, 1)).results[0]
    for early in (False, True):
        for found, values in virtual_world(size).run(lambda axis, e=early: program(axis, 1e9, e)).results:
            assert found == pytest.approx(norm, rel=1e-6)
            assert all(torch.equal(*pair) for pair in zip(values, loose, strict=True))
    tight = virtual_world(size).run(lambda axis: program(axis, norm / 3, True)).results
    halved = virtual_world(size).run(lambda axis: clipped_by_hand(axis, norm / 3, norm)).results
    for (found, values), wanted in zip(tight, halved, strict=True):
        assert found == pytest.approx(norm, rel=1e-6)
        for one, other in zip(values, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-5, atol=1e-6)


def clipped_by_hand(axis: weft.Axis, clip: float, norm: float) -> list[Tensor]:
    model = Mixed(axis)
    optimizer = overlapped(model, axis)
    (model(place(ids_of(0, 0, axis.rank))) * (clip / (norm + 1e-6))).backward()
    optimizer.step()
    return model.values()


def test_the_norm_over_two_axes() -> None:
    """Sharded, replicated and averaged parameters count once each, also what lies on one of the axes only."""
    whole = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).double()
    square = torch.randn(5, 5, generator=torch.Generator().manual_seed(1)).double()
    cut, same, apart = (torch.randn(6, generator=torch.Generator().manual_seed(seed)).double() for seed in (2, 3, 4))

    def program(axis: weft.Axis) -> float:
        row, column = divmod(axis.rank, 2)
        tensor, data = axis.subset([2 * row, 2 * row + 1]), axis.subset([column, column + 2])
        half = slice(3 * column, 3 * column + 3)
        given = place([(whole[half], 0), (square, None), (cut[half], 0), (same, None)])
        parameters = [torch.nn.Parameter(torch.zeros_like(grad)) for grad, _ in given]
        for parameter, (grad, _) in zip(parameters, given, strict=True):
            parameter.grad = grad.clone()
        groups = [{"params": [p], "partition_dim": dim} for p, (_, dim) in zip(parameters, given, strict=True)]
        vector = place(torch.nn.Parameter(torch.zeros(6).double()))
        vector.grad = place(apart.clone())
        step = optim.OverlappedStep(
            [
                optim.REKLS(groups, lr=0.1, group=tensor, data_group=data),
                optim.ShardedAdamW([vector], group=data),
            ],
            clip=1.0,
        )
        step.step()
        return step.norm

    wanted = float(torch.cat([x.flatten() for x in (whole, square, cut, same, apart)]).norm())
    assert virtual_world(4).run(program).results == pytest.approx([wanted] * 4, rel=1e-12)


def test_the_norm_of_tables_on_different_axes() -> None:
    """Each counts once, also on the axis it does not lie on."""

    def program(axis: weft.Axis) -> float:
        row, column = divmod(axis.rank, 2)
        across, along = axis.subset([2 * row, 2 * row + 1]), axis.subset([column, column + 2])
        tables = [place(weft.ShardedEmbedding(6, 3, group=one, dtype=torch.float64)) for one in (across, along)]
        step = optim.OverlappedStep([optim.RowAdam([table.weight for table in tables], lr=0.1)], clip=1.0)
        for weight, table in enumerate(tables, 1):
            (table(torch.arange(6)) * weight).sum().backward()
        step.step()
        return step.norm

    wanted = (18 * 1.0**2 + 18 * 2.0**2) ** 0.5  # every rank asks for every row: the mean over ranks is the same
    assert virtual_world(4).run(program).results == pytest.approx([wanted] * 4, rel=1e-12)


@pytest.mark.parametrize("first", ["vectors", "table", "matrices"])
def test_the_norm_over_axes_that_share_ranks(first: str) -> None:
    """A table over all ranks, vectors over some of them, matrices over both kinds: each element counts once."""
    whole = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).double()
    apart = torch.randn(7, generator=torch.Generator().manual_seed(1)).double()

    def program(axis: weft.Axis) -> float:
        row, column = divmod(axis.rank, 2)
        tensor, data = axis.subset([2 * row, 2 * row + 1]), axis.subset([column, column + 2])
        rows, numbers = place((whole[2 * column : 2 * column + 2].clone(), apart.clone()))
        matrix, vector = torch.nn.Parameter(rows * 0), torch.nn.Parameter(numbers * 0)
        matrix.grad, vector.grad = rows, numbers
        table = place(weft.ShardedEmbedding(6, 3, group=axis, dtype=torch.float64))
        parts = {
            "vectors": optim.ShardedAdamW([vector], group=data),
            "table": optim.RowAdam([table.weight], lr=0.1),
            "matrices": optim.REKLS([{"params": [matrix], "partition_dim": 0}], lr=0.1, group=tensor, data_group=data),
        }
        step = optim.OverlappedStep([parts.pop(first), *parts.values()], clip=1.0)
        (table(torch.arange(6)) * 2).sum().backward()
        step.step()
        return step.norm

    wanted = float(torch.cat([whole.flatten(), apart.flatten(), torch.full((18,), 2.0).double()]).norm())
    found = virtual_world(4).run(program).results
    assert found == pytest.approx([wanted] * 4, rel=1e-12) and len(set(found)) == 1


def test_the_norm_has_the_same_bits_everywhere() -> None:
    """Also where ranks that should have the same gradients differ in their last bits."""

    def program(axis: weft.Axis) -> float:
        row, column = divmod(axis.rank, 2)
        tensor, data = axis.subset([2 * row, 2 * row + 1]), axis.subset([column, column + 2])
        table = place(weft.ShardedEmbedding(6, 3, group=tensor, dtype=torch.float64))
        vector = place(torch.nn.Parameter(torch.zeros(7).double()))
        vector.grad = torch.ones_like(vector) * (1 + 1e-12 * column)
        step = optim.OverlappedStep(
            [optim.RowAdam([table.weight], lr=0.1), optim.ShardedAdamW([vector], group=data)], clip=1.0
        )
        table(torch.arange(6)).sum().backward()
        step.step()
        return step.norm

    assert len(set(virtual_world(4).run(program).results)) == 1


@pytest.mark.parametrize("early", [False, True])
def test_parameters_that_come_and_go(early: bool) -> None:
    """Used on all ranks in some steps only: what was expected and did not come is sent again without it."""

    def program(axis: weft.Axis, joined: bool) -> list[Tensor]:
        torch.manual_seed(0)
        layers = place(torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(4)]))
        parts = [optim.ShardedAdamW(layers[:2].parameters(), lr=0.1, group=axis, bucket_bytes=70),
                 optim.REKLS(layers[2:].parameters(), lr=0.1, variant="stable", group=axis.subset([axis.rank]),
                            data_group=axis)]  # fmt: skip
        steps = [optim.OverlappedStep(parts, overlap_backward=early)] if joined else parts
        for step, used in enumerate(([0, 1, 2, 3], [0, 2], [0, 2], [1, 3], [0, 1, 2, 3], [0, 1, 2, 3])):
            x = place(torch.randn(3, 4, generator=torch.Generator().manual_seed(step + 100 * axis.rank)))
            for index in used:
                x = layers[index](x).tanh()
            if step == 4:
                layers[0].bias.requires_grad_(False)
            x.sum().backward()
            for one in steps:
                one.step()
            for one in steps:
                one.zero_grad()
            layers[0].bias.requires_grad_(True)
        return [p.detach() for p in layers.parameters()]

    apart, together = (virtual_world(3).run(lambda axis, j=j: program(axis, j)).results for j in (False, True))
    for one, other in zip(apart, together, strict=True):
        assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def test_a_table_that_is_not_used_in_every_step() -> None:
    """It was expected, and did not come, on all ranks: as each part alone."""

    def program(axis: weft.Axis, joined: bool) -> list[Tensor]:
        model = Mixed(axis)
        parts = parts_of(model, axis)
        steps = [optim.OverlappedStep(parts, overlap_backward=True)] if joined else parts
        for step, used in enumerate((False, True, True, False, True)):
            ids = place(ids_of(step, 0, axis.rank))
            rows = model.second(ids % 11) + (model.table(ids) if used else 0.0)
            model.net(rows).square().sum().backward()
            for one in steps:
                one.step()
            for one in steps:
                one.zero_grad()
        return model.values()

    apart, together = (virtual_world(3).run(lambda axis, j=j: program(axis, j)).results for j in (False, True))
    for one, other in zip(apart, together, strict=True):
        assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def test_gradients_leave_in_the_backward_in_one_order() -> None:
    """That of the parts: a unit whose gradients are final waits for those before it."""

    def program(axis: weft.Axis, order: tuple[int, ...]) -> tuple[list[tuple[int, int]], int]:
        torch.manual_seed(0)
        model = place(torch.nn.Sequential(*(torch.nn.Linear(width, width + 1) for width in (4, 5, 6))))
        parts = [optim.ShardedAdamW(model[at].parameters(), lr=0.1, group=axis) for at in order]
        step = optim.OverlappedStep(parts, overlap_backward=True)
        seen: list[tuple[int, int]] = []  # layers whose gradients have come, messages that have left
        with weft.record() as ledger:
            for number, layer in enumerate(model):
                layer.weight.register_hook(lambda grad, n=number: seen.append((n, sent(ledger))))
            model(place(torch.ones(2, 4)) * (1 + axis.rank)).sum().backward()
            seen.append((-1, sent(ledger)))
            step.step()
        return seen, sent(ledger)

    def sent(ledger) -> int:
        return sum("to_owners" in event.operation and bool(event.sends) for event in ledger.events)

    for seen, after in virtual_world(3).run(lambda axis: program(axis, (2, 1, 0))).results:
        assert seen == [(2, 0), (1, 1), (0, 2), (-1, 3)] and after == 3
    for seen, after in virtual_world(3).run(lambda axis: program(axis, (0, 2, 1))).results:
        assert seen == [(2, 0), (1, 0), (0, 0), (-1, 3)] and after == 3


def test_a_step_that_is_made_anew_takes_over() -> None:
    """The hooks of the one before are gone: gradients leave once, and go to the new one."""

    def program(axis: weft.Axis, times: int) -> tuple[int, list[Tensor]]:
        model = Mixed(axis)
        made = [overlapped(model, axis, overlap_backward=True) for _ in range(times)]
        with weft.record() as ledger:
            for step in range(2):
                backward(model, axis, step, 1)
                made[-1].step()
                made[-1].zero_grad()
        return sum("owners" in event.operation for event in ledger.events), model.values()

    one, three = (virtual_world(2).run(lambda axis, n=n: program(axis, n)).results for n in (1, 3))
    for (count, values), (again, other) in zip(one, three, strict=True):
        assert count == again and all(torch.equal(*pair) for pair in zip(values, other, strict=True))


def test_what_had_no_gradient_is_not_expected_again() -> None:
    """The first step learns which parameters are not used, and is made twice; the others send once."""

    def program(axis: weft.Axis) -> list[int]:
        model = Mixed(axis)
        optimizer, counts = overlapped(model, axis, overlap_backward=True), []
        for step in range(3):
            with weft.record() as ledger:
                backward(model, axis, step, 1)
                optimizer.step()
                optimizer.zero_grad()
            counts.append(sum("to_owners" in event.operation for event in ledger.events))
        return counts

    for first, second, third in virtual_world(2).run(program).results:
        assert first == 2 * second and second == third > 0
