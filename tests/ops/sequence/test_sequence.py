"""`weft.sequence`: made once for each batch, passed to every layer."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest
import torch
from ranks import errors_of
from worlds import virtual_world

import weft
from weft.ops.sequence.layout import ANY_LENGTHS, LAYOUTS, lay_out

# After (6, 6, 6) rank 1 cannot know by its own length that its tokens have moved: its prediction is wrong.
SPLITS = ((6, 6, 6), (2, 15, 1), (6, 6, 6), (8, 6, 4), (0, 0, 18), (5, 7, 6))


def positions(lengths: tuple[int, ...], layout: str, rank: int) -> torch.Tensor:
    runs = [run for run in lay_out(lengths, layout) if run.rank == rank]
    return torch.cat([torch.arange(run.offset, run.offset + run.length) for run in runs])


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize("layout", ANY_LENGTHS)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("order", [("attention", "linear"), ("linear", "attention")])
def test_layers_give_the_same_with_and_without_it_for_any_split_at_any_time(
    layout: str, packed: bool, order: tuple[str, ...]
) -> None:
    """The total stays and the split changes from call to call: every call is right, and as right as with a sequence."""
    make = torch.Generator().manual_seed(0)
    whole = torch.randn(1, 18, 3, 4, generator=make, dtype=torch.float64)
    bounds = (0, 4, 4, 13, 18) if packed else None
    alone = {"cu_seqlens": bounds, "group": weft.Axis.over(weft.comm.wire.SoloWire())}
    wanted = {
        "attention": weft.attention(whole, whole, whole, causal=True, **alone),
        "linear": weft.linear_attention(whole, whole, whole, **alone)[0],
    }

    def program(axis: weft.Axis) -> float:
        worst = 0.0
        for lengths in SPLITS:
            at = positions(lengths, layout, axis.rank)
            q = whole[:, at]
            options = {"layout": layout, "cu_seqlens": bounds, "group": axis}
            for given in (False, True):
                if given:
                    options = {"sequence": weft.sequence(len(at), **options)}
                    assert options["sequence"].lengths == lengths and options["sequence"].total == 18
                for name in order:  # the first one predicts, the second knows from the first
                    if name == "attention":
                        got = weft.attention(q, q, q, causal=True, method="gather", **options)
                    else:
                        got = weft.linear_attention(q, q, q, **options)[0]
                    worst = max(worst, *(got - wanted[name][:, at]).abs().flatten().tolist(), 0.0)
        return worst

    assert max(virtual_world(3).run(program).results) < 1e-12


@pytest.mark.usefixtures("every_network")
def test_one_exchange_for_each_batch_and_none_in_the_layers() -> None:
    def program(axis: weft.Axis) -> tuple[int, int, int]:
        with weft.record() as making:
            sequence = weft.sequence(8, layout="zigzag", cu_seqlens=[0, 8, 24], group=axis)
        q = torch.randn(1, 8, 2, 4, requires_grad=True)
        with weft.record() as layers:
            weft.attention(q, q, q, causal=True, sequence=sequence).sum().backward()
            weft.linear_attention(q, q, q, sequence=sequence)[0].sum().backward()
            weft.unshard(q.detach(), 1, sequence=sequence)
        gathered = [event for event in layers.events if event.operation.endswith(".metadata")]
        return len(making.events), making.bytes_sent, len(gathered)

    assert virtual_world(3).run(program).results == [(1, 2 * 24, 0)] * 3


@pytest.mark.parametrize("layout", ANY_LENGTHS)
def test_positions_are_within_documents(layout: str) -> None:
    lengths, bounds = (5, 0, 7), (0, 3, 3, 10, 12)
    numbers = torch.cat([torch.arange(end - start) for start, end in pairwise(bounds)])

    def program(axis: weft.Axis) -> bool:
        sequence = weft.sequence(lengths[axis.rank], layout=layout, cu_seqlens=torch.tensor(bounds), group=axis)
        plain = weft.sequence(lengths[axis.rank], layout=layout, group=axis)
        at = positions(lengths, layout, axis.rank)
        return torch.equal(sequence.positions(), numbers[at]) and torch.equal(plain.positions(), at)

    assert all(virtual_world(3).run(program).results)


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize("layout", ANY_LENGTHS)
def test_shard_and_unshard_follow_its_lengths(layout: str) -> None:
    lengths = (5, 0, 7)
    x = torch.randn(2, 12)

    def program(axis: weft.Axis) -> bool:
        sequence = weft.sequence(lengths[axis.rank], layout=layout, group=axis)
        mine = weft.shard(x, 1, sequence=sequence)
        assert torch.equal(mine, x[:, positions(lengths, layout, axis.rank)])
        return torch.equal(weft.unshard(mine, 1, sequence=sequence), x)

    assert all(virtual_world(3).run(program).results)


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"local_length": -1}, ValueError, "local_length must not be negative, got -1"),
        ({"local_length": 2.5}, TypeError, r"local_length must be an integer, got 2.5 \(float\)"),
        (
            {"local_length": 4, "layout": "stripes"},
            ValueError,
            "layout 'stripes' is not one of contiguous, zigzag",
        ),
        ({"local_length": 4, "cu_seqlens": [0, 3, 2, 4]}, ValueError, "cu_seqlens must be integers that rise from 0"),
        (
            {"local_length": 4, "cu_seqlens": [0, 5]},
            ValueError,
            r"cu_seqlens end at 5, but the ranks hold \[4\], 4 tokens",
        ),
    ],
)
def test_wrong_arguments_are_told(arguments, kind, words) -> None:
    with pytest.raises(kind, match=words):
        weft.sequence(**arguments)


def test_what_it_holds_is_not_given_again() -> None:
    q, sequence = torch.ones(1, 4, 2, 2), weft.sequence(4)
    for attend in (partial(weft.attention, causal=True), weft.linear_attention):
        for name, value in (("layout", "contiguous"), ("cu_seqlens", torch.tensor([0, 4])), ("group", sequence.axis)):
            with pytest.raises(ValueError, match=f"{name} is part of sequence; leave it out"):
                attend(q, q, q, sequence=sequence, **{name: value})
        with pytest.raises(ValueError, match="holds 3 tokens, but 4 in sequence"):
            attend(q[:, :3], q[:, :3], q[:, :3], sequence=sequence)
        with pytest.raises(TypeError, match=r"sequence must be what weft\.sequence"):
            attend(q, q, q, sequence="zigzag")


@pytest.mark.usefixtures("every_network")
def test_a_fault_of_one_rank_is_told_on_all() -> None:
    words = errors_of(lambda axis: weft.sequence(-2 if axis.rank == 1 else 4, group=axis))
    assert words == ["sequence: local_length must not be negative, got -2 (rank 1)"] * 3
    words = errors_of(lambda axis: weft.sequence(4, layout="zigzag" if axis.rank == 2 else None, group=axis))
    assert len(set(words)) == 1 and "rank 2 called sequence(layout=zigzag)" in words[0]


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("total", [0, 1, 14, 24])
def test_a_total_gives_the_lengths_of_shard(layout: str, total: int) -> None:
    def program(axis: weft.Axis) -> bool:
        mine = weft.shard(torch.arange(total), 0, layout=layout, group=axis)
        by_total = weft.sequence(total=total, layout=layout, group=axis)
        by_length = weft.sequence(len(mine), layout=layout, group=axis)
        return (by_total.length, by_total.total, by_total.lengths) == (len(mine), total, by_length.lengths)

    assert all(virtual_world(5).run(program).results)


@pytest.mark.usefixtures("every_network")
def test_exactly_one_of_both_lengths_the_same_on_all_ranks() -> None:
    for odd in ({}, {"local_length": 4, "total": 12}):
        words = errors_of(lambda axis: weft.sequence(**(odd if axis.rank == 1 else {"total": 12}), group=axis))  # noqa: B023
        assert words == [
            "sequence: give local_length, the tokens of this rank, or total, those of all ranks, and not both (rank 1)"
        ] * 3  # fmt: skip
    words = errors_of(lambda axis: weft.sequence(total=13 if axis.rank == 1 else 12, group=axis))
    assert len(words) == 3 and len(set(words)) == 1 and "rank 1 called sequence(total=13)" in words[0]
    words = errors_of(
        lambda axis: weft.sequence(**({"local_length": 4} if axis.rank == 1 else {"total": 12}), group=axis)
    )
    assert len(words) == 3 and len(set(words)) == 1 and "rank 1 called sequence(total=None)" in words[0]
