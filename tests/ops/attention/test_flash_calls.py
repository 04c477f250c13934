"""Calls of a flash operator for a plan: every visible pair once, by the operator's own rules, and few of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.ops.attention import plan as plans
from weft.ops.attention.flash_calls import Area, FlashCall, plan_calls
from weft.ops.attention.plan import UNLIMITED, AttentionPlan, plan_attention
from weft.ops.sequence.layout import lay_out

Pairs = set[tuple[int, int]]


def pairs_of(area: Area) -> Pairs:
    return {
        (i, j)
        for i in range(area.q_start, area.q_stop)
        for j in range(area.k_start, area.k_stop)
        if area.low <= j - i <= area.high
    }


def computed(n: int, m: int, left: int, right: int, longest: int) -> Pairs:
    """What the operator computes of n queries and m keys, ``longest`` keys being the most of any sequence."""
    left, right = (-1 if side >= longest else side for side in (left, right))
    if left >= 0 > right:
        right = longest
    elif right >= 0 > left:
        left = longest
    unlimited = left < 0
    return {
        (i, j)
        for i in range(n)
        for j in range(m)
        if unlimited or -left <= j - i - (m - n) <= right
    }  # fmt: skip


def pairs_of_calls(plan: AttentionPlan, rank: int, spans: tuple, several: bool) -> tuple[Pairs, int, int]:
    """Pairs (query, key) in memory, how many calls there are, and how many sequences."""
    found: Pairs = set()
    calls = plan_calls(plan.blocks(rank, spans), several)
    touched: set[int] = set()
    for call in calls:
        rows = set(range(call.rows.start, call.rows.stop))
        assert call.first == (not rows & touched)
        touched |= rows
        row, key = call.rows.start, call.keys.start
        for n, m in zip(*call.lengths, strict=True):
            own = {(row + i, key + j) for i, j in computed(n, m, call.left, call.right, max(call.lengths[1]))}
            assert not own & found and {i for i, _ in own} == set(range(row, row + n))
            found |= own
            row, key = row + n, key + m
        assert (row, key) == (call.rows.stop, call.keys.stop)
    return found, len(calls), sum(len(call.areas) for call in calls)


def test_areas_are_cut_until_a_window_says_them() -> None:
    """Every rectangle of up to 5 queries and keys with every band."""
    sides = (-UNLIMITED, *range(-6, 7), UNLIMITED)
    for n, m, low, high in itertools.product(range(1, 6), range(1, 6), sides, sides):
        area = Area(3, 3 + n, 3, 3 + m, low, high)
        pairs = pairs_of(area)
        assert area.pairs() == len(pairs)
        found: Pairs = set()
        for part in area.fit() if pairs else ():
            own = computed(part.queries, part.keys, *part.window(), part.keys)
            own = {(part.q_start + i, part.k_start + j) for i, j in own}
            assert own and not own & found
            found |= own
        assert found == pairs, area


def test_an_area_joins_a_call_only_if_one_window_serves_both() -> None:
    """Of all bands of a square, in either order; where it does, the operator computes both."""
    bands = [Area(0, 3, 0, 3, low, high) for low in (-UNLIMITED, -1, 0) for high in (0, 1, UNLIMITED)]
    joined = 0
    for one, other in itertools.product(bands, bands):
        after = Area(3, 6, 3, 6, other.low, other.high)
        call = FlashCall([one], *one.window())
        taken = call.take(after)
        assert taken == (one.window() == other.window()) and len(call.areas) == 1 + taken
        for area in call.areas:
            own = computed(3, 3, call.left, call.right, 3)
            assert {(area.q_start + i, area.k_start + j) for i, j in own} == pairs_of(area)
        joined += taken
    assert joined == len(bands)
    short = Area(3, 4, 3, 4, 0, 0)  # a single token, which any window shows
    for one in bands:
        assert FlashCall([one], *one.window()).take(short)
        before = FlashCall([Area(0, 1, 0, 1, 0, 0)], -1, -1)
        assert before.take(Area(1, 4, 1, 4, one.low, one.high)) and (before.left, before.right) == one.window()


@pytest.fixture(params=["usual tiles", "tiles of 3"], scope="module")
def tiles(request: pytest.FixtureRequest) -> Iterator[None]:
    """Small tiles bring their borders, over which areas are joined, into short sequences."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "tiles of 3":
            patch.setattr(plans, "SMALLEST_TILE", 1)
            patch.setattr(plans, "LARGEST_TILE", 3)
            plan_attention.cache_clear()
        yield
    plan_attention.cache_clear()


@pytest.mark.usefixtures("tiles")
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=4),
    st.sampled_from(["contiguous", "zigzag"]),
    st.booleans(),
    st.tuples(st.integers(-1, 8), st.integers(-1, 8)),
    st.lists(st.integers(0, 36), max_size=5),
    st.booleans(),
)
def test_every_visible_pair_is_computed_once(
    lengths: list[int], layout: str, causal: bool, window: tuple[int, int], cuts: list[int], several: bool
) -> None:
    total = sum(lengths)
    bounds = tuple(sorted({0, total, *(cut for cut in cuts if cut < total)})) if total else None
    plan = plan_attention(lay_out(tuple(lengths), layout), tuple(lengths), bounds, causal, window)
    for rank, owner in itertools.product(range(len(lengths)), repeat=2):
        ranges = ((0, lengths[owner]),) if owner == rank else plan.visible_to(owner, rank)
        spans = tuple(plan.place(owner, ranges))
        wanted: Pairs = set()
        for tile, blocks in plan.blocks(rank, spans):
            for block in blocks:
                left, right = (UNLIMITED, UNLIMITED) if block.kind == "full" else (block.left, block.right)
                wanted |= {
                    (tile.start + i, block.at + j)
                    for i, j in itertools.product(range(tile.length), range(block.length))
                    if -left <= block.shift + j - i <= right
                }
        assert pairs_of_calls(plan, rank, spans, several)[0] == wanted


def own_calls(bounds: tuple[int, ...], causal: bool, window: tuple[int, int], several: bool = True) -> tuple[int, int]:
    """Calls and sequences of one rank that holds documents whole."""
    total = bounds[-1]
    plan = plan_attention(lay_out((total,), "contiguous"), (total,), bounds, causal, window)
    calls = plan_calls(plan.blocks(0, tuple(plan.place(0, ((0, total),)))), several)
    return len(calls), sum(len(call.areas) for call in calls)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (70, -1), (700, -1), (70, 90)])
def test_documents_are_one_call_whatever_the_window(causal: bool, window: tuple[int, int]) -> None:
    bounds = (0, 1, 5, 1600, 1601, 1750, 2900, 2903)
    assert own_calls(bounds, causal, window) == (1, 7)
    assert own_calls(bounds, causal, window, several=False) == (7, 7)


def test_documents_that_ranks_share_are_few_calls() -> None:
    """Zigzag over 4 ranks, 64 documents: the own keys of a rank, those of its two chunks' neighbours."""
    lengths, bounds = (1024,) * 4, tuple(range(0, 4097, 64))
    plan = plan_attention(lay_out(lengths, "zigzag"), lengths, (*bounds[:9], 600, *bounds[10:]), True, (-1, -1))
    for rank in range(4):
        spans = tuple(plan.place(rank, ((0, 1024),)))
        assert len(plan_calls(plan.blocks(rank, spans), True)) == 1
