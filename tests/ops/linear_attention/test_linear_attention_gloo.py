"""On real Gloo processes: meshes of data x sequence in both orders, and fla's naive operations as a second judge."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import two_by_two
from recurrence import reference
from torch import Tensor
from worlds import virtual_world

import weft
from weft.ops.scan import METHODS
from weft.world.launch import ProcessWorld

T, HEADS, DIM = 45, 2, 8


def inputs(seed: int) -> dict[str, Tensor]:
    make = torch.Generator().manual_seed(seed)
    x = torch.randn(1, T, 16, generator=make, dtype=torch.float64)
    weights = {name: torch.randn(16, HEADS * DIM, generator=make, dtype=torch.float64) / 4 for name in "qkv"}
    return {"x": x, **weights, "g": -0.01 * torch.rand(HEADS, generator=make, dtype=torch.float64)}


def model(p: dict[str, Tensor], attend) -> Tensor:
    q, k, v = ((p["x"] @ p[name]).unflatten(-1, (HEADS, DIM)) for name in "qkv")
    return attend(q, k, v, p["g"]).square().sum()


def train_step(axis: weft.Axis, order: str, layout: str, method: str) -> float:
    """Gradients of replicated parameters, summed over a 2 x 2 mesh, against one process that sees everything."""
    data, sequence = two_by_two(axis, order)
    if axis.rank >= 4:
        return 0.0
    mine = inputs(dist.get_rank(data))
    shared = inputs(0)
    local = {name: shared[name].clone().requires_grad_() for name in "qkvg"}
    local["x"] = weft.shard(mine["x"], 1, layout=layout, group=sequence)

    def attend(*tensors: Tensor) -> Tensor:
        return weft.linear_attention(*tensors, layout=layout, method=method, group=sequence)[0]

    model(local, attend).backward()
    whole = {name: shared[name].clone().requires_grad_() for name in "qkvg"}
    for seed in range(2):
        model(
            {**whole, "x": inputs(seed)["x"]},
            lambda q, k, v, g: reference(q, k, v, g, DIM**-0.5, None, [T])[0],
        ).backward()
    worst = 0.0
    for name in "qkvg":
        for group in (data, sequence):
            dist.all_reduce(local[name].grad, group=group)
        worst = max(worst, ((local[name].grad - whole[name].grad).abs().max() / whole[name].grad.abs().max()).item())
    return worst


@pytest.mark.parametrize("order", ["data first", "sequence first"])
@pytest.mark.parametrize(("layout", "method"), [("contiguous", "pipeline"), ("zigzag", "doubling"), ("zigzag", "auto")])
def test_replicated_parameters_get_the_gradients_of_one_process(
    pool: ProcessWorld, order: str, layout: str, method: str
) -> None:
    assert max(pool.run(train_step, order, layout, method)) < 1e-10


def every_method(axis: weft.Axis, size: int) -> float:
    group = dist.new_group(range(size))
    if axis.rank >= size:
        return 0.0
    make = torch.Generator().manual_seed(3)
    total = 8 * size + 3
    q, k, v = (torch.randn(1, total, 2, 4, generator=make) for _ in range(3))
    g = -0.05 * torch.rand(1, total, 2, 4, generator=make)
    bounds = torch.tensor([0, 2, 2, total // 2, total])
    worst = 0.0
    for layout in ("contiguous", "zigzag"):
        for cu in (None, bounds):
            lengths = [total] if cu is None else (cu[1:] - cu[:-1]).tolist()
            leaves = [t.double().requires_grad_() for t in (q, k, v, g)]
            o, state = reference(*leaves, 0.5, None, lengths)
            true = torch.autograd.grad(o.square().sum() + state.sum() * size, leaves)
            for method in METHODS:
                local = [weft.shard(t, 1, layout=layout, group=group).requires_grad_() for t in (q, k, v, g)]
                out, final = weft.linear_attention(
                    *local, scale=0.5, output_final_state=True, cu_seqlens=cu, layout=layout, method=method, group=group
                )
                got = torch.autograd.grad(out.square().sum() + final.sum(), local)
                wanted = [weft.shard(t, 1, layout=layout, group=group) for t in (o.detach(), *true)]
                for a, b in [*zip([out, *got], wanted, strict=True), (final, state)]:
                    worst = max(worst, ((a.double() - b).abs().max() / b.abs().max()).item())
    return worst


@pytest.mark.parametrize("size", [2, 4])
def test_every_method_layout_and_packing(pool: ProcessWorld, size: int) -> None:
    assert max(pool.run(every_method, size)) < 2e-5


def repeat(axis: weft.Axis) -> bool:
    q = torch.randn(1, 33, 2, 8, generator=torch.Generator().manual_seed(axis.rank))
    outs = []
    for _ in range(3):
        local = q.clone().requires_grad_()
        o, _ = weft.linear_attention(local, local, local, layout="zigzag", group=axis)
        outs.append((o.detach(), *torch.autograd.grad(o.square().sum(), local)))
    return all(torch.equal(a, b) for out in outs for a, b in zip(out, outs[0], strict=True))


def test_same_inputs_same_bits(pool: ProcessWorld) -> None:
    assert all(pool.run(repeat))


def compiled_steps(axis: weft.Axis) -> float:
    """Three steps of a compiled model against the same in eager mode."""
    group = dist.new_group(range(2))
    if axis.rank >= 2:
        return 0.0

    def model(x: Tensor) -> Tensor:
        h = torch.sin(x) + 1
        o, _ = weft.linear_attention(h, h, h, layout="zigzag", group=group)
        return (o * torch.cos(x)).square().sum()

    compiled, worst = torch.compile(model, backend="aot_eager", fullgraph=True), 0.0
    for step in range(3):
        x = torch.randn(1, 12, 2, 4, generator=torch.Generator().manual_seed(10 * step + axis.rank))
        grads = [torch.autograd.grad(run(y), y)[0] for run in (model, compiled) for y in [x.clone().requires_grad_()]]
        worst = max(worst, (grads[0] - grads[1]).abs().max().item())
    return worst


def test_a_compiled_model_gives_the_same(pool: ProcessWorld) -> None:
    assert max(pool.run(compiled_steps)) < 1e-5


@pytest.mark.usefixtures("every_network")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("decay", ["none", "scalar", "vector"])
def test_as_flash_linear_attention(decay: str) -> None:
    """Its naive operations, forward and backward, in one process and over four virtual ranks."""
    gla = pytest.importorskip("fla.ops.gla.naive")
    simple = pytest.importorskip("fla.ops.simple_gla.naive")
    linear = pytest.importorskip("fla.ops.linear_attn.naive")
    make = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 64, 2, 8, generator=make) for _ in range(3))
    g = {"none": None, "scalar": (2, 64, 2), "vector": (2, 64, 2, 8)}[decay]
    g = None if g is None else -0.1 * torch.rand(g, generator=make)
    tensors = [t for t in (q, k, v, g) if t is not None]
    whole = [t.clone().requires_grad_() for t in tensors]
    if decay == "vector":
        o, _ = gla.naive_recurrent_gla(*whole)
    elif decay == "scalar":
        o, _ = simple.naive_chunk_simple_gla(*whole, chunk_size=16)
    else:
        o, _ = linear.naive_recurrent_linear_attn(*whole, scale=8**-0.5)
    true = torch.autograd.grad(o.square().sum(), whole)

    def program(axis: weft.Axis) -> list[Tensor]:
        local = [weft.shard(t, 1, group=axis).requires_grad_() for t in tensors]
        out, _ = weft.linear_attention(*local, group=axis)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), local)]

    for size in (1, 4):
        slices = virtual_world(size).run(program).results
        for index, wanted in enumerate([o, *true]):
            got = torch.cat([one[index] for one in slices], dim=1)
            assert ((got - wanted).abs().max() / wanted.abs().max()).item() < 2e-5
