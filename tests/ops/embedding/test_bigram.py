"""`BigramHashEmbedding`: the hash of the facts, packed documents, and sequences that lie on several ranks."""

from __future__ import annotations

import itertools

import pytest
import torch
from layouts import runs_of
from torch import Tensor
from worlds import every, place, virtual_world

import weft
from weft.ops.sequence.layout import LAYOUTS

pytestmark = pytest.mark.usefixtures("every_network")


def wrap(number: int) -> int:
    return (number + 2**31) % 2**32 - 2**31


def by_hand(tokens: list[int], rows: int, starts: set[int], a: int = 36313, b: int = 27191) -> list[int]:
    """The definition, in Python's integers."""
    return [
        rows - 1 if at in starts else (wrap(a * token) ^ wrap(b * tokens[at - 1])) % (rows - 1)
        for at, token in enumerate(tokens)
    ]


@pytest.mark.parametrize("rows", [2, 101, 251_520])
def test_the_hash(rows: int) -> None:
    tokens = torch.randint(0, 200_000, (3, 40), generator=torch.Generator().manual_seed(0))
    table = weft.BigramHashEmbedding(rows, 2)
    wanted = [by_hand(row, rows, {0}) for row in tokens.tolist()]
    assert table.rows_of(tokens).tolist() == wanted
    out = torch.empty(3, 40, dtype=torch.int32)
    assert table.rows_of(tokens, out=out) is out and out.tolist() == wanted
    packed = table.rows_of(tokens[:1], cu_seqlens=[0, 7, 7, 20, 40])
    assert packed.tolist() == [by_hand(tokens[0].tolist(), rows, {0, 7, 20})]
    other = weft.BigramHashEmbedding(rows, 2, multipliers=(3, 5)).rows_of(tokens)
    assert other.tolist() == [by_hand(row, rows, {0}, 3, 5) for row in tokens.tolist()]
    assert table.rows_of(tokens[:, :0]).shape == (3, 0)


def test_rows_hashed_ahead_give_the_same() -> None:
    table = weft.BigramHashEmbedding(101, 3)
    assert table.weight.abs().sum() == 0
    torch.nn.init.normal_(table.weight)
    tokens = torch.randint(0, 50, (2, 9))
    rows = table.rows_of(tokens)
    table.prefetch(rows)
    assert torch.equal(table(rows=rows), table(tokens))
    assert torch.equal(table(tokens), table.weight[rows.long()])


LENGTHS = [(4, 4, 4), (1, 0, 9), (0, 0, 5), (7, 3, 0), (2, 1, 1)]


def hash_on_ranks(
    tokens: Tensor, lengths: tuple[int, ...], layout: str, bounds: list[int] | None, given: bool
) -> Tensor:
    """The rows that three ranks look up together, put in the order of the whole sequence."""

    def program(axis: weft.Axis) -> Tensor:
        runs = [
            run for run in runs_of(lengths, layout, None if bounds is None else tuple(bounds)) if run.rank == axis.rank
        ]
        mine = torch.cat([tokens[:, run.offset : run.offset + run.length] for run in runs], 1)
        table = place(weft.BigramHashEmbedding(997, 1, group=axis))
        how = {"layout": layout, "cu_seqlens": bounds}
        with torch.no_grad():
            table.table.shard.copy_(torch.arange(997.0)[axis.rank :: axis.size, None])
            if given:
                found = table(place(mine), sequence=weft.sequence(mine.shape[1], group=axis, **how))
            else:
                found = table(place(mine), context_group=axis, **how)
        whole = torch.zeros(tokens.shape)
        for run in runs:
            whole[:, run.offset : run.offset + run.length] = found[:, run.start : run.start + run.length, 0].cpu()
        return whole

    return sum(virtual_world(3).run(program).results).int()


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_sequence_over_ranks_is_hashed_as_a_whole(batch: int, given: bool) -> None:
    for lengths, layout, packed in every(itertools.product(LENGTHS, LAYOUTS, (False, True))):
        total = sum(lengths)
        bounds = [0, 1, 1, total // 2, total] if packed else None
        tokens = torch.randint(0, 90_000, (batch, total), generator=torch.Generator().manual_seed(total))
        wanted = weft.BigramHashEmbedding(997, 1).rows_of(tokens, cu_seqlens=bounds)
        assert torch.equal(hash_on_ranks(tokens, lengths, layout, bounds, given), wanted), (lengths, layout, bounds)


def test_wrong_arguments_are_refused() -> None:
    table = weft.BigramHashEmbedding(11, 2)
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="cu_seqlens end at 5, but there are 4 tokens"):
        table(tokens, cu_seqlens=[0, 5])
    with pytest.raises(TypeError, match="pass either tokens or rows"):
        table(tokens, rows=tokens)
    with pytest.raises(ValueError, match="layout is of a sequence over a context_group, which is missing"):
        table(tokens, layout="zigzag")
    with pytest.raises(ValueError, match="num_embeddings must be at least 2, one of them reserved, got 1"):
        weft.BigramHashEmbedding(1, 2)
