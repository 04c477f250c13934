"""On real Gloo processes, against fla's naive operations, on tensors of a simulated device, in other dtypes."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from delta_recurrence import delta_reference
from ranks import errors_of
from torch import Tensor
from torch.nn.functional import normalize
from worlds import simulated_device, virtual_world

import weft
from weft.ops.scan import METHODS
from weft.world.launch import ProcessWorld


def inputs(total: int, gate: str, dtype: torch.dtype = torch.float64, batch: int = 1) -> list[Tensor]:
    """q, k, v, beta and g, if there is one; two heads, four value heads."""
    make = torch.Generator().manual_seed(total)

    def draw(*shape: int) -> Tensor:
        return torch.randn(batch, total, *shape, generator=make, dtype=torch.float64)

    q, k, v, beta = draw(2, 4), normalize(draw(2, 4), dim=-1), draw(4, 3), 2 * draw(4).sigmoid()
    g = {"none": [], "scalar": [-0.05 * draw(4).abs()], "vector": [-0.05 * draw(4, 4).abs()]}[gate]
    return [x.to(dtype) for x in (q, k, v, beta, *g)]


def every_method(axis: weft.Axis, size: int) -> float:
    group = dist.new_group(range(size))
    if axis.rank >= size:
        return 0.0
    total, worst = 8 * size + 3, 0.0
    start = torch.zeros(1, 4, 4, 3, dtype=torch.float64)
    for gate, layout in (("none", "zigzag"), ("scalar", "contiguous"), ("vector", "zigzag"), ("scalar", "balanced")):
        for bounds in (None, [0, 2, 2, total // 2, total]):
            tensors = inputs(total, gate)
            lengths = [total] if bounds is None else [b - a for a, b in itertools.pairwise(bounds)]
            leaves = [t.clone().requires_grad_() for t in tensors]
            o, state = delta_reference(
                *leaves[:4], leaves[4] if len(leaves) > 4 else None, 0.5, start.repeat(len(lengths), 1, 1, 1), lengths
            )
            true = torch.autograd.grad(o.square().sum() + state.sum() * size, leaves)
            for method in METHODS:
                where = {"layout": layout, "cu_seqlens": bounds, "group": group}
                local = [weft.shard(t, 1, **where).requires_grad_() for t in tensors]
                out, final = weft.delta_rule(
                    *local, scale=0.5, output_final_state=True, method=method, chunk_size=8, **where
                )
                got = torch.autograd.grad(out.square().sum() + final.sum(), local)
                wanted = [weft.shard(t, 1, **where) for t in (o.detach(), *true)]
                for a, b in [*zip([out, *got], wanted, strict=True), (final, state)]:
                    worst = max(worst, ((a - b).abs().max() / b.abs().max()).item())
    return worst


@pytest.mark.parametrize("size", [2, 4])
def test_every_method_layout_and_packing(pool: ProcessWorld, size: int) -> None:
    assert max(pool.run(every_method, size)) < 1e-10


def repeat(axis: weft.Axis, gate: str, layout: str, method: str, bounds: list[int] | None) -> bool:
    sequence = weft.sequence(total=90, layout=layout, cu_seqlens=bounds, group=axis)
    tensors = [weft.shard(t, 1, sequence=sequence) for t in inputs(90, gate, torch.float32)]
    weight = torch.ones(12, 4)
    found = []
    for _ in range(3):
        local = [t.clone().requires_grad_() for t in tensors]
        v, _ = weft.short_conv(local[2].flatten(2), weight, activation="silu", sequence=sequence)
        o, _ = weft.delta_rule(*local[:2], v.view_as(local[2]), *local[3:], method=method, sequence=sequence)
        found.append((o.detach(), *torch.autograd.grad(o.square().sum(), local)))
    return all(torch.equal(a, b) for one in found for a, b in zip(one, found[0], strict=True))


@pytest.mark.parametrize(("gate", "layout", "method", "bounds"), [
    ("vector", "zigzag", "auto", None),
    ("scalar", "balanced", "tree", [0, 41, 90]),
    ("none", "contiguous", "ring", None),
    ("scalar", "contiguous", "auto", [0, 30, 60, 90]),  # on two ranks each: the second one waits
])  # fmt: skip
def test_same_inputs_same_bits(pool: ProcessWorld, gate: str, layout: str, method: str, bounds: list[int]) -> None:
    assert all(pool.run(repeat, gate, layout, method, bounds))


@pytest.mark.usefixtures("every_network")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("gate", ["none", "scalar", "vector"])
def test_as_flash_linear_attention(gate: str) -> None:
    """Its naive operations, forward and backward, in one process and over three virtual ranks; B = 2."""
    plain = pytest.importorskip("fla.ops.delta_rule.naive")
    gated = pytest.importorskip("fla.ops.gated_delta_rule.naive")
    kda = pytest.importorskip("fla.ops.kda.naive")
    tensors = inputs(64, gate, torch.float32, batch=2)
    tensors[2:] = [t[:, :, :2] for t in tensors[2:]]  # it wants as many heads of values
    q, k, v, beta, *g = whole = [t.clone().requires_grad_() for t in tensors]
    if gate == "none":
        o = plain.delta_rule_recurrence(*(t.transpose(1, 2) for t in whole))[0].transpose(1, 2)
    elif gate == "scalar":
        o, _ = gated.naive_recurrent_gated_delta_rule(q, k, v, beta, g[0])
    else:
        o, _ = kda.naive_recurrent_kda(q, k, v, g[0], beta)
    true = torch.autograd.grad(o.square().sum(), whole)

    def program(axis: weft.Axis) -> list[Tensor]:
        local = [weft.shard(t, 1, group=axis).requires_grad_() for t in tensors]
        out, _ = weft.delta_rule(*local, group=axis, chunk_size=16)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), local)]

    for size in (1, 3):
        slices = virtual_world(size).run(program).results
        for index, wanted in enumerate([o, *true]):
            got = torch.cat([one[index] for one in slices], dim=1)
            assert ((got - wanted).abs().max() / wanted.abs().max()).item() < 2e-5


@pytest.mark.parametrize("gate", ["none", "scalar", "vector"])
def test_the_host_never_waits_for_the_device(gate: str) -> None:
    simulated = simulated_device()
    sequence = [0, 7, 30, 30, 66]

    def program(axis: weft.Axis) -> tuple[int, float]:
        tensors = inputs(66, gate)
        start = torch.ones(4, 4, 4, 3, dtype=torch.float64)
        wanted = delta_reference(
            *tensors[:4], tensors[4] if len(tensors) > 4 else None, 0.5, start, [7, 23, 0, 36]
        )[0]  # fmt: skip
        local = [weft.shard(t, 1, group=axis).to("sim").requires_grad_() for t in tensors]
        how = weft.sequence(22, cu_seqlens=sequence, group=axis)
        start, weight = start.to("sim"), torch.ones(12, 3, dtype=torch.float64).to("sim")
        with simulated.no_host_sync():
            o, final = weft.delta_rule(
                *local, scale=0.5, initial_state=start, output_final_state=True, sequence=how, chunk_size=8
            )
            y, _ = weft.short_conv(o.flatten(2), weight, activation="silu", output_final_state=True, sequence=how)
            (y.sum() + final.sum()).backward()
        error = (o.detach().cpu() - weft.shard(wanted, 1, group=axis)).abs().max().item()
        return sum(t.grad is None for t in local), error

    for missing, error in weft.world.VirtualWorld(3, rules="nccl", device="sim").run(program).results:
        assert missing == 0 and error < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gate", ["scalar", "vector"])
def test_half_precision_with_fp32_gates_also_under_autocast(gate: str, dtype: torch.dtype) -> None:
    q, k, v, beta, g = inputs(96, gate)
    low = [t.to(dtype) for t in (q, k, v)]
    others = [t.float() for t in (beta, g)]
    exact, _ = delta_reference(*(t.double() for t in (*low, *others)), 0.5, torch.zeros(1, 4, 4, 3).double(), [96])

    def program(axis: weft.Axis, autocast: bool) -> tuple[Tensor, Tensor]:
        local = [weft.shard(t, 1, group=axis).requires_grad_() for t in (*low, *others)]
        with torch.autocast("cpu", dtype, enabled=autocast):
            o, state = weft.delta_rule(*local, scale=0.5, output_final_state=True, group=axis)
        o.float().square().sum().backward()
        assert o.dtype == local[0].grad.dtype == dtype and local[4].grad.dtype == state.dtype == torch.float32
        return o.detach(), local[4].grad

    single = program(weft.Axis.of(None), False)[0]
    plain, cast = (weft.world.VirtualWorld(3).run(lambda axis, a=a: program(axis, a)).results for a in (False, True))
    together = torch.cat([o for o, _ in plain], dim=1)
    assert (together - exact).abs().max() <= 1.05 * (single - exact).abs().max()
    assert all(torch.equal(a, b) for one, two in zip(plain, cast, strict=True) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("gate", ["scalar", "vector"])
def test_one_strong_gate_costs_its_neighbours_nothing(gate: str) -> None:
    """-320 in one token (of a vector in one channel): in fp32 the rest of the chunk is as exact as without it."""
    tensors = inputs(64, gate, torch.float32)
    (tensors[4] if gate == "scalar" else tensors[4][..., 1])[:, 20] = -320.0
    start = torch.zeros(1, 4, 4, 3)
    leaves = [t.double().requires_grad_() for t in tensors]
    true, _ = delta_reference(*leaves, 0.5, start.double(), [64])
    wanted = [true, *torch.autograd.grad(true.square().sum(), leaves)]
    local = [t.clone().requires_grad_() for t in tensors]
    o, _ = weft.delta_rule(*local, scale=0.5)
    for got, right in zip([o, *torch.autograd.grad(o.square().sum(), local)], wanted, strict=True):
        assert ((got - right).abs().max() / right.abs().max()).item() < 2e-6


def test_nothing_travels_between_documents() -> None:
    def sent(bounds: list[int], method: str) -> list[int]:
        def program(axis: weft.Axis) -> int:
            local = [weft.shard(t, 1, group=axis).requires_grad_() for t in inputs(24, "scalar")]
            sequence = weft.sequence(8, cu_seqlens=bounds, group=axis)
            with weft.record() as ledger:
                weft.delta_rule(*local, method=method, sequence=sequence)[0].sum().backward()
            return ledger.bytes_sent

        return weft.world.VirtualWorld(3).run(program).results

    state = 4 * 4 * 3 * 8
    assert sent([0, 8, 16, 24], "ring") == [0, 0, 0]
    for method in ("ring", "pipeline"):
        assert sent([0, 24], method) == [state, 2 * state, state]  # states alone, each way
    assert sent([0, 10, 24], "gather")[0] == state + 4 * 4 * 4 * 8  # a map to the one rank where the document goes on


Q, V, BETA = torch.ones(1, 6, 2, 4), torch.ones(1, 6, 4, 3), torch.ones(1, 6, 4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"beta": torch.ones(1, 6, 2)}, "beta must be [B, T, HV] = [1, 6, 4], got [1, 6, 2] (rank 1)"),
        ({"g": torch.zeros(1, 6, 2)}, "g [1, 6, 2] is neither [B, T, HV] = [1, 6, 4] nor"),
        ({"g": torch.full((1, 6, 4), 0.5)}, "must not be positive, got 0.5 (rank 1)"),
        ({"initial_state": torch.ones(1, 4, 3, 4)}, "initial_state must be [1, 4, 4, 3], got [1, 4, 3, 4] (rank 1)"),
        ({"chunk_size": 48}, "chunk_size must be a power of two, got 48 (rank 1)"),
        ({"method": "tree"}, "rank 1 called delta_rule(method=tree)"),
        ({"cu_seqlens": torch.tensor([0, 18])}, "rank 1 called delta_rule(cu_seqlens=(0, 18))"),
    ],
)
def test_a_rank_that_differs_raises_everywhere(changes, words) -> None:
    def program(axis: weft.Axis) -> None:
        right = {"q": Q, "k": Q, "v": V, "beta": BETA, "method": "ring"}
        weft.delta_rule(**{**right, **(changes if axis.rank == 1 else {})}, group=axis)

    caught = errors_of(program)
    assert len(caught) == 3 and len(set(caught)) == 1 and words in caught[0], caught


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, r"needs CUDA tensors \(or TRITON_INTERPRET=1, set before the start\), got cpu \(rank 0\)"),
        ({"device": "meta", "dtype": torch.float64}, r"takes bfloat16, float16 or float32, got q, k, v in float64"),
        ({"device": "meta", "chunk_size": 128}, r"takes chunk_size up to 64, got 128"),
        ({"device": "meta", "beta": torch.float64}, r"takes bfloat16, float16 or float32, got beta in float64"),
    ],
)
def test_what_triton_does_not_take_is_said(changes, words) -> None:
    q, v, beta = (x.to(changes.get("device", "cpu"), changes.get("dtype", torch.float32)) for x in (Q, V, BETA))
    beta = beta.to(changes.get("beta", beta.dtype))
    with pytest.raises(ValueError, match=rf"delta_rule: backend 'triton' {words}.*; backend='torch' takes it"):
        weft.delta_rule(q, q, v, beta, backend="triton", chunk_size=changes.get("chunk_size"))
