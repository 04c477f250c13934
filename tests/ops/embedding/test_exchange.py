"""`RowExchange`: four phases, several tables, what it sends, and when it sends whole shards instead."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from worlds import place, virtual_world

import weft
from weft.ops.embedding import exchange as module
from weft.ops.embedding.ids import OWNERSHIPS, Ownership, compact, segment_sum

pytestmark = pytest.mark.usefixtures("every_network")


@pytest.mark.parametrize("kind", OWNERSHIPS)
@pytest.mark.parametrize("rows", [1, 2, 7, 12, 1003])
def test_every_row_has_one_owner(kind: str, rows: int) -> None:
    for size in (1, 2, 3, 5, 8, 13):
        ownership = Ownership(kind, rows, size)
        owned = [list(range(rows))[ownership.ids(rank)] for rank in range(size)]
        assert sorted(itertools.chain(*owned)) == list(range(rows))
        assert [len(ids) for ids in owned] == [ownership.count(rank) for rank in range(size)]
        slots = ownership.slots(torch.arange(rows)).tolist()
        for rank, ids in enumerate(owned):
            assert [slots[row] for row in ids] == [rank * ownership.stride + place for place in range(len(ids))]


def test_segment_sums_are_wide_ordered_and_complete() -> None:
    numbers = torch.tensor([5, 1, 5, 5, 2])
    found = compact(numbers)
    assert found.unique[found.inverse].tolist() == numbers.tolist()
    rows = torch.tensor([[1.0], [3.0], [2.0**-9], [-1.0], [7.0]], dtype=torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float32):  # 1 + 2^-9 - 1 is 0 in bf16
        assert segment_sum(rows, found, dtype).flatten().tolist() == [3.0, 7.0, 2.0**-9]
    empty = compact(torch.empty(0, dtype=torch.int64))
    assert segment_sum(rows[:0], empty, torch.float32).shape == (0, 1)


def shards(axis: weft.Axis, ownership: str) -> tuple[list[Tensor], Tensor, list[Tensor], Tensor]:
    """Two tables of 30 rows that share ids (fp32 and bf16), one of 7 rows; the wholes, and this rank's shards."""
    a = torch.arange(60.0).view(30, 2)
    b = torch.arange(30.0).view(30, 1).bfloat16()
    c = -torch.arange(21.0).view(7, 3).double()
    mine = [whole[Ownership(ownership, len(whole), axis.size).ids(axis.rank)] for whole in (a, b, c)]
    return [a, b], c, mine[:2], mine[2]


@pytest.mark.parametrize("ownership", OWNERSHIPS)
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_several_tables_in_one_exchange(
    size: int, dense: bool, ownership: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dense:
        monkeypatch.setattr(module, "DENSE_PULL", 0.0)

    def program(axis: weft.Axis) -> list[tuple[list[int], list[float]]]:
        make = torch.Generator().manual_seed(axis.rank)
        ids = [torch.randint(0, 30, (3, 4), generator=make), torch.randint(0, 7, (2,), generator=make)]
        ids = place(ids) if axis.rank % 2 == 0 else ids  # some ranks have theirs on the CPU
        (a, b), c, mine, last = place(shards(axis, ownership))
        exchange = weft.RowExchange(ids, [30, 7], ownership=ownership, group=axis)
        exchange.start_ids()
        (rows_a, rows_b), rows_c = exchange.pull([mine, last]).wait()
        assert exchange.dense_pull == dense
        assert torch.equal(rows_a[exchange.inverse(0)], a[ids[0].flatten()])
        assert torch.equal(rows_b[exchange.inverse(0)], b[ids[0].flatten()])
        assert torch.equal(rows_c[exchange.inverse(1)], c[ids[1]])
        ones = place(
            [torch.ones(12, 2, dtype=a.dtype), torch.ones(12, 1, dtype=b.dtype), torch.ones(2, 3, dtype=c.dtype)]
        )
        grads = [exchange.sum(0, one) for one in ones[:2]]
        received = exchange.push([grads, exchange.sum(1, ones[2])]).wait()
        (pair_a, pair_b), pair_c = exchange.merge(received)
        assert pair_a[1].dtype == pair_b[1].dtype == torch.float32 and pair_c[1].dtype == torch.float64
        assert torch.equal(pair_a[0], pair_b[0])
        return [(places.tolist(), sums[:, 0].tolist()) for places, sums in (pair_a, pair_c)]

    results = virtual_world(size).run(program).results
    for index, rows in enumerate((30, 7)):
        hits = [0.0] * rows
        for rank in range(size):
            make = torch.Generator().manual_seed(rank)
            ids = [torch.randint(0, 30, (3, 4), generator=make), torch.randint(0, 7, (2,), generator=make)]
            for one in ids[index].flatten().tolist():
                hits[one] += 1
        for rank, found in enumerate(results):
            owned = list(range(rows))[Ownership(ownership, rows, size).ids(rank)]
            wanted = [(at, hits[row]) for at, row in enumerate(owned) if hits[row]]
            assert list(zip(*found[index], strict=True)) == wanted


def zipf(rank: int, count: int, rows: int) -> Tensor:
    make = torch.Generator().manual_seed(rank)
    return (rows ** torch.rand(count, generator=make, dtype=torch.float64)).long() - 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 4, 5])
def test_bytes_of_push_and_pull(size: int, dtype: torch.dtype) -> None:
    """At most (P-1)/P U (d b + 4) each, ids once and four bytes, besides the counts."""
    rows, width, count = 4000, 16, 600

    def program(axis: weft.Axis) -> dict[str, float]:
        table = place(weft.ShardedEmbedding(rows, width, group=axis, dtype=dtype))
        ids = zipf(axis.rank, count, rows)
        needed = ids.unique()
        away = int((needed % size != axis.rank).sum())
        with weft.record() as ledger:
            out = table(ids)
            forward = ledger.bytes_sent
            out.float().sum().backward()
        sent = {
            name: sum(event.bytes_sent for event in ledger.events if event.operation == name)
            for name in ("embedding", "embedding.pull", "embedding.push", "embedding.metadata")
        }
        came = sum(event.bytes_received for event in ledger.events if event.operation == "embedding.pull")
        assert sum(sent.values()) == ledger.bytes_sent and forward == ledger.bytes_sent - sent["embedding.push"]
        assert sent["embedding"] == 4 * away  # ids, once
        assert came == away * width * dtype.itemsize
        assert sent["embedding.push"] == away * width * dtype.itemsize
        assert sent["embedding.metadata"] == (size - 1) * 4 * 8
        return {**sent, "U": len(needed)}

    results = virtual_world(size).run(program).results
    mean = sum(one["U"] for one in results) / size
    bound = (size - 1) / size * mean * (width * dtype.itemsize + 4)
    assert sum(one["embedding"] + one["embedding.pull"] for one in results) / size <= 1.02 * bound
    assert sum(one["embedding.push"] for one in results) / size <= 1.02 * bound


def test_strided_owners_of_zipf_ids_are_evenly_loaded() -> None:
    rows, size = 100_000, 8
    loads = {}
    for kind in OWNERSHIPS:
        ownership, load = Ownership(kind, rows, size), torch.zeros(size)
        for rank in range(size):
            owners = ownership.slots(zipf(rank, 16_384, rows).unique()) // ownership.stride
            load += torch.bincount(owners, minlength=size)
        loads[kind] = float(load.max() / load.mean())
    assert loads["strided"] <= 1.1 and loads["contiguous"] > 3


def test_the_phases_can_be_placed_apart() -> None:
    """Two exchanges under way at once, ended in another order."""

    def program(axis: weft.Axis) -> list[float]:
        table = place(torch.arange(20.0).view(10, 2)[axis.rank :: axis.size].contiguous())
        first = weft.RowExchange(torch.tensor([1, 2]), 10, group=axis)
        second = weft.RowExchange(torch.tensor([9]), 10, group=axis)
        first.start_ids()
        second.start_ids()
        one, two = first.pull([table]), second.pull([table])
        return two.wait()[0].flatten().tolist() + one.wait()[0][first.inverse(0)].flatten().tolist()

    for found in virtual_world(3).run(program).results:
        assert found == [18.0, 19.0, 2.0, 3.0, 4.0, 5.0]


def test_wrong_arguments_are_refused_on_every_rank() -> None:
    def program(axis: weft.Axis) -> str:
        ids = torch.tensor([1])
        try:
            weft.RowExchange([ids, ids], [3] if axis.rank else [3, 3], group=axis)
        except ValueError as error:
            return str(error)
        return "no error"

    for words in virtual_world(2).run(program).results:
        assert words == "rows: 2 sets of ids, but 1 table sizes (rank 1)"


def test_tables_of_another_size_are_refused() -> None:
    exchange = weft.RowExchange(torch.tensor([1, 2, 2]), 3)
    with pytest.raises(
        ValueError, match=r"rows.pull: tables of shapes \[\[\[4, 2\]\]\] for sets of ids with \[3\] rows"
    ):
        exchange.pull([torch.ones(4, 2)])
    with pytest.raises(
        ValueError, match=r"rows.push: tables of shapes \[\[\[3, 2\]\]\] for sets of ids with \[2\] rows"
    ):
        exchange.push([torch.ones(3, 2)])
    with pytest.raises(ValueError, match=r"rows\.pull"):
        exchange.pull([torch.ones(3, 2), torch.ones(3, 2)])
