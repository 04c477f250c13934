from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from serial import KINDS, as_arguments, random_maps, relative_error

from weft.scan import Affine


def maps(kind: str, decay: str, seed: int) -> list[Affine]:
    states, decays = random_maps(kind, 3, (2, 3, 4), decay, seed)
    return [Affine.of(s, **as_arguments(kind, d)) for s, d in zip(states, decays, strict=True)]


@given(st.sampled_from(KINDS), st.sampled_from(["one", "slow", "fast", "zero"]), st.integers(0, 10_000))
def test_then_is_associative_and_applies_in_order(kind: str, decay: str, seed: int) -> None:
    first, second, third = maps(kind, decay, seed)
    left, right = first.then(second).then(third), first.then(second.then(third))
    assert relative_error(left.state, right.state) < 1e-12
    state = torch.randn(2, 3, 4, dtype=torch.float64)
    assert relative_error(left.apply(state), third.apply(second.apply(first.apply(state)))) < 1e-12
    if left.decay is not None and kind == "dense":
        assert relative_error(left.decay, right.decay) < 1e-12
    elif left.decay is not None:
        assert relative_error(left.decay.exp(), right.decay.exp()) < 1e-12


@given(st.integers(0, 10_000))
def test_dense_maps_do_not_commute(seed: int) -> None:
    first, second, _ = maps("dense", "fast", seed)
    assert relative_error(first.then(second).decay, second.then(first).decay) > 1e-6


@given(st.sampled_from(KINDS), st.integers(1, 9), st.integers(0, 100))
def test_pieces_are_independent(kind: str, blocks: int, seed: int) -> None:
    whole = maps(kind, "slow", seed)[0]
    entering = maps(kind, "slow", seed + 1)[0].state
    like = Affine.of(entering)
    if kind == "dense":
        parts = [part.contiguous() for part in entering.tensor_split(blocks, dim=-1)]
    else:
        parts = [part.state for part in like.cut(blocks)]
    out = whole.join([piece.apply(part) for piece, part in zip(whole.cut(blocks), parts, strict=True)])
    assert relative_error(out, whole.apply(entering)) < 1e-12
