"""``mask=`` of attention against dense softmax with a matrix of booleans: outputs, lse and every gradient."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dense_masks import Known, dense, drawn_masks, known_masks, within
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_attention import lengths_of, tiles  # noqa: F401
from test_attention_reference import slice_of
from torch import Tensor
from worlds import current_rules, every, virtual_world

import weft
from weft.ops.attention import attention, plan
from weft.ops.attention.distributed import METHODS
from weft.ops.sequence.layout import ANY_LENGTHS, LAYOUTS, lay_out, shard_runs
from weft.ops.sequence.runs import lengths_of as tokens_of
from weft.world.launch import ProcessWorld

NAMES = ("out", "lse", "dq", "dk", "dv")
DIM, SCALE = 4, 0.7


@lru_cache(maxsize=512)
def problem(name: str, total: int, window: tuple[int, int] | None, heads: int, kv_heads: int) -> tuple[Known, Any, Any]:
    """A mask, (q, k, v, gradient of out) and (out, lse, dq, dk, dv), all fp64."""
    known = next(known for known in known_masks(total) if known.name == name)
    return known, *solved(within(known.seen, window), heads, kv_heads)


def solved(seen: Tensor, heads: int, kv_heads: int, batch: int = 2) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Queries that see nothing have out 0, lse -inf and no gradients."""
    make = torch.Generator().manual_seed(len(seen))

    def draw(width: int) -> Tensor:
        return torch.randn(batch, len(seen), width, DIM, generator=make, dtype=torch.float64)

    q, k, v, grad = draw(heads), draw(kv_heads), draw(kv_heads), draw(heads)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    wide = [x.repeat_interleave(heads // kv_heads, 2) for x in (k, v)]
    weights = (SCALE * torch.einsum("bshd,bthd->bhst", q, wide[0])).exp() * seen
    sums = weights.sum(-1, keepdim=True)
    out = torch.einsum("bhst,bthd->bshd", weights / sums.clamp_min(1e-300), wide[1])
    grads = torch.autograd.grad(out, leaves, grad)
    lse = sums[..., 0].log().transpose(1, 2)
    return tuple(x.detach() for x in (q, k, v, grad)), (out.detach(), lse.detach(), *grads)


def difference(got: Tensor, wanted: Tensor) -> float:
    """The largest one, relative to the largest finite value; infinities must be the same."""
    if got.shape != wanted.shape or not torch.equal(got.isinf(), wanted.isinf()) or bool(got.isnan().any()):
        return float("inf")
    got, wanted = (x.double().nan_to_num(neginf=0.0) for x in (got, wanted))
    return ((got - wanted).abs().max() / wanted.abs().max().clamp_min(1e-3)).item() if wanted.numel() else 0.0


def faults(
    axis: weft.Axis, mask: weft.Mask, lengths: tuple[int, ...], layout: str, given: tuple[Tensor, ...],
    wanted: tuple[Tensor, ...], dtype: torch.dtype = torch.float64, **options: object,
) -> list[str]:  # fmt: skip
    """What is wrong on this rank, in words."""
    where: dict[str, object] = {"layout": layout, "group": axis}
    with_sequence = options.pop("with_sequence", False)
    if layout not in ANY_LENGTHS:  # dealt by the mask
        sequence = weft.sequence(total=mask.total, mask=mask, **where)
        where = {"sequence": sequence}
    elif with_sequence:
        where = {"sequence": weft.sequence(lengths[axis.rank], **where)}

    def mine_of(x: Tensor) -> Tensor:
        if layout in ANY_LENGTHS:
            return slice_of(x, lengths, layout, axis.rank)
        return weft.shard(x, 1, sequence=sequence)

    q, k, v, grad = (mine_of(x).to(dtype) for x in given)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = attention(*leaves, mask=mask, scale=SCALE, return_lse=True, **{**where, **options})
    got = (out.detach(), lse, *torch.autograd.grad(out, leaves, grad))
    limit = 1e-10 if dtype == torch.float64 else 2e-5 if dtype == torch.float32 else 2e-2
    found = {name: difference(mine, mine_of(true)) for name, mine, true in zip(NAMES, got, wanted, strict=True)}
    worst = {name: far for name, far in found.items() if far > limit}
    return [f"{mask} {lengths} {layout} {options} rank {axis.rank}: {worst}"] if worst else []


def heads_of(method: str, size: int) -> tuple[int, int]:
    return (2 * size, size) if method == "ulysses" else (4, 2)


def cases(total: int) -> Iterator[tuple[str, tuple[int, int] | None]]:
    for number, known in enumerate(known_masks(total)):
        yield known.name, None
        yield known.name, ((2, 0), (-1, 2), (3, 3))[number % 3]


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_every_mask(size: int, method: str) -> None:
    splits = list(itertools.product(("even", "uneven", "missing"), LAYOUTS))
    for number, (kind, layout) in enumerate(splits):
        lengths = lengths_of(kind, size)
        chosen = list(cases(sum(lengths)))
        if "WEFT_SOAK" not in os.environ:
            chosen = chosen[number :: len(splits)] if size > 1 else chosen[number::3]
        elif current_rules() == "sim" and size == 8:
            chosen = chosen[number % 3 :: 3]  # an operator there costs a hundred times as much

        def program(axis: weft.Axis) -> list[str]:
            found = []
            for turn, (name, window) in enumerate(every(chosen)):  # noqa: B023
                known, given, wanted = problem(name, sum(lengths), window, *heads_of(method, size))  # noqa: B023
                options = {"method": method, "window": window, "with_sequence": turn % 2 == 1}
                found += faults(axis, known.mask, lengths, layout, given, wanted, **options)  # noqa: B023
            return found

        found = [fault for rank in virtual_world(size).run(program).results for fault in rank]
        assert not found, "\n".join(found[:5])


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision(dtype: torch.dtype) -> None:
    """Slices are merged as blocks are; in half precision on a device by its flash operator."""
    lengths = (9, 0, 14)
    for method, name in itertools.product(METHODS, ("tree", "slices")):
        known, given, wanted = problem(name, 23, None, 6, 3)
        given = tuple(x.to(dtype).double() for x in given)
        run = virtual_world(3).run(
            lambda axis: faults(axis, known.mask, lengths, "zigzag", given, wanted, dtype, method=method)  # noqa: B023
        )
        assert not any(run.results), run.results


@pytest.mark.usefixtures("every_network", "tiles")
@settings(max_examples=25)
@given(
    drawn_masks(),
    st.sampled_from(LAYOUTS),
    st.sampled_from(["auto", *METHODS]),
    st.none() | st.tuples(st.integers(-1, 4), st.integers(-1, 4)),
)
def test_drawn_masks(drawn: tuple[weft.Mask, tuple[int, ...]], layout: str, method: str, window) -> None:
    (mask, lengths), size = drawn, len(drawn[1])
    if current_rules() == "sim" and "WEFT_SOAK" not in os.environ and int(mask.digest, 16) % 4:
        return
    given, wanted = solved(within(dense(mask) > 0, window), *heads_of(method, size), batch=1)
    run = virtual_world(size).run(
        lambda axis: faults(axis, mask, lengths, layout, given, wanted, method=method, window=window)
    )
    assert not any(run.results), run.results


@pytest.mark.usefixtures("tiles")
@settings(max_examples=100)
@example((known_masks(20)[8].mask, (13, 7)), "zigzag")
@given(drawn_masks(), st.sampled_from(LAYOUTS))
def test_every_visible_pair_is_computed_once(drawn: tuple[weft.Mask, tuple[int, ...]], layout: str) -> None:
    """And no key travels to a rank whose queries do not see it."""
    (mask, lengths), seen = drawn, dense(drawn[0]) > 0
    size = len(lengths)
    dealt = layout not in ANY_LENGTHS
    runs = shard_runs(sum(lengths), layout, size, None, None, mask) if dealt else lay_out(lengths, layout)
    lengths = tokens_of(runs, size)
    held = [torch.cat([torch.arange(r.offset, r.offset + r.length) for r in runs if r.rank == n]) for n in range(size)]
    made = plan.plan_attention(runs, lengths, None, False, (-1, -1), mask)
    for rank, owner in itertools.product(range(size), range(size)):
        ranges = made.visible_to(owner, rank) if owner != rank else ((0, lengths[rank]),)
        tokens = torch.cat([held[owner][start : start + length] for start, length in ranges] or [held[owner][:0]])
        if owner != rank:
            assert tokens.tolist() == [int(key) for key in held[owner] if seen[held[rank], key].any()]
        times = torch.zeros(lengths[rank], len(tokens), dtype=torch.int64)
        fresh = torch.ones(lengths[rank], dtype=torch.bool)
        for tile, blocks in made.blocks(rank, tuple(made.place(owner, ranges))):
            rows = slice(tile.start, tile.start + tile.length)
            assert fresh[rows].all() or not tile.first  # what is written must not have been there before
            fresh[rows] = False
            for block in blocks:
                ahead = torch.arange(block.length) - torch.arange(tile.length)[:, None]
                shown = torch.ones_like(ahead, dtype=torch.bool)
                if block.kind == "causal":
                    assert block.length == tile.length
                    shown = ahead <= 0
                elif block.kind == "band":
                    shown = (block.shift + ahead >= -block.left) & (block.shift + ahead <= block.right)
                times[rows, block.at : block.at + block.length] += shown
        assert torch.equal(times, seen[held[rank]][:, tokens].long())


@pytest.mark.usefixtures("every_network")
def test_documents_of_a_sequence_limit_a_mask() -> None:
    lengths = (7, 9)
    both = weft.Mask.causal(16) & weft.Mask.full([0, 5, 16])

    def program(axis: weft.Axis) -> bool:
        q = torch.randn(1, lengths[axis.rank], 2, DIM)
        packed = weft.sequence(lengths[axis.rank], cu_seqlens=[0, 5, 16], group=axis)
        outs = [
            attention(q, q, q, mask=weft.Mask.causal(16), sequence=packed),
            attention(q, q, q, mask=both, group=axis),
            attention(q, q, q, causal=True, sequence=packed),
        ]
        return torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])

    for method in METHODS:
        assert all(virtual_world(2).run(program).results), method


CAUSAL = weft.Mask.causal(12)


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"mask": torch.ones(12, 12)}, TypeError, "mask must be a weft.Mask, got torch.float32"),
        ({"causal": True}, ValueError, "mask says who sees whom; leave causal out"),
        ({"cu_seqlens": torch.tensor([0, 12])}, ValueError, "mask says who sees whom; leave cu_seqlens out"),
        (
            {"mask": weft.Mask.causal(11)},
            ValueError,
            r"mask is of 11 tokens, but the ranks hold \[4, 4, 4\], 12 in all|the ranks disagree.*total=11",
        ),
        ({"mask": weft.Mask.causal([0, 5, 12])}, ValueError, r"mask=Mask\(2 slices, total=12, digest=\w+\)"),
    ],
)
@pytest.mark.parametrize("odd", ["one rank", "all"])
@pytest.mark.parametrize("with_sequence", [False, True])
def test_wrong_masks_are_refused_on_every_rank(changes: dict, kind, words: str, odd: str, with_sequence: bool) -> None:
    def program(axis: weft.Axis) -> tuple[type, str]:
        q = torch.randn(1, 4, 2, DIM)
        where: dict[str, Any] = {"sequence": weft.sequence(4, group=axis)} if with_sequence else {"group": axis}
        given = {"mask": CAUSAL, **(changes if odd == "all" or axis.rank == 1 else {})}
        try:
            attention(q, q, q, **where, **given)
        except (ValueError, TypeError) as error:
            return type(error), str(error)
        return type(None), ""

    results = virtual_world(3).run(program).results
    if with_sequence and "cu_seqlens" in changes:
        words = "cu_seqlens is part of sequence; leave it out"
    if odd == "all" and "digest" in words:
        assert results == [(type(None), "")] * 3  # another mask, but the same for all
    else:
        assert all(issubclass(found, kind) and re.search(words, text) for found, text in results), results


def several(axis: weft.Axis, size: int) -> list[str]:
    group = dist.new_group(range(size))
    if axis.rank >= size:
        return []
    lengths = tuple(7 if rank % 2 else 4 * rank + 1 for rank in range(size))
    found = []
    for (name, window), layout in itertools.product((("tree", None), ("slices", (4, 4)), ("chunks", None)), LAYOUTS):
        known, given, wanted = problem(name, sum(lengths), window, 8, 4)
        for method in METHODS:
            found += faults(
                weft.Axis.of(group), known.mask, lengths, layout, given, wanted, window=window, method=method
            )
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_masks_over_processes(pool: ProcessWorld, size: int) -> None:
    found = [fault for rank in pool.run(several, size) for fault in rank]
    assert not found, "\n".join(found[:5])
