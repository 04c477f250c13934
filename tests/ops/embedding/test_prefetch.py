"""`ShardedEmbedding.prefetch`: what travels when, and right rows whatever happens between prefetch and forward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from worlds import place, virtual_world

import weft
from weft.ops.embedding import lookup

pytestmark = pytest.mark.usefixtures("every_network")

THIS, NEXT = torch.tensor([0, 1, 2, 3, 4, 5]), torch.tensor([4, 5, 6, 7, 8, 9, 9])


def table_of(axis: weft.Axis, rows: int = 12, **options) -> weft.ShardedEmbedding:
    whole = torch.nn.Embedding(rows, 3)
    with torch.no_grad():
        whole.weight.copy_(torch.arange(3.0 * rows).view(rows, 3))
    return place(weft.ShardedEmbedding.from_embedding(whole, group=axis, **options))


def rows_now(table: weft.ShardedEmbedding, ids: Tensor) -> Tensor:
    """What a table without prefetching would give."""
    with torch.no_grad():
        return table.full_weight()[ids]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("mode", ["lazy", "exact"])
def test_rows_that_a_step_leaves_alone_travel_before_it(size: int, mode: str) -> None:
    def program(axis: weft.Axis) -> tuple[bool, int, int, int]:
        table = table_of(axis)
        optimizer = weft.optim.RowAdam(table.parameters(), lr=0.1, mode=mode)
        out = table(THIS)
        with weft.record() as early:
            table.prefetch(NEXT)
            table._prefetch._lane.wait()
        out.sum().backward()
        optimizer.step()
        with weft.record() as late:
            found = table(NEXT).detach()
        sent = [
            sum(event.bytes_sent for event in ledger.events if not event.operation.endswith(".metadata"))
            for ledger in (early, late)
        ]
        same = torch.equal(found, rows_now(table, NEXT))
        away = int((NEXT.unique() % size != axis.rank).sum())
        return same, sent[0], sent[1], away

    results = virtual_world(size).run(program).results
    assert all(same for same, *_ in results)
    row = 3 * 4
    if size > 1:
        # Rows 4 and 5 get a gradient from every rank; 6 to 9 do not, and have no momentum yet.
        assert sum(late for _, _, late, _ in results) == 2 * (size - 1) * row
        assert sum(early for _, early, _, _ in results) == 4 * (size - 1) * row + 4 * sum(x[3] for x in results)


def test_a_prefetch_sends_what_a_pull_sends_and_a_bit_for_each_row() -> None:
    size = 4

    def program(axis: weft.Axis) -> tuple[int, int, int, float]:
        table = table_of(axis, 400)
        optimizer = weft.optim.RowAdam(table.parameters(), lr=0.1)
        ids = torch.randint(0, 400, (100,), generator=torch.Generator().manual_seed(axis.rank))
        rows, words = [], []
        for ahead in (False, True):
            table(torch.arange(200)).sum().backward()
            with weft.record() as ledger:
                if ahead:
                    table.prefetch(ids)
                optimizer.step()
                exchange = table(ids).grad_fn.how[1]
            rows.append(sum(event.bytes_sent for event in ledger.events if not event.operation.endswith(".metadata")))
            words.append(sum(event.bytes_sent for event in ledger.events if event.operation == "embedding.metadata"))
            optimizer.zero_grad()
        return rows[0], rows[1], words[1] - words[0], len(exchange[0].asked) / 8

    for plain, ahead, marks, bits in virtual_world(size).run(program).results:
        assert ahead == plain and 0 < marks <= bits + size


def changed_by_hand(table: weft.ShardedEmbedding, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        table.weight.mul_(2.0)


def another_batch(table: weft.ShardedEmbedding, optimizer: torch.optim.Optimizer) -> None:
    """Nobody expected these rows to change."""
    table(torch.tensor([6, 7])).sum().backward()
    optimizer.step()


def a_checkpoint(table: weft.ShardedEmbedding, optimizer: torch.optim.Optimizer) -> None:
    table.load_state_dict({"weight": torch.randn(12, 3, generator=torch.Generator().manual_seed(5))})


def other_settings(table: weft.ShardedEmbedding, optimizer: torch.optim.Optimizer) -> None:
    """Rows that were at rest move in the next step: by weight decay, and by momentum that "lazy" had left alone."""
    for group in optimizer.param_groups:
        if "mode" in group:  # weft's; torch's SGD takes no weight decay with sparse gradients
            group["weight_decay"], group["mode"] = 0.5, "exact"
    table(torch.tensor([0])).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("surprise", [changed_by_hand, another_batch, a_checkpoint, other_settings])
@pytest.mark.parametrize("kind", ["lazy", "exact", "sgd"])
@pytest.mark.parametrize("replicate", [False, True])
def test_rows_are_right_after_a_surprise(surprise, kind: str, replicate: bool) -> None:
    def program(axis: weft.Axis) -> bool:
        table = table_of(axis, replicate=replicate)
        if kind == "sgd":  # it knows nothing of tables; gradients are sparse, which it takes
            optimizer: torch.optim.Optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
        else:
            optimizer = weft.optim.RowAdam(table.parameters(), lr=0.1, mode=kind)
        out = table(THIS)
        table.prefetch(NEXT)
        out.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        surprise(table, optimizer)
        return torch.equal(table(NEXT).detach(), rows_now(table, NEXT))

    assert all(virtual_world(3).run(program).results)


def test_other_ids_in_between_and_ids_of_some_ranks_only() -> None:
    def program(axis: weft.Axis) -> list[bool]:
        table = table_of(axis)
        table.prefetch(NEXT)
        right = [torch.equal(table(THIS), rows_now(table, THIS))]  # an evaluation: the rows are kept
        right.append(table._prefetch is not None)
        right.append(torch.equal(table(NEXT), rows_now(table, NEXT)))
        right.append(table._prefetch is None)
        table.prefetch(NEXT)
        mine = NEXT if axis.rank else THIS  # rank 0 changed its mind: dropped everywhere
        right.append(torch.equal(table(mine), rows_now(table, mine)))
        right.append(table._prefetch is None)
        table.prefetch(THIS)
        table.prefetch(NEXT)  # takes the place of the first
        right.append(torch.equal(table(NEXT), rows_now(table, NEXT)))
        return right

    for right in virtual_world(3).run(program).results:
        assert right == [True] * 7


def test_a_wrong_id_is_refused_at_once() -> None:
    def program(axis: weft.Axis) -> str:
        table = table_of(axis)
        try:
            table.prefetch(torch.tensor([12]) if axis.rank == 1 else NEXT)
        except IndexError as error:
            return str(error)
        return "no error"

    assert set(virtual_world(2).run(program).results) == {"embedding: id 12 is not a row of 0..11 (rank 1)"}


@pytest.mark.parametrize("kind", ["lazy", "sgd", "nobody"])
def test_what_is_expected_does_not_pile_up(kind: str) -> None:
    table = weft.ShardedEmbedding(12, 3)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    if kind == "lazy":
        optimizer = weft.optim.RowAdam(table.parameters(), mode="lazy")
    for _ in range(200):
        table(THIS).sum().backward()
        if kind != "nobody":
            optimizer.step()
    assert len(table.table._awaiting) <= (64 if kind == "nobody" else 1)
    assert table.table.will_change(torch.arange(12)).tolist() == [kind != "lazy" and row < 6 for row in range(12)]


@pytest.mark.parametrize("size", [1, 3])
def test_a_buffer_that_is_filled_again_is_another_batch(size: int) -> None:
    def program(axis: weft.Axis) -> list[bool]:
        table = table_of(axis)
        buffer = NEXT.clone()
        table.prefetch(buffer)
        buffer.copy_(torch.tensor([0, 1, 2, 3, 10, 11, 11]))
        right = [torch.equal(table(buffer), rows_now(table, buffer))]
        buffer.copy_(NEXT)  # these are on their way since then
        right += [torch.equal(table(buffer), rows_now(table, buffer)), table._prefetch is None]
        table.prefetch(buffer)  # other memory, or another dtype
        right += [torch.equal(table(buffer.int()), rows_now(table, buffer)), table._prefetch is not None]
        return right

    for right in virtual_world(size).run(program).results:
        assert right == [True] * 5


@pytest.mark.parametrize("then", ["forward", "prefetch"])
def test_a_prefetch_that_failed_is_forgotten(then: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch_ahead = lookup.Prefetch._fetch_ahead

    def fail_at_first(self: lookup.Prefetch, call: object) -> None:
        fetch_ahead(self, call)
        if not hasattr(self._table, "has_failed"):
            self._table.has_failed = True
            raise MemoryError("no room for rows")

    def program(axis: weft.Axis) -> list[object]:
        table = table_of(axis)
        found: list[object] = []
        try:
            table.prefetch(NEXT)  # by NCCL's rules it fails here
            (table if then == "forward" else table.prefetch)(NEXT)
        except MemoryError as error:
            found.append(str(error))
        for ids in (NEXT, THIS):
            found.append(torch.equal(table(ids), rows_now(table, ids)))
        table.prefetch(THIS)
        return [*found, torch.equal(table(THIS), rows_now(table, THIS))]

    monkeypatch.setattr(lookup.Prefetch, "_fetch_ahead", fail_at_first)
    for found in virtual_world(3).run(program).results:
        assert found == ["no room for rows", True, True, True]
