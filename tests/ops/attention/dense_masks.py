"""Masks beside what they mean: who sees whom as a matrix of booleans, pair by pair, by a rule for each constructor."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise

import torch
from hypothesis import strategies as st
from torch import Tensor

import weft


@dataclass(frozen=True)
class Known:
    """A mask and the rule it stands for: whether query i sees key j."""

    name: str
    mask: weft.Mask
    rule: Callable[[int, int], bool]

    @cached_property
    def seen(self) -> Tensor:
        total = self.mask.total
        return torch.tensor([[self.rule(i, j) for j in range(total)] for i in range(total)], dtype=torch.bool).reshape(
            total, total
        )


def within(seen: Tensor, window: tuple[int, int] | None) -> Tensor:
    """The same through a window."""
    ahead = torch.arange(len(seen)) - torch.arange(len(seen))[:, None]
    left, right = window or (-1, -1)
    return seen & ((ahead >= -left) | (left < 0)) & ((ahead <= right) | (right < 0))


def dense(mask: weft.Mask) -> Tensor:
    """How often a mask's slices show each key (column) to each query (row)."""
    times = torch.zeros(mask.total, mask.total, dtype=torch.int64)
    ahead = torch.arange(mask.total) - torch.arange(mask.total)[:, None]
    for one in mask.slices:
        box = slice(one.q_start, one.q_stop), slice(one.k_start, one.k_stop)
        times[box] += (ahead[box] >= one.low) & (ahead[box] <= one.high)
    return times


def cut(total: int, *shares: float) -> tuple[int, ...]:
    """Boundaries at these shares of ``total``."""
    return (0, *(int(share * total) for share in shares), total)


def place_of(bounds: tuple[int, ...], position: int) -> int:
    return bisect_right(bounds, position) - 1


def tree_rule(parents: list[int], lengths: list[int]) -> Callable[[int, int], bool]:
    bounds = (0, *accumulate(lengths))

    def sees(i: int, j: int) -> bool:
        node, wanted = place_of(bounds, i), place_of(bounds, j)
        while node > wanted:
            node = parents[node]
        return node == wanted and j <= i

    return sees


@lru_cache(maxsize=256)
def known_masks(total: int) -> tuple[Known, ...]:
    """Every constructor, over one document and over several, one of them empty and one of a single token."""
    bounds = tuple(sorted((*cut(total, 0.4, 0.4), min(total, int(0.4 * total) + 1))))

    def doc(i: int) -> int:
        return place_of(bounds, i)

    prefixes = [(b - a) // 2 + (b > a) for a, b in pairwise(bounds)]
    found = [
        Known("causal", weft.Mask.causal(total), lambda i, j: j <= i),
        Known("full", weft.Mask.full(total), lambda i, j: True),
        Known("documents", weft.Mask.documents(bounds), lambda i, j: doc(i) == doc(j) and j <= i),
        Known("whole documents", weft.Mask.documents(bounds, causal=False), lambda i, j: doc(i) == doc(j)),
        Known("window", weft.Mask.window(3, 1, bounds), lambda i, j: doc(i) == doc(j) and -3 <= j - i <= 1),
        Known("left window", weft.Mask.window(2, -1, total), lambda i, j: j - i >= -2),
        Known(
            "prefix_lm", weft.Mask.prefix_lm(prefixes, bounds),
            lambda i, j: doc(i) == doc(j) and (j <= i or j < bounds[doc(i)] + prefixes[doc(i)]),
        ),
        Known(
            "chunks", weft.Mask.chunks(3, bounds),
            lambda i, j: doc(i) == doc(j) and j <= i and (i - bounds[doc(i)]) // 3 == (j - bounds[doc(i)]) // 3,
        ),
    ]  # fmt: skip
    trees = {
        "tree": [-1, 0, 1, 2, 1, 0, -1, 6],  # depth first
        "bush": [-1, 0, 0, 1, 2, 1, -1, 3],  # generation by generation: descendants are no single stretch
    }
    shares = cut(total, 0.3, 0.45, 0.45, 0.6, 0.7, 0.8, 0.9)  # node 2 is empty
    lengths = [b - a for a, b in pairwise(shares)]
    for name, parents in trees.items():
        found.append(Known(name, weft.Mask.tree(parents, lengths), tree_rule(parents, lengths)))
    third, half, most = cut(total, 0.3, 0.5, 0.8)[1:4]
    kind = weft.Mask.Slice
    slices = [
        kind.full((0, third), (half, most)),
        kind.causal((third, half), (0, half)),
        kind.inverse_causal((half, most), (third, total)),
        kind.band((half, most), (0, third), total, -2),
    ]  # the last queries see nothing

    def by_hand(i: int, j: int) -> bool:
        if i < third:
            return half <= j < most
        if i < half:
            return j <= i
        if i < most:
            return j >= i or (j < third and j <= i - 2)
        return False

    found.append(Known("slices", weft.Mask(slices, total), by_hand))
    found.append(Known("nothing", weft.Mask([], total), lambda i, j: False))
    return tuple(found)


@st.composite
def drawn_masks(draw: st.DrawFn) -> tuple[weft.Mask, tuple[int, ...]]:
    """Slices that do not overlap: of those drawn, each that the ones before it allow."""
    lengths = tuple(draw(st.lists(st.integers(0, 7), min_size=1, max_size=5)))
    total = sum(lengths)
    place, limit = st.integers(0, total), st.sampled_from([None, -1, 0, 1]) | st.integers(-total - 1, total + 1)
    mask = weft.Mask([], total)
    for one in draw(st.lists(st.tuples(place, place, place, place, limit, limit), max_size=8)):
        slice_ = (*sorted(one[:2]), *sorted(one[2:4]), *one[4:])
        try:
            mask = weft.Mask([*mask.slices, slice_], total)
        except ValueError:  # it overlaps
            continue
    return mask, lengths
