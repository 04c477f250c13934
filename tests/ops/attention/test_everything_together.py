"""Masks, windows, documents, sinks, caps and losses of lse in one call, drawn, against dense softmax in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dense_masks import Known, known_masks, within
from hypothesis import given, settings
from hypothesis import strategies as st
from test_attention_masks import difference
from test_two_levels import levels
from torch import Tensor
from worlds import virtual_world

import weft
from weft.ops.attention.distributed import METHODS, TWO_LEVELS
from weft.ops.sequence.layout import ANY_LENGTHS, LAYOUTS

HEADS, KV_HEADS, DIM, VALUES = 4, 2, 4, 3
Leaves = tuple[Tensor, ...]  # q, k, v and the sinks


def softmax(leaves: Leaves, seen: Tensor, scale: float, softcap: float | None) -> tuple[Tensor, Tensor]:
    """out and lse; the sinks are one more column, whose share of the row is lost."""
    q, k, v, sinks = leaves
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 2) for x in (k, v))
    scores = scale * torch.einsum("bshd,bthd->bhst", q, k)
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    column = sinks[:, None, None].expand(*scores.shape[:3], 1)
    scores = torch.cat([scores.masked_fill(~seen, -torch.inf), column], -1)
    return torch.einsum("bhst,bthd->bshd", scores.softmax(-1)[..., :-1], v), scores.logsumexp(-1).transpose(1, 2)


def documents(bounds: tuple[int, ...]) -> Tensor:
    """Which tokens are of one document, ``[total, total]``."""
    place = torch.bucketize(torch.arange(bounds[-1]), torch.tensor(bounds[1:]), right=True)
    return place[:, None] == place


@st.composite
def drawn(draw: st.DrawFn) -> tuple[int, Known, tuple[int, ...], dict[str, Any], dict[str, Any], list[int]]:
    """Ranks, a mask, documents, how the tokens lie, what is asked for, and where ranks are cut in other layouts."""
    size, total = draw(st.sampled_from([1, 2, 3, 4, 5])), draw(st.integers(1, 40))
    known = draw(st.sampled_from(known_masks(total)))
    bounds = (0, *sorted(draw(st.lists(st.integers(0, total), max_size=3))), total)
    how: dict[str, Any] = {"layout": draw(st.sampled_from(LAYOUTS))}
    if how["layout"] not in ANY_LENGTHS:
        how |= {
            "chunks_per_rank": draw(st.sampled_from([None, 2, 5])),
            "mask": draw(st.sampled_from([None, known.mask])),
        }
    asked = {
        "window": draw(st.none() | st.tuples(st.integers(-1, 8), st.integers(-1, 8))),
        "softcap": draw(st.sampled_from([None, 1.5])), "scale": draw(st.sampled_from([0.7, -0.4, 0.0])),
        "method": draw(st.sampled_from([*TWO_LEVELS] if size == 4 else ["auto", *METHODS])),
    }  # fmt: skip
    return (
        size,
        known,
        bounds,
        how,
        asked,
        sorted(draw(st.lists(st.integers(0, total), min_size=size - 1, max_size=size - 1))),
    )


@pytest.mark.usefixtures("every_network")
@settings(max_examples=25)
@given(drawn())
def test_everything_together(
    case: tuple[int, Known, tuple[int, ...], dict[str, Any], dict[str, Any], list[int]],
) -> None:
    size, known, bounds, how, asked, cuts = case
    total, make = known.mask.total, torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make, dtype=torch.float64)

    shapes = ((1, total, HEADS, DIM), (1, total, KV_HEADS, DIM), (1, total, KV_HEADS, VALUES), (HEADS,))
    whole = tuple(draw(*shape).requires_grad_() for shape in shapes)
    of_out, of_lse = draw(1, total, HEADS, VALUES), draw(1, total, HEADS)
    seen = within(known.seen, asked["window"]) & documents(bounds)
    out, lse = softmax(whole, seen, asked["scale"], asked["softcap"])
    grads = torch.autograd.grad((out * of_out).sum() + (lse * of_lse).sum(), whole)

    def program(axis: weft.Axis) -> tuple[float, Tensor]:
        length = None if how["layout"] not in ANY_LENGTHS else [*cuts, total][axis.rank] - [0, *cuts][axis.rank]
        sequence = weft.sequence(length, total=total if length is None else None, cu_seqlens=bounds, group=axis, **how)

        def mine(x: Tensor) -> Tensor:
            return weft.shard(x.detach(), 1, sequence=sequence)

        leaves = [*(mine(x).requires_grad_() for x in whole[:3]), whole[3].detach().clone().requires_grad_()]
        group = levels(axis, 2) if asked["method"] in TWO_LEVELS else None
        got = weft.attention(
            *leaves[:3], sinks=leaves[3], mask=known.mask, sequence=sequence, return_lse=True, group=group, **asked
        )
        *found, of_sinks = torch.autograd.grad((got[0] * mine(of_out)).sum() + (got[1] * mine(of_lse)).sum(), leaves)
        pairs = zip((*got, *found), (out, lse, *grads[:3]), strict=True)
        return max(difference(one.detach(), mine(right)) for one, right in pairs), of_sinks

    far, of_sinks = zip(*virtual_world(size).run(program).results, strict=True)
    assert max(*far, difference(sum(of_sinks), grads[3])) < 1e-10


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize("method", METHODS)
def test_same_inputs_same_bits(method: str) -> None:
    """A tree in layout balanced, with sinks, a cap and a loss of lse, in fp32."""
    mask = weft.Mask.tree([-1, 0, 0, 2, 2, -1, 5], [40, 31, 8, 20, 17, 60, 24])

    def program(axis: weft.Axis) -> bool:
        sequence, found = weft.sequence(total=mask.total, layout="balanced", mask=mask, group=axis), []
        for _ in range(3):
            make = torch.Generator().manual_seed(axis.rank)
            shapes = [(1, sequence.length, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
            leaves = [torch.randn(*shape, generator=make).requires_grad_() for shape in shapes]
            leaves.append(torch.linspace(-1, 1, HEADS).requires_grad_())
            out, lse = weft.attention(
                *leaves[:3], sinks=leaves[3], softcap=1.5, mask=mask, method=method, sequence=sequence, return_lse=True
            )
            grads = torch.autograd.grad(out.square().sum() + lse.square().sum(), leaves)
            found.append((out.detach(), lse.detach(), *grads))
        return all(torch.equal(a, b) for one in found for a, b in zip(one, found[0], strict=True))

    assert all(virtual_world(5).run(program).results)
