"""Names and signatures of ring-flash-attention, results of plain attention over the whole sequence."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from test_attention_reference import Case, distance, problem, slice_of
from torch import Tensor
from worlds import every, virtual_world

import weft
from weft.integrations.ring_flash_attn import (
    llama3_flash_attn_prepare_cu_seqlens,
    llama3_flash_attn_varlen_func,
    ring_flash_attn_func,
    zigzag_ring_flash_attn_func,
)
from weft.ops.sequence.layout import shard_lengths
from weft.world.launch import ProcessWorld

pytestmark = pytest.mark.usefixtures("every_network")
NAMES = ("out", "lse", "dq", "dk", "dv")
RINGS: dict[str, Callable[..., Any]] = {"contiguous": ring_flash_attn_func, "zigzag": zigzag_ring_flash_attn_func}
COMMON = ["dropout_p", "softmax_scale", "causal", "window_size", "alibi_slopes", "deterministic", "return_attn_probs",
          "group"]  # fmt: skip
PACKED = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "heads_k_stride", "local_k_slice"]


def test_the_signatures_are_the_originals() -> None:
    for function in RINGS.values():
        assert list(inspect.signature(function).parameters) == ["q", "k", "v", *COMMON]
    found = inspect.signature(llama3_flash_attn_varlen_func).parameters
    assert list(found)[:17] == ["q", "k", "v", *PACKED, *COMMON]
    assert all(one.kind is one.KEYWORD_ONLY for one in list(found.values())[17:])
    wanted = {"dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1), "alibi_slopes": None,
              "deterministic": False, "return_attn_probs": False, "group": None}  # fmt: skip
    for function in (*RINGS.values(), llama3_flash_attn_varlen_func):
        given = inspect.signature(function).parameters
        assert {name: given[name].default for name in COMMON} == wanted


def off(case: Case, found: dict[str, Tensor], lengths: tuple[int, ...], layout: str, rank: int) -> float:
    whole = dict(zip(NAMES, problem(case)[1], strict=True))
    return max(distance(found[name], slice_of(whole[name], lengths, layout, rank)) for name in NAMES)


def leaves_of(case: Case, lengths: tuple[int, ...], layout: str, rank: int) -> tuple[list[Tensor], Tensor]:
    *inputs, grad = (slice_of(x, lengths, layout, rank) for x in problem(case)[0])
    return [x.clone().requires_grad_() for x in inputs], grad


@pytest.mark.parametrize("layout", RINGS)
def test_rings_in_every_combination(layout: str) -> None:
    for size, causal, window in every(itertools.product((1, 2, 3, 4), (False, True), ((-1, -1), (5, 2)))):
        case = Case(23, 4, 2, 2, causal, window)
        lengths = shard_lengths(23, layout, size)

        def run(axis: weft.Axis, case: Case = case, lengths: tuple[int, ...] = lengths) -> float:
            leaves, grad = leaves_of(case, lengths, layout, axis.rank)
            out, lse, none = RINGS[layout](
                *leaves, 0.0, 0.7, case.causal, case.window, deterministic=True, return_attn_probs=True, group=axis
            )
            assert none is None and lse.shape == (2, 4, lengths[axis.rank])
            found = (out.detach(), lse.transpose(1, 2), *torch.autograd.grad(out, leaves, grad))
            alone = RINGS[layout](*leaves, softmax_scale=0.7, causal=case.causal, window_size=case.window, group=axis)
            assert torch.equal(alone, out)
            return off(case, dict(zip(NAMES, found, strict=True)), lengths, layout, axis.rank)

        assert max(virtual_world(size).run(run).results) < 1e-12, (size, causal, window)


BOUNDS = (0, 3, 3, 11, 12, 24)
STRIDES: list[dict[str, Any]] = [
    {"heads_k_stride": 1},
    {"heads_k_stride": 4},
    {"heads_k_stride": 2, "first_stride": 1},
    {"heads_k_stride": 2, "first_stride": 1, "backward_first_stride": 1, "backward_last_stride": 1},
]


def packed_on(axis: weft.Axis, case: Case, layers: int = 1, **options: Any) -> float:
    lengths = shard_lengths(case.total, "contiguous", axis.size)
    cu_q, cu_k, max_q, max_k, keys = llama3_flash_attn_prepare_cu_seqlens(
        torch.tensor(case.bounds, dtype=torch.int32), case.causal, axis.rank, axis.size
    )
    worst = 0.0
    for _ in range(layers):
        leaves, grad = leaves_of(case, lengths, "contiguous", axis.rank)
        rows = [x[0] for x in leaves]
        out, lse, _none = llama3_flash_attn_varlen_func(
            *rows, cu_q, cu_k, max_q, max_k, local_k_slice=keys, softmax_scale=0.7, causal=case.causal,
            window_size=case.window or (-1, -1), return_attn_probs=True, group=axis, **options,
        )  # fmt: skip
        assert out.shape == rows[0].shape and lse.shape == (case.heads, lengths[axis.rank])
        found = (out.detach()[None], lse.T[None], *torch.autograd.grad(out, leaves, grad[0]))
        worst = max(worst, off(case, dict(zip(NAMES, found, strict=True)), lengths, "contiguous", axis.rank))
    return worst


@pytest.mark.parametrize("strides", STRIDES, ids=str)
def test_packed_documents_in_every_combination(strides: dict[str, Any]) -> None:
    for size, causal, window in every(itertools.product((1, 2, 3, 5), (False, True), (None, (4, 1)))):
        case = Case(24, 8, 4, 1, causal, window, BOUNDS)
        found = virtual_world(size).run(lambda axis, case=case: packed_on(axis, case, **strides)).results
        assert max(found) < 1e-12, (size, causal, window)


def test_strides_are_those_asked_for() -> None:
    """The bytes of each step of keys and values, as the ledger has them."""
    case = Case(24, 8, 4, 1, True, None, (0, 24))

    def run(axis: weft.Axis) -> list[list[int]]:
        with weft.record() as ledger:
            packed_on(axis, case, heads_k_stride=2, first_stride=1, backward_last_stride=1)
        return [
            [event.bytes_sent for event in ledger.events if event.operation == name and event.bytes_sent]
            for name in ("attention", "attention.backward")
        ]

    one_head = 2 * 12 * case.dim * 8  # K and V of 12 tokens in fp64
    forward, backward = virtual_world(2).run(run).results[0]  # the first rank sends keys and values, the last gradients
    assert forward == [one_head * heads for heads in (1, 1, 2)]
    assert backward == [one_head * heads for heads in (2, 1, 1)]


def test_layers_of_a_batch_gather_their_documents_once() -> None:
    case = Case(24, 4, 2, 1, True, None, BOUNDS)

    def run(axis: weft.Axis) -> int:
        with weft.record() as ledger:
            packed_on(axis, case, layers=3, heads_k_stride=2)
        return sum(event.operation.startswith("llama3_flash_attn_varlen_func") for event in ledger.events)

    assert virtual_world(3).run(run).results == [2, 2, 2]  # how many boundaries, and which


def test_other_documents_in_the_same_tensors_are_gathered_again() -> None:
    case, other = Case(24, 4, 2, 1, True, None, (0, 3, 24)), Case(24, 4, 2, 1, True, None, (0, 9, 24))

    def run(axis: weft.Axis) -> float:
        lengths, worst, kept = shard_lengths(24, "contiguous", 2), 0.0, None
        for one in (case, other):
            prepared = llama3_flash_attn_prepare_cu_seqlens(torch.tensor(one.bounds), True, axis.rank, 2)
            if kept is None:
                kept = prepared
            else:
                kept[0].copy_(prepared[0])
                kept[1].copy_(prepared[1])
            leaves, _ = leaves_of(one, lengths, "contiguous", axis.rank)
            out = llama3_flash_attn_varlen_func(
                *(x[0] for x in leaves), *kept[:2], *prepared[2:4], 2, prepared[4], softmax_scale=0.7, causal=True
            )
            whole = slice_of(problem(one)[1][0], lengths, "contiguous", axis.rank)
            worst = max(worst, distance(out[None], whole))
        return worst

    assert max(virtual_world(2).run(run).results) < 1e-12


def prepared_as_the_original_does(
    cu_seqlens: tuple[int, ...], causal: bool, rank: int, size: int
) -> tuple[list[int], list[int]]:
    """From its description: the documents a part touches, keys from the first one's start to the part's (or last
    document's) end."""
    part = cu_seqlens[-1] // size
    touched = [(a, b) for a, b in itertools.pairwise(cu_seqlens) if a < (rank + 1) * part and b > rank * part]
    ends = [min(b, (rank + 1) * part) for _, b in touched]
    of_k = [b if not causal else end for (_, b), end in zip(touched, ends, strict=True)]
    return [0, *(end - rank * part for end in ends)], [0, *(end - touched[0][0] for end in of_k)]


def test_preparing_gives_what_the_original_gives() -> None:
    for causal, size, rank in itertools.product((False, True), (1, 2, 4), range(4)):
        if rank >= size:
            continue
        bounds = (0, 3, 11, 12, 24)
        cu_q, cu_k, max_q, max_k, keys = llama3_flash_attn_prepare_cu_seqlens(torch.tensor(bounds), causal, rank, size)
        assert (cu_q.tolist(), cu_k.tolist()) == prepared_as_the_original_does(bounds, causal, rank, size)
        assert max_q == max(b - a for a, b in itertools.pairwise(cu_q.tolist()))
        assert max_k == max(b - a for a, b in itertools.pairwise(cu_k.tolist()))
        assert keys.stop - keys.start == cu_k[-1] and cu_q.dtype == torch.int32


def refusals(axis: weft.Axis, wrong: dict[str, Any], at: int) -> tuple[str, str]:
    """What a rank raises when one of them passes something wrong."""
    case = Case(24, 4, 2, 1, True, None, BOUNDS)
    try:
        if "ring" in wrong:
            leaves, _ = leaves_of(case, shard_lengths(24, "contiguous", axis.size), "contiguous", axis.rank)
            ring_flash_attn_func(*leaves, **(wrong["ring"] if axis.rank == at else {}), group=axis)
        else:
            prepared = llama3_flash_attn_prepare_cu_seqlens(torch.tensor(BOUNDS), True, axis.rank, axis.size)
            leaves, _ = leaves_of(case, shard_lengths(24, "contiguous", axis.size), "contiguous", axis.rank)
            names = [name for name in PACKED if name != "heads_k_stride"]
            given = dict(zip(names, prepared, strict=True))
            given = {**given, "heads_k_stride": 2, "causal": True, **(wrong if axis.rank == at else {})}
            llama3_flash_attn_varlen_func(*(x[0] for x in leaves), **given, group=axis)
    except (ValueError, NotImplementedError) as error:
        return type(error).__name__, str(error)
    return "nothing", ""


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"ring": {"dropout_p": 0.1}}, "NotImplementedError", "dropout_p=0.1 is not supported (rank 1)"),
    ({"ring": {"alibi_slopes": torch.ones(4)}}, "NotImplementedError", "alibi_slopes are not supported (rank 1)"),
    ({"dropout_p": 0.1}, "NotImplementedError", "dropout_p=0.1 is not supported (rank 1)"),
    ({"alibi_slopes": torch.ones(4)}, "NotImplementedError", "alibi_slopes are not supported (rank 1)"),
    ({"heads_k_stride": 3}, "ValueError", "2 key/value heads are not a multiple of a stride of 3"),
    ({"first_stride": 2}, "ValueError", "first must be between 1 and stride - 1 = 1, got 2"),
    ({"max_seqlen_k": 1}, "ValueError", "do not go together"),
    ({"max_seqlen_q": 1}, "ValueError", "do not go together"),
    ({"local_k_slice": slice(0, 24)}, "ValueError", "do not go together"),
    ({"cu_seqlens_q": torch.tensor([0, 8], dtype=torch.int32)}, "ValueError", "do not go together"),
    ({"cu_seqlens_k": torch.tensor([0, 8], dtype=torch.int32)}, "ValueError", "do not go together"),
]


@pytest.mark.parametrize(("wrong", "kind", "words"), WRONG, ids=lambda x: str(x)[:40])
def test_what_is_not_supported_is_refused_on_all_ranks(wrong: dict[str, Any], kind: str, words: str) -> None:
    found = virtual_world(3).run(lambda axis: refusals(axis, wrong, 1)).results
    assert len(set(found)) == 1 and found[0][0] == kind and words in found[0][1], found


def on_gloo(axis: weft.Axis) -> float:
    case = Case(24, 4, 2, 1, True, None, BOUNDS)
    worst = packed_on(axis, case, layers=2, heads_k_stride=1)
    for layout, ring in RINGS.items():
        whole, lengths = Case(24, 4, 2, 1, True), shard_lengths(24, layout, axis.size)
        leaves, grad = leaves_of(whole, lengths, layout, axis.rank)
        out, lse, _ = ring(*leaves, softmax_scale=0.7, causal=True, return_attn_probs=True)
        found = (out.detach(), lse.transpose(1, 2), *torch.autograd.grad(out, leaves, grad))
        worst = max(worst, off(whole, dict(zip(NAMES, found, strict=True)), lengths, layout, axis.rank))
    return worst


def test_on_gloo(pool: ProcessWorld) -> None:
    assert max(pool.run(on_gloo)) < 1e-12


@pytest.mark.processes
def test_a_fault_on_one_gloo_rank_is_raised_on_all() -> None:
    with ProcessWorld(3, timeout=timedelta(seconds=60)) as world:
        for kind, words in world.run(refusals, {"dropout_p": 0.5}, 2):
            assert kind == "NotImplementedError" and "dropout_p=0.5 is not supported (rank 2)" in words
