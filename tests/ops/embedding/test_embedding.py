"""`ShardedEmbedding` against ``nn.Embedding`` in one process: rows, gradients, options and errors, on every rank."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from worlds import every, place, virtual_world

import weft

pytestmark = pytest.mark.usefixtures("every_network")


def whole_gradient(axis: weft.Axis, table: weft.ShardedEmbedding) -> Tensor:
    """Everybody's rows of the gradient, as one dense table."""
    grad = table.weight.grad
    none = table.table.values.new_zeros(table.weight.shape, dtype=table.table.wide)
    mine = none if grad is None else grad.to_dense()
    if table.replicate:
        return sum(axis.begin("test").all_gather(mine).wait())
    counts = [table.ownership.count(rank) for rank in range(axis.size)]
    whole = mine.new_zeros(table.num_embeddings, table.embedding_dim)
    for rank, part in enumerate(axis.begin("test").all_gather(mine, counts).wait()):
        whole[table.ownership.ids(rank)] = part
    return whole


def batches(size: int, rows: int, shape: tuple[int, ...] = (2, 5)) -> list[Tensor]:
    return [
        torch.randint(0, rows, (0,) if size > 2 and rank == 1 else shape, generator=torch.Generator().manual_seed(rank))
        for rank in range(size)
    ]


def reference(embedding: nn.Embedding, ids: list[Tensor], weigh: Tensor, reduce: str) -> tuple[list[Tensor], Tensor]:
    outs = [embedding(one) for one in ids]
    sum(((out * weigh).sin().sum() for out in outs), torch.zeros(())).backward()
    grad = embedding.weight.grad / (len(ids) if reduce == "mean" else 1)
    return [out.detach() for out in outs], grad


KINDS = list(itertools.product((1, 2, 3, 5, 8), (1, 3, 7, 64), ("strided", "contiguous"), (False, True)))


def test_rows_and_gradients_in_every_combination() -> None:
    for size, rows, ownership, replicate in every(KINDS):
        torch.manual_seed(3)
        reduce = "sum" if rows == 7 else "mean"
        plain = nn.Embedding(rows, 4, dtype=torch.float64)
        weigh = torch.randn(4, dtype=torch.float64)
        ids = batches(size, rows)
        wanted, grad = reference(plain, ids, weigh, reduce)

        def program(axis: weft.Axis) -> tuple[Tensor, Tensor]:
            kind = {"group": axis, "ownership": ownership, "replicate": replicate, "reduce": reduce}  # noqa: B023
            table = place(weft.ShardedEmbedding.from_embedding(plain, **kind))  # noqa: B023
            out = table(ids[axis.rank])  # noqa: B023
            (out * place(weigh)).sin().sum().backward()  # noqa: B023
            return out.detach(), whole_gradient(axis, table)

        for rank, (out, found) in enumerate(virtual_world(size).run(program).results):
            assert torch.equal(out, wanted[rank]), (size, rows, ownership, replicate)
            torch.testing.assert_close(found, grad, rtol=1e-13, atol=1e-13)


@given(st.lists(st.lists(st.integers(0, 6), max_size=9), min_size=1, max_size=4), st.booleans())
def test_random_ids(drawn: list[list[int]], strided: bool) -> None:
    plain = nn.Embedding(7, 3, dtype=torch.float64)
    ids = [torch.tensor(one, dtype=torch.int32 if len(one) % 2 else torch.int64) for one in drawn]
    wanted, grad = reference(plain, ids, torch.ones(3, dtype=torch.float64), "mean")

    def program(axis: weft.Axis) -> tuple[Tensor, Tensor]:
        ownership = "strided" if strided else "contiguous"
        table = place(weft.ShardedEmbedding.from_embedding(plain, group=axis, ownership=ownership))
        out = table(place(ids[axis.rank]))
        out.sin().sum().backward()
        return out.detach(), whole_gradient(axis, table)

    for rank, (out, found) in enumerate(virtual_world(len(ids)).run(program).results):
        assert torch.equal(out, wanted[rank])
        torch.testing.assert_close(found, grad, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("replicate", [False, True])
def test_the_first_table_is_that_of_one_process(size: int, replicate: bool) -> None:
    torch.manual_seed(11)
    wanted = nn.Embedding(70_001, 17, padding_idx=5).weight.detach()

    def program(axis: weft.Axis) -> Tensor:
        torch.manual_seed(11)
        table = place(weft.ShardedEmbedding(70_001, 17, padding_idx=5, group=axis, replicate=replicate))
        with torch.no_grad():
            return table.full_weight()

    # Virtual ranks share torch's generator, but nobody else runs between the seed and the draw.
    for found in virtual_world(size).run(program).results:
        assert torch.equal(found, wanted)


def test_padding_gets_no_gradient() -> None:
    def program(axis: weft.Axis) -> Tensor:
        table = place(weft.ShardedEmbedding(5, 2, padding_idx=-1, group=axis))
        table(torch.tensor([4, axis.rank, 4])).sum().backward()
        return whole_gradient(axis, table)

    for grad in virtual_world(2).run(program).results:
        assert grad.tolist() == [[0.5, 0.5], [0.5, 0.5], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]


def test_a_row_that_sums_to_zero_is_a_row() -> None:
    """[1, -1] sums to zero, and so do two gradients that cancel; both rows are stepped."""

    def program(axis: weft.Axis) -> list[int]:
        table = place(weft.ShardedEmbedding(6, 2, group=axis))
        sign = 1.0 if axis.rank == 0 else -1.0
        out = table(torch.tensor([2, 4]))
        (out[0] * place(torch.tensor([1.0, -1.0])) + out[1] * sign).sum().backward()
        return table.ownership.slots(torch.arange(6))[table.weight.grad.indices()[0].cpu()].tolist()

    assert sum(map(len, virtual_world(2).run(program).results)) == 2


def test_no_gradient_as_large_as_the_table() -> None:
    def program(axis: weft.Axis) -> tuple[int, bool]:
        table = place(weft.ShardedEmbedding(100_000, 2, group=axis))
        table(torch.arange(5)).sum().backward()
        return table.weight.grad.values().shape[0], table.weight.grad.is_sparse

    results = virtual_world(2).run(program).results
    assert sum(count for count, _ in results) == 5 and all(sparse for _, sparse in results)


def test_several_calls_and_micro_batches_add_up() -> None:
    plain = nn.Embedding(9, 3, dtype=torch.float64)
    for start in range(3):
        (plain(torch.tensor([start, 5])) * plain(torch.tensor([5, start + 1]))).sum().backward()

    def program(axis: weft.Axis) -> Tensor:
        table = place(weft.ShardedEmbedding.from_embedding(plain, group=axis))
        for start in range(3):
            (table(torch.tensor([start, 5])) * table(torch.tensor([5, start + 1]))).sum().backward()
        return whole_gradient(axis, table)

    for found in virtual_world(3).run(program).results:
        torch.testing.assert_close(found, plain.weight.grad, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("replicate", [False, True])
def test_a_tied_head_gets_the_gradient_of_both(size: int, replicate: bool) -> None:
    plain = nn.Embedding(7, 3, dtype=torch.float64)
    ids = batches(size, 7, (4,))
    loss = sum((plain(one) @ plain.weight.T).square().sum() for one in ids) / size
    loss.backward()

    def program(axis: weft.Axis) -> Tensor:
        table = place(weft.ShardedEmbedding.from_embedding(plain, group=axis, replicate=replicate))
        (table(ids[axis.rank]) @ table.full_weight().T).square().sum().backward()
        return whole_gradient(axis, table)

    for found in virtual_world(size).run(program).results:
        torch.testing.assert_close(found, plain.weight.grad, rtol=1e-12, atol=1e-12)


def test_a_frozen_table_and_evaluation_send_no_gradients() -> None:
    def program(axis: weft.Axis) -> tuple[Tensor | None, bool, int]:
        frozen = place(weft.ShardedEmbedding(8, 2, group=axis).requires_grad_(False))
        scale = place(torch.ones(2)).requires_grad_()
        (frozen(torch.tensor([1, 2])) * scale).sum().backward()
        table = place(weft.ShardedEmbedding(8, 2, group=axis))
        with torch.no_grad(), weft.record() as ledger:
            out = table(torch.tensor([1, 2]))
        return frozen.weight.grad, out.requires_grad, ledger.bytes_sent

    for grad, needs, _ in virtual_world(2).run(program).results:
        assert grad is None and not needs


def test_duplicates_are_summed_in_fp32() -> None:
    """A token hit 4,096 times: a bf16 sum is wrong by percents."""

    def program(axis: weft.Axis) -> Tensor:
        table = place(weft.ShardedEmbedding(3, 1, group=axis, dtype=torch.bfloat16, reduce="sum"))
        out = table(torch.zeros(4096, dtype=torch.int64))
        out.backward(torch.full_like(out, 1 + 2**-7))
        return whole_gradient(axis, table)

    for size in (1, 3):
        for grad in virtual_world(size).run(program).results:
            assert grad.dtype == torch.float32 and grad[0, 0].item() == size * 4096 * (1 + 2**-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_bits_repeat(dtype: torch.dtype) -> None:
    def program(axis: weft.Axis) -> Tensor:
        table = place(weft.ShardedEmbedding(50, 5, group=axis, dtype=dtype))
        make = torch.Generator().manual_seed(axis.rank)
        ids = torch.randint(0, 50, (200,), generator=make)
        out = table(ids)
        out.backward(place(torch.randn(out.shape, generator=make).to(dtype)))
        return whole_gradient(axis, table)

    runs = [virtual_world(4).run(program).results for _ in range(2)]
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("bad", [-1, 10, 12345])
@pytest.mark.parametrize("size", [1, 3])
def test_an_id_out_of_range_is_named_on_every_rank(bad: int, size: int) -> None:
    where = size - 1

    def program(axis: weft.Axis) -> tuple[str, int, bool]:
        table = place(weft.ShardedEmbedding(10, 2, group=axis))
        before = table.weight.detach().clone()
        table(torch.tensor([1, 2]))  # the first call compares ranks, later ones do not
        with weft.record() as ledger:
            try:
                table(place(torch.tensor([3, bad if axis.rank == where else 4])))
            except IndexError as error:
                words = str(error)
        rows = sum(event.bytes_sent for event in ledger.events if not event.operation.endswith(".metadata"))
        assert table(torch.tensor([9])).shape == (1, 2)  # the group is still good
        return words, rows, torch.equal(before, table.weight)

    for words, sent, same in virtual_world(size).run(program).results:
        assert words == f"embedding: id {bad} is not a row of 0..9 (rank {where})"
        assert sent == 0 and same


def test_wrong_ids_and_options_are_refused() -> None:
    table = weft.ShardedEmbedding(10, 2)
    with pytest.raises(TypeError, match=r"ids must be a tensor of int32 or int64, got torch\.float32"):
        table(torch.ones(3))
    for words, options in (
        ("ownership 'odd' is not one of strided, contiguous", {"ownership": "odd"}),
        ("reduce 'max' is not one of mean, sum", {"reduce": "max"}),
        ("padding_idx 10 is not a row of 10", {"padding_idx": 10}),
    ):
        with pytest.raises(ValueError, match=words):
            weft.ShardedEmbedding(10, 2, **options)
    with pytest.raises(ValueError, match="num_embeddings must be at least 1, got 0"):
        weft.ShardedEmbedding(0, 2)
    with pytest.raises(NotImplementedError, match="max_norm and scale_grad_by_freq are not supported"):
        weft.ShardedEmbedding.from_embedding(nn.Embedding(3, 2, max_norm=1.0))
    with pytest.raises(ValueError, match="refresh_all is for replicate=True"):
        table.refresh_all()


def test_ranks_that_differ_are_told() -> None:
    def program(axis: weft.Axis) -> str:
        table = place(weft.ShardedEmbedding(10, 2, group=axis))
        table.requires_grad_(axis.rank == 0)
        try:
            table(torch.tensor([1]))
        except ValueError as error:
            return str(error)
        return "no error"

    for words in virtual_world(2).run(program).results:
        assert "the ranks disagree" in words
        assert "rank 0 called embedding(gradient=True); rank 1 called embedding(gradient=False)" in words


def test_a_replica_is_stale_until_it_is_refreshed() -> None:
    def program(axis: weft.Axis) -> tuple[Tensor, Tensor, Tensor]:
        table = place(weft.ShardedEmbedding.from_embedding(nn.Embedding(6, 1), group=axis, replicate=True))
        with torch.no_grad():
            table.weight.zero_()
            table.table.shard.add_(axis.rank + 1.0)
            before = table.weight.clone()
            table(torch.tensor([0, 1]))
            some = table.weight.clone()
            table.refresh_all()
        return before, some, table.weight.detach().clone()

    for rank, (before, some, after) in enumerate(virtual_world(2).run(program).results):
        assert before.flatten().tolist() == [[1, 0, 1, 0, 1, 0], [0, 2, 0, 2, 0, 2]][rank]
        assert some.flatten().tolist() == [[1, 2, 1, 0, 1, 0], [1, 2, 0, 2, 0, 2]][rank]
        assert after.flatten().tolist() == [1, 2, 1, 2, 1, 2]


@pytest.mark.parametrize("replicate", [False, True])
def test_state_dict_of_virtual_ranks_is_the_whole_table(replicate: bool) -> None:
    plain = nn.Embedding(11, 3)

    def program(axis: weft.Axis) -> Tensor:
        table = place(weft.ShardedEmbedding.from_embedding(plain, group=axis, replicate=replicate))
        saved = table.state_dict()
        other = place(weft.ShardedEmbedding(11, 3, group=axis, ownership="contiguous"))
        other.load_state_dict(saved)
        with torch.no_grad():
            assert torch.equal(other.full_weight().cpu(), plain.weight)
        return saved["weight"]

    for weight in virtual_world(4).run(program).results:
        assert torch.equal(weight, plain.weight)
        nn.Embedding(11, 3).load_state_dict({"weight": weight})
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        weft.ShardedEmbedding(10, 3).load_state_dict({"weight": plain.weight})


def test_a_penalty_on_the_weight_itself() -> None:
    plain = nn.Embedding(7, 3, dtype=torch.float64)
    (plain(torch.tensor([1, 1, 2])).sum() + plain.weight.square().sum()).backward()

    def program(axis: weft.Axis) -> Tensor:
        table = place(weft.ShardedEmbedding.from_embedding(plain, group=axis))
        (table(torch.tensor([1, 1, 2])).sum() + table.weight.square().sum()).backward()
        weft.clip_grad_norm_(table.parameters(), 1e9)
        return whole_gradient(axis, table)

    for found in virtual_world(2).run(program).results:
        torch.testing.assert_close(found, plain.weight.grad, rtol=1e-12, atol=1e-12)
    replica = weft.ShardedEmbedding(7, 3, replicate=True)
    replica.weight.square().sum().backward()
    with pytest.raises(TypeError, match="the gradient of a replica is dense"):
        weft.clip_grad_norm_(replica.parameters(), 1.0)


def test_a_copy_is_a_table_of_its_own() -> None:
    def program(axis: weft.Axis) -> bool:
        model = place(nn.Sequential(weft.ShardedEmbedding(7, 3, group=axis), nn.Linear(3, 1)))
        optimizer = weft.optim.RowAdam(model[0].parameters(), lr=0.1)
        other = copy.deepcopy(model)
        before = rows_of(other[0])
        same = torch.equal(before, rows_of(model[0]))
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
        other(torch.tensor([3])).sum().backward()
        grads = other[0].weight.grad is not model[0].weight.grad
        return same and grads and torch.equal(before, rows_of(other[0])) and not torch.equal(before, rows_of(model[0]))

    assert all(virtual_world(2).run(program).results)


def rows_of(table: weft.ShardedEmbedding) -> Tensor:
    with torch.no_grad():
        return table.full_weight()


def test_a_gradient_that_somebody_keeps_is_not_overwritten() -> None:
    table = weft.ShardedEmbedding(9, 4)
    kept = []
    for step in range(4):
        table(torch.tensor([step, 5, 5])).sum().backward()
        kept.append((table.weight.grad, table.weight.grad.values(), table.weight.grad.to_dense()))
        table.weight.grad = None
        if step == 2:
            kept[0] = kept[0][1:2] * 3  # only the values are left
    for step, (_, values, dense) in enumerate(kept[1:], 1):
        assert torch.equal(values, dense[[step, 5] if step < 5 else [5, step]])
    assert kept[0][0].tolist() == [[1.0] * 4, [2.0] * 4]
