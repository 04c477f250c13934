"""Ulysses with any number of heads: the deal, what travels for it, and the numbers."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import pytest
import torch
from layouts import runs_of
from test_attention import bounds_of, faults, lengths_of
from test_attention import run as attend
from test_attention_reference import Case, distance, plain, problem, slice_of
from torch import Tensor
from worlds import every, virtual_world

import weft
from weft.ops.attention import attention
from weft.ops.attention.heads import HeadPart, deal_heads, group_runs, head_parts
from weft.ops.sequence.layout import ANY_LENGTHS, LAYOUTS, lay_out
from weft.ops.sequence.runs import TokenRun
from weft.ops.sequence.runs import lengths_of as tokens_of

HEADS = [(4, 2), (3, 1), (6, 3), (2, 2), (8, 2), (5, 5), (1, 1)]
SIZES = [2, 3, 5, 6, 8]


def masks(total: int, heads: int, kv_heads: int) -> Iterator[Case]:
    """`make test` takes a third of them."""
    kinds = list(itertools.product((False, True), (None, (2, 3)), (False, True)))
    for causal, window, packed in kinds if "WEFT_SOAK" in os.environ else kinds[::3]:
        bounds = bounds_of(total) if packed else None
        yield Case(total, heads, kv_heads, 2 if heads < 4 else 1, causal, window, bounds)


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("size", SIZES)
def test_any_number_of_heads(size: int, heads: tuple[int, int]) -> None:
    for kind, layout in (("uneven", "zigzag"), ("missing", "contiguous")):
        lengths = lengths_of(kind, size)

        def program(axis: weft.Axis) -> list[str]:
            return [
                fault
                for case in every(masks(sum(lengths), *heads))  # noqa: B023
                for fault in faults(axis, case, lengths, layout, method="ulysses")  # noqa: B023
            ]

        found = [fault for rank in virtual_world(size).run(program).results for fault in rank]
        assert not found, "\n".join(found[:5])


def copies(deal: tuple[int, ...], shared: int) -> int:
    """Key/value heads on all ranks together."""
    ends = list(itertools.accumulate(deal))
    return sum(len({head // shared for head in range(end - n, end)}) for end, n in zip(ends, deal, strict=True))


def test_no_deal_is_better() -> None:
    """Of all that give no rank more than it must have."""
    for kv_heads, shared, size in itertools.product((1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4, 5)):
        heads = kv_heads * shared
        most, deal = -(-heads // size), deal_heads(heads, kv_heads, size)
        assert len(deal) == size and sum(deal) == heads and max(deal) == most
        others = (x for x in itertools.product(range(most + 1), repeat=size) if sum(x) == heads)
        ranked = {(copies(other, shared), sum(n * n for n in other)) for other in others}
        assert (copies(deal, shared), sum(n * n for n in deal)) == min(ranked), (heads, kv_heads, size, deal)


@pytest.mark.parametrize(("heads", "kv_heads"), [*HEADS, (32, 8), (64, 8), (40, 10), (28, 4), (128, 1), (24, 24)])
def test_parts_are_whole_groups_or_pieces_of_one(heads: int, kv_heads: int) -> None:
    for size in (1, 2, 3, 4, 5, 7, 8, 16, 64, 200):
        shared, parts = heads // kv_heads, head_parts(heads, kv_heads, size)
        assert len(parts) == size and len({len(mine) for mine in parts}) == 1
        dealt = []
        for mine, count in zip(parts, deal_heads(heads, kv_heads, size), strict=True):
            assert sum(part.heads for part in mine) == count
            for part in mine:
                dealt += list(range(part.first, part.last))
                if part.heads:
                    assert (part.kv_first, part.kv_last) == (part.first // shared, (part.last - 1) // shared + 1)
                    whole = part.first % shared == part.last % shared == 0
                    assert part.is_split == (not whole) and (whole or part.kv_heads == 1)
            assert sum(part.kv_heads for part in mine) == len(
                {h // shared for p in mine for h in range(p.first, p.last)}
            )
        assert dealt == list(range(heads))
        if kv_heads % size == 0:
            assert not any(part.is_split for mine in parts for part in mine)


def test_the_deal_of_a_model() -> None:
    """28 heads of 4 key/value heads on 8 ranks: four heads on each but for those that end a group."""
    assert deal_heads(28, 4, 8) == (4, 3) * 4
    assert [[part.heads for part in mine] for mine in head_parts(40, 10, 3)] == [
        [4, 4, 4, 2], [2, 4, 4, 4], [4, 4, 4, 0]
    ]  # fmt: skip
    assert head_parts(3, 1, 4)[-1] == (HeadPart(),)


@pytest.mark.parametrize("layout", ANY_LENGTHS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_travels_but_heads_that_are_computed_elsewhere(
    heads: tuple[int, int], layout: str, dtype: torch.dtype
) -> None:
    dim, size, item = 8, 5, dtype.itemsize
    lengths, total = (3, 4, 0, 6, 2), 15
    deal, shared = deal_heads(*heads, size), heads[0] // heads[1]
    ends = list(itertools.accumulate(deal))
    mine = [range(end - n, end) for end, n in zip(ends, deal, strict=True)]

    def program(axis: weft.Axis) -> tuple[int, int]:
        tokens = lengths[axis.rank]
        q, k, v = (torch.randn(1, tokens, n, dim, dtype=dtype, requires_grad=True) for n in (*heads, heads[1]))
        where = weft.sequence(tokens, layout=layout, group=axis)
        with weft.record() as forward:
            out = attention(q, k, v, causal=True, method="ulysses", sequence=where)
        with weft.record() as backward:
            out.sum().backward()
        return forward.bytes_received, backward.bytes_received

    for rank, (forward, backward) in enumerate(weft.world.VirtualWorld(size).run(program).results):
        own, elsewhere = lengths[rank], total - lengths[rank]
        keys = {head // shared for head in mine[rank]}
        others = [ranks for ranks in range(size) if ranks != rank]
        back = sum(deal[other] for other in others) * own  # out, or dq
        assert forward == dim * item * (elsewhere * (deal[rank] + 2 * len(keys)) + back)
        gradients = 0
        for other in others:
            for head in {head // shared for head in mine[other]}:
                alone = all(query in mine[other] for query in range(head * shared, (head + 1) * shared))
                gradients += 2 * own * (item if alone else 4)
        assert backward == dim * (item * (elsewhere * deal[rank] + back) + gradients)


@pytest.mark.usefixtures("network")  # a device's flash operators round dv of each block themselves
def test_gradients_of_a_head_on_several_ranks_are_summed_in_fp32() -> None:
    """dv in bf16, which depends on nothing that was rounded before: it is rounded once, and the same bits each time."""
    case, lengths = Case(48, 6, 1, 1, causal=True, dim=16), (16,) * 3
    q, k, v, grad = (x.bfloat16() for x in problem(case)[0])
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    (true,) = torch.autograd.grad(plain(*exact, case)[0], exact[2:], grad.double())

    def program(axis: weft.Axis) -> Tensor:
        *local, mine = (slice_of(x, lengths, "zigzag", axis.rank) for x in (q, k, v, grad))
        local[2].requires_grad_()
        found = []
        for _ in range(2):
            out = attention(*local, causal=True, scale=0.7, layout="zigzag", method="ulysses", group=axis)
            found += torch.autograd.grad(out, local[2:], mine)
        assert torch.equal(*found)
        return weft.unshard(found[0], 1, layout="zigzag", group=axis)

    for got in virtual_world(3).run(program).results:
        far, rounded = ((x.double() - true).square().mean().sqrt() for x in (got, true.bfloat16()))
        assert far <= 1.02 * rounded


@pytest.mark.usefixtures("every_network")
def test_gradients_in_the_dtype_that_is_asked_for() -> None:
    case, lengths = Case(24, 3, 1, 1, causal=True), (8, 8, 8)

    def program(axis: weft.Axis) -> float:
        got = attend(axis, case, lengths, "contiguous", torch.float32, method="ulysses", grad_dtype=torch.bfloat16)
        return max(
            distance(got[name], slice_of(wanted, lengths, "contiguous", axis.rank))
            for name, wanted in zip(("dk", "dv"), problem(case)[1][3:], strict=True)
        )

    assert all(1e-4 < far < 1e-2 for far in virtual_world(3).run(program).results)


def test_groups_of_ranks_hold_their_tokens_in_the_order_of_the_sequence() -> None:
    for layout, lengths in itertools.product(LAYOUTS, ((3, 1, 0, 4, 2, 5), (2,) * 6)):
        runs = runs_of(lengths, layout)
        lengths = tokens_of(runs, 6)
        for inner in (1, 2, 3, 6):
            joined, placed = group_runs(runs, 6 // inner, inner)
            tokens = [[-1] * sum(lengths[at : at + inner]) for at in range(0, 6, inner)]
            for run in joined:
                for i in range(run.length):
                    tokens[run.rank][run.start + i] = run.offset + i
            assert all(held == sorted(held) for held in tokens)
            assert sorted(itertools.chain(*tokens)) == list(range(sum(lengths)))
            places = {(run.rank, run.start + i): run.offset + i for run in runs for i in range(run.length)}
            for group, pieces in enumerate(placed):
                for piece in pieces:
                    for i in range(piece.length):
                        rank = group * inner + piece.rank
                        assert tokens[group][piece.offset + i] == places[rank, piece.start + i]
    assert group_runs(lay_out((2, 2, 2, 2), "zigzag"), 2, 2)[0] == (
        TokenRun(0, 0, 2, 0), TokenRun(1, 0, 4, 2), TokenRun(0, 2, 2, 6)
    )  # fmt: skip
