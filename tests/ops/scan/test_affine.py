from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from serial import KINDS, as_arguments, random_maps, relative_error

from weft.ops.scan import Affine


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
    one, other, _ = maps(kind, "slow", seed)
    entering = other.state
    wanted = one.apply(entering)
    if kind == "dense":
        parts, wholes = entering.tensor_split(blocks, dim=-1), wanted.tensor_split(blocks, dim=-1)
    else:
        parts, wholes = (t.view(-1, 4).tensor_split(blocks) for t in (entering, wanted))
    for piece, part, true in zip(one.cut(blocks), parts, wholes, strict=True):
        assert relative_error(piece.apply(part.contiguous().view(piece.state.shape)).view(true.shape), true) < 1e-12


def test_a_map_is_packed_into_one_message_and_read_back() -> None:
    for kind in KINDS:
        one = maps(kind, "slow", 5)[0]
        again = one.form.from_flat(one.flat.clone())
        assert torch.equal(again.state, one.state) and torch.equal(one.flat[: one.state.numel()], one.state_flat)
        assert one.decay is None or torch.equal(again.decay, one.decay)
