"""`weft.Mask`: what each constructor shows, pair by pair; what is counted; what is refused."""

from __future__ import annotations

import pickle
from itertools import pairwise

import pytest
import torch
from dense_masks import dense, known_masks, within
from hypothesis import given
from hypothesis import strategies as st

import weft
from weft import Mask
from weft.ops.sequence.mask_slices import UNLIMITED, MaskSlice


@pytest.mark.parametrize("total", [0, 1, 2, 7, 23])
def test_every_constructor_shows_what_it_says(total: int) -> None:
    for known in known_masks(total):
        assert known.mask.total == total
        assert torch.equal(dense(known.mask), known.seen.long()), known.name
        cuts = [0, total // 3, total // 3, total - total // 5, total]
        wanted = [int(known.seen[a:b].sum()) for a, b in pairwise(cuts)]
        assert known.mask.count(cuts) == wanted and known.mask.pairs == sum(wanted), known.name


@pytest.mark.parametrize("total", [7, 23])
def test_masks_meet(total: int) -> None:
    known = known_masks(total)
    for one in known:
        assert one.mask & one.mask == one.mask
        for left, right in ((2, 0), (-1, 3), (0, -1), (-1, -1)):
            assert torch.equal(dense(one.mask.within(left, right)), within(one.seen, (left, right)).long()), one.name
        for other in known:
            assert torch.equal(dense(one.mask & other.mask), (one.seen & other.seen).long()), (one.name, other.name)
    with pytest.raises(ValueError, match="masks of 7 and of 9 tokens have nothing in common"):
        Mask.causal(7) & Mask.causal(9)
    with pytest.raises(TypeError):
        Mask.causal(7) & 3


def test_equal_masks_are_one_key() -> None:
    ways = [
        Mask.documents(torch.tensor([0, 4, 9])), Mask.causal([0, 4, 9]), Mask.causal((0, 4, 4, 9)),
        Mask([(4, 9, 4, 9, None, 0), (0, 4, 0, 4, -100)], 9) & Mask.causal(9),
    ]  # fmt: skip
    assert ways[0] == ways[1] == ways[2] == ways[3] and len({*ways}) == 1
    assert Mask.causal([0, 4, 10]) != ways[0] != Mask.causal([0, 5, 9]) and ways[0] != "mask"
    copy = pickle.loads(pickle.dumps(ways[0]))
    assert copy == ways[0] and hash(copy) == hash(ways[0]) and copy.slices == ways[0].slices
    assert len(str(Mask.causal(range(10_000)))) < 100
    with pytest.raises(AttributeError):
        ways[0].total = 3  # type: ignore[misc]


def test_neighbours_in_a_tree_are_one_slice() -> None:
    assert Mask.tree([-1, 0, 1, 2], [3, 2, 4, 1]) == Mask.causal(10)
    assert len(Mask.tree([-1, 0, 0, 2, 0], [3, 2, 4, 1, 2]).slices) == 4
    roots = Mask.tree([-1, -1, -1], [3, 0, 2])
    assert roots == Mask.causal([0, 3, 5])


drawn_slices = st.integers(1, 9).flatmap(
    lambda total: st.tuples(
        st.just(total),
        st.lists(
            st.tuples(
                *[st.integers(0, total)] * 4,
                *[st.sampled_from([None, -1, 0, 1]) | st.integers(-total - 1, total + 1)] * 2,
            ).map(lambda one: (*sorted(one[:2]), *sorted(one[2:4]), *one[4:])),
            max_size=4,
        ),
    )
)  # fmt: skip


@given(drawn_slices, st.lists(st.integers(-1, 11), min_size=1, max_size=4))
def test_a_key_that_counts_twice_is_found(drawn: tuple[int, list[tuple[int | None, ...]]], cuts: list[int]) -> None:
    total, slices = drawn
    times = torch.zeros(total, total, dtype=torch.int64)
    for q_start, q_stop, k_start, k_stop, low, high in slices:
        for i in range(q_start, q_stop):
            for j in range(k_start, k_stop):
                times[i, j] += (low is None or low <= j - i) and (high is None or j - i <= high)
    if times.numel() and times.max() > 1:
        with pytest.raises(ValueError, match=r"both show key \d+ to query \d+; it would count twice"):
            Mask(slices, total)
        return
    mask, cuts = Mask(slices, total), sorted(cuts)
    assert torch.equal(dense(mask), times)
    assert mask.count(cuts) == [int(times[max(a, 0) : max(b, 0)].sum()) for a, b in pairwise(cuts)]
    for one in mask.slices:  # nothing in them that is not needed
        box = times[one.q_start : one.q_stop, one.k_start : one.k_stop]
        assert box.any(0).all() and box.any(1).all()


@pytest.mark.parametrize("later", [[], [(7, 10, 0, 1)], [(9, 10, 0, 1)]])
def test_slices_that_meet_when_one_between_them_has_ended(later: list[tuple[int, ...]]) -> None:
    diagonal, column, between = (0, 10, 0, 10, -1, 0), (0, 10, 8, 9), (0, 3, 5, 6)
    assert Mask([diagonal, between], 10).pairs == 22 and Mask([column, between], 10).pairs == 13
    with pytest.raises(ValueError, match="both show key 8 to query 8"):
        Mask([diagonal, column, between, *later], 10)


def test_the_pair_that_counts_twice_is_named() -> None:
    words = r"Mask: slices \(2, 6, 2, 6, None, 0\) and \(4, 8, 0, 5, None, None\) both show key 2 to query 4"
    with pytest.raises(ValueError, match=words):
        Mask([(4, 8, 0, 5), (0, 6, 2, 6, None, 0)], 8)


def test_a_million_tokens_are_counted_by_formulas() -> None:
    """10,000 slices and 8,000 cuts, in many documents and all over the same queries."""
    total, length = 1_000_000, 100
    cuts = range(0, total + 1, 125)
    packed = Mask.causal(range(0, total + 1, length)).count(cuts)
    assert sum(packed) == total // length * (length * (length + 1) // 2)
    assert packed[0] == 5050 + 25 * 26 // 2 and packed[4 * 777] == packed[0]
    stacked = Mask([(0, total, at, at + length, None, 0) for at in range(0, total, length)], total)
    assert stacked.count(cuts) == Mask.causal(total).count(cuts) and stacked.pairs == total * (total + 1) // 2


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda: Mask([(0, 4, 0)], 4), ValueError, r"a slice is \(q_start, q_stop, k_start, k_stop, low, high\)"),
        (lambda: Mask([(0, 4, 0, 5)], 4), ValueError, r"slice \(0, 4, 0, 5\) is not within the 4 tokens"),
        (lambda: Mask([(3, 2, 0, 4)], 4), ValueError, r"slice \(3, 2, 0, 4\) is not within"),
        (lambda: Mask([(0, 4, 0, 1.5)], 4), TypeError, "k_stop of a slice must be an integer, got 1.5"),
        (lambda: Mask([(0, None, 0, 4)], 4), TypeError, "q_stop of a slice must be an integer"),
        (lambda: Mask([(0, 4, 0, 4)], "4"), TypeError, "total must be an integer"),
        (lambda: Mask.causal(-1), ValueError, r"Mask.causal: documents must be how many tokens .* got \[0, -1\]"),
        (lambda: Mask.full([0, 5, 3]), ValueError, r"boundaries that rise from 0, got \[0, 5, 3\]"),
        (lambda: Mask.documents([1, 5]), ValueError, r"Mask.documents: .* got \[1, 5\]"),
        (lambda: Mask.documents([0, 5], causal=1), TypeError, "causal must be True or False"),
        (lambda: Mask.documents(torch.tensor([0.0, 5.0])), TypeError, "documents must be integers, got torch.float32"),
        (lambda: Mask.window(-2, 0, 5), ValueError, "left must be at least -1, got -2"),
        (lambda: Mask.chunks(0, 5), ValueError, "length must be at least 1, got 0"),
        (lambda: Mask.prefix_lm(6, 5), ValueError, "a prefix of 6 tokens in a document of 5"),
        (lambda: Mask.prefix_lm([1, 1], 5), ValueError, "2 prefixes for 1 documents"),
        (lambda: Mask.tree([-1, 1], [2, 2]), ValueError, "the parent of node 1 must be a node before it or -1, got 1"),
        (lambda: Mask.tree([-1, 0], [2]), ValueError, r"lengths must be one for each of the 2 parents .* got \[2\]"),
        (lambda: Mask.tree([-1], [-2]), ValueError, "not negative"),
    ],
)
def test_what_is_no_mask_is_refused(make, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        make()


def test_kinds_of_slices_and_one_prefix_for_all() -> None:
    assert MaskSlice.band((0, 4), (2, 6), 1, 2) == (0, 4, 2, 6, -1, 2)
    assert MaskSlice.inverse_causal((0, 4), (2, 6)) == (0, 4, 2, 6, 0, UNLIMITED)
    assert Mask.prefix_lm(1, [0, 3, 5]) == Mask.prefix_lm([1, 1], [0, 3, 5])
    assert weft.Mask is Mask and Mask.Slice is MaskSlice
    limits = Mask([(0, 4, 0, 4, -(10**30), 10**30)], 4)
    assert limits == Mask.full(4)
