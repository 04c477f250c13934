"""On real Gloo processes: every method, meshes of data x sequence in both orders, and compiled models."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import test_attention_scores as scores
import torch
import torch.distributed as dist
from ranks import two_by_two
from test_attention import faults
from test_attention_reference import Case, plain
from torch import Tensor

import weft
from weft.ops.attention import attention
from weft.ops.attention.distributed import METHODS
from weft.ops.sequence.layout import ANY_LENGTHS
from weft.world.launch import ProcessWorld

T, HEADS, KV_HEADS, DIM = 45, 4, 2, 8


def every_method(axis: weft.Axis, size: int) -> list[str]:
    group = dist.new_group(range(size))
    if axis.rank >= size:
        return []
    lengths = tuple(7 if rank % 2 else 4 * rank for rank in range(size))
    total = sum(lengths)
    found = []
    kinds = [*itertools.product(ANY_LENGTHS, (False, True), (None, (3, 2)), (False, True))]
    for layout, causal, window, packed in [*kinds, ("balanced", True, None, True), ("balanced", False, (3, 2), False)]:
        bounds = (0, 2, 2, total // 2, total) if packed else None
        case = Case(total, 8, 4, 1, causal, window, bounds)
        for options in (*({"method": method} for method in METHODS), {"method": "gather", "backward": "ring"}):
            found += faults(weft.Axis.of(group), case, lengths, layout, **options)
        uneven = replace(case, heads=3, kv_heads=1)  # with 4 ranks one has no head
        found += faults(weft.Axis.of(group), uneven, lengths, layout, method="ulysses")
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_every_method_mask_and_layout(pool: ProcessWorld, size: int) -> None:
    found = [fault for rank in pool.run(every_method, size) for fault in rank]
    assert not found, "\n".join(found[:5])


def every_kind_of_scores(axis: weft.Axis, size: int, lengths: tuple[int, ...], method: str) -> list[dict[str, Tensor]]:
    group = dist.new_group(range(size))
    if axis.rank >= size:
        return []
    return [
        scores.run(weft.Axis.of(group), case, kind, lengths, "zigzag", torch.float64, method=method)
        for case, kind in scores_on(size)
    ]


def scores_on(size: int) -> list[tuple[Case, scores.Kind]]:
    total = 7 * size - 1
    masks = [{"causal": True}, {"window": (3, 2)}, {"causal": True, "bounds": (0, 2, 2, total // 2, total)}]
    return [(Case(total, 8, 4, 1, **mask), kind) for mask in masks for kind in scores.KINDS.values()]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("method", METHODS)
def test_every_kind_of_scores(pool: ProcessWorld, size: int, method: str) -> None:
    lengths = (*[7] * (size - 1), 6)
    by_rank = pool.run(every_kind_of_scores, size, lengths, method)[:size]
    for number, (case, kind) in enumerate(scores_on(size)):
        found = scores.faults(case, kind, lengths, "zigzag", [results[number] for results in by_rank])
        assert not found, "\n".join(found[:5])


def inputs(seed: int) -> dict[str, Tensor]:
    make = torch.Generator().manual_seed(seed)
    x = torch.randn(1, T, 16, generator=make, dtype=torch.float64)
    widths = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
    weights = {
        name: torch.randn(16, heads * DIM, generator=make, dtype=torch.float64) / 4 for name, heads in widths.items()
    }
    return {"x": x, **weights}


def model(p: dict[str, Tensor], attend) -> Tensor:
    q, k, v = ((p["x"] @ p[name]).unflatten(-1, (-1, DIM)) for name in "qkv")
    return attend(q, k, v).square().sum()


def train_step(axis: weft.Axis, order: str, layout: str, method: str) -> float:
    """Gradients of replicated parameters, summed over a 2 x 2 mesh, against one process that sees everything."""
    data, sequence = two_by_two(axis, order)
    if axis.rank >= 4:
        return 0.0
    shared = inputs(0)
    local = {name: shared[name].clone().requires_grad_() for name in "qkv"}
    whole = {name: shared[name].clone().requires_grad_() for name in "qkv"}
    mine = inputs(dist.get_rank(data))["x"]
    local["x"] = weft.shard(mine, 1, layout=layout, group=sequence)
    options = {"causal": True, "scale": 0.7, "layout": layout, "method": method, "group": sequence}
    model(local, lambda q, k, v: attention(q, k, v, **options)).backward()
    case = Case(T, HEADS, KV_HEADS, 1, causal=True)
    for seed in range(2):
        model({**whole, "x": inputs(seed)["x"]}, lambda q, k, v: plain(q, k, v, case)[0]).backward()
    worst = 0.0
    for name in "qkv":
        for group in (data, sequence):
            dist.all_reduce(local[name].grad, group=group)
        worst = max(worst, ((local[name].grad - whole[name].grad).abs().max() / whole[name].grad.abs().max()).item())
    return worst


@pytest.mark.parametrize("order", ["data first", "sequence first"])
@pytest.mark.parametrize(("layout", "method"), [("zigzag", "gather"), ("contiguous", "ring"), ("zigzag", "ulysses")])
def test_replicated_parameters_get_the_gradients_of_one_process(
    pool: ProcessWorld, order: str, layout: str, method: str
) -> None:
    assert max(pool.run(train_step, order, layout, method)) < 1e-10


def compiled_steps(axis: weft.Axis, method: str) -> float:
    group = dist.new_group(range(2))
    if axis.rank >= 2:
        return 0.0

    def model(x: Tensor) -> Tensor:
        h = torch.sin(x) + 1
        o = attention(h, h, h, causal=True, layout="zigzag", method=method, group=group)
        return (o * torch.cos(x)).square().sum()

    compiled, worst = torch.compile(model, backend="aot_eager", fullgraph=True), 0.0
    for step in range(3):
        x = torch.randn(1, 12, 2, 4, generator=torch.Generator().manual_seed(10 * step + axis.rank))
        grads = [torch.autograd.grad(run(y), y)[0] for run in (model, compiled) for y in [x.clone().requires_grad_()]]
        worst = max(worst, (grads[0] - grads[1]).abs().max().item())
    return worst


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=[] if name == "gather" else [pytest.mark.slow]) for name in METHODS]
)
def test_a_compiled_model_gives_the_same(pool: ProcessWorld, method: str) -> None:
    assert max(pool.run(compiled_steps, method)) < 1e-5


def refused(axis: weft.Axis) -> str:
    group = dist.new_group(range(3))
    if axis.rank >= 3:
        return ""
    q = torch.randn(1, 4, 2, 4)
    try:
        attention(q, q, q, causal=False, method="gather", strides=(1, 1) if axis.rank != 1 else (2, 1), group=group)
    except ValueError as error:
        return str(error)
    return "no error"


def test_wrong_strides_on_one_rank_are_refused_on_all(pool: ProcessWorld) -> None:
    for words in pool.run(refused)[:3]:
        assert "2 key/value heads cannot be split into strides (2, 1) (rank 1); strides must sum to 2" in words
