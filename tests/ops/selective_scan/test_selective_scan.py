"""Mamba-1 over ranks against the token-by-token recurrence: outputs, last states and every gradient."""

from __future__ import annotations

import functools
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import EVERY_LAYOUT
from ranks import errors_of
from test_linear_attention import BATCH, Case, cases, slice_of, worst
from torch import Tensor
from worlds import every, simulated_device, virtual_world

import weft
from weft.ops.scan import METHODS
from weft.ops.selective_scan import chunk
from weft.ops.sequence.layout import LAYOUTS, shard_lengths
from weft.world.launch import ProcessWorld

DIM, STATES = 4, 3
WHOLE = ("A", "D", "delta_bias", "initial_state")  # on every rank; the others are cut
LAYERS = {"one group": None, "two groups": 2, "scan": None}  # groups of B and C; the last is without D, z and a bias
networks = pytest.mark.usefixtures("every_network")


def draw_inputs(layer: str, batch: int, tokens: int, states: int) -> dict[str, Tensor]:
    make = torch.Generator().manual_seed(tokens + len(layer))

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=make, dtype=torch.float64)

    groups = () if LAYERS[layer] is None else (LAYERS[layer],)
    found = {"u": draw(batch, tokens, DIM), "delta": draw(batch, tokens, DIM), "A": -draw(DIM, STATES).abs() / 5,
             "B": draw(batch, tokens, *groups, STATES), "C": draw(batch, tokens, *groups, STATES),
             "initial_state": draw(states, DIM, STATES)}  # fmt: skip
    if layer == "scan":
        return {**found, "delta": found["delta"].abs()}
    return {**found, "D": draw(DIM), "z": draw(batch, tokens, DIM), "delta_bias": draw(DIM)}


def selective_reference(x: dict[str, Tensor], lengths: list[int], softplus: bool) -> tuple[Tensor, Tensor]:
    """Token by token, every document on its own."""
    step = x["delta"] + x.get("delta_bias", torch.zeros(DIM))
    step = (1 + step.exp()).log() if softplus else step
    B, C = (one if one.ndim == 4 else one.unsqueeze(2) for one in (x["B"], x["C"]))
    B, C = (one.repeat_interleave(DIM // one.shape[2], 2) for one in (B, C))
    states = x["initial_state"].unflatten(0, (len(B), len(lengths)))
    outs, leaving, t = [], [], 0
    for s, length in enumerate(lengths):
        state = states[:, s]
        for _ in range(length):
            state = (step[:, t, :, None] * x["A"]).exp() * state + (step[:, t] * x["u"][:, t])[..., None] * B[:, t]
            outs.append((state * C[:, t]).sum(-1))
            t += 1
        leaving.append(state)
    y = torch.stack(outs, 1) if outs else x["u"] * 1
    y = y + x["D"] * x["u"] if "D" in x else y
    return y * x["z"] * x["z"].sigmoid() if "z" in x else y, torch.stack(leaving, 1).flatten(0, 1)


@functools.lru_cache(maxsize=32)
def problem(layer: str, case: Case, size: int):
    """Inputs, weights of the loss, and what autograd says of the recurrence on the whole sequence."""
    inputs = draw_inputs(layer, BATCH if case.bounds is None else 1, case.total, case.states)
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    lengths = [case.total] if case.bounds is None else [b - a for a, b in pairwise(case.bounds)]
    y, last = selective_reference(leaves, lengths, layer != "scan")
    make = torch.Generator().manual_seed(size)
    weight, *of_last = (torch.randn(x.shape, generator=make, dtype=torch.float64) for x in (y, *[last] * size))
    loss = (y * weight).sum() + (last * sum(of_last)).sum()
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return leaves, weight, of_last, y.detach(), last.detach(), dict(zip(leaves, found, strict=True))


def run_rank(axis: weft.Axis, layer: str, case: Case, layout: str, method: str, chunk_size: int | None,
             dtype: torch.dtype, with_sequence: bool):  # fmt: skip
    """The worst error of this rank, and its parts of the gradients that are to be summed."""
    leaves, weight, of_last, y, last, grads = problem(layer, case, axis.size)

    def mine(x: Tensor) -> Tensor:
        return slice_of(x, case, layout, axis.rank)

    local = {name: (x.detach().clone() if name in WHOLE else mine(x)).to(dtype).requires_grad_()
             for name, x in leaves.items()}  # fmt: skip
    where = {"cu_seqlens": None if case.bounds is None else torch.tensor(case.bounds), "layout": layout, "group": axis}
    if with_sequence:
        where = {"sequence": weft.sequence(local["u"].shape[1], **where)}
    out, end = weft.selective_scan(
        **local, **where, delta_softplus=layer != "scan", return_last_state=True, method=method, chunk_size=chunk_size
    )
    assert out.dtype == dtype and end.dtype == torch.promote_types(dtype, torch.float32)
    loss = (out * mine(weight)).sum() + (end * of_last[axis.rank]).sum()
    got = dict(zip(local, torch.autograd.grad(loss, list(local.values())), strict=True))
    pairs = [(out.detach(), mine(y)), (end.detach(), last)]
    pairs += [(got[name], mine(grads[name])) for name in got if name not in WHOLE]
    return worst([(a.double(), b.double()) for a, b in pairs]), {n: got[n].double() for n in WHOLE if n in got}


def check(layer: str, case: Case, layout: str, method: str, tolerance: float = 1e-10, chunk_size: int | None = 4,
          dtype: torch.dtype = torch.float64, with_sequence: bool = False) -> None:  # fmt: skip
    def program(axis: weft.Axis):
        return run_rank(axis, layer, case, layout, method, chunk_size, dtype, with_sequence)

    results = virtual_world(len(case.lengths)).run(program).results
    grads = problem(layer, case, len(case.lengths))[-1]
    assert max(error for error, _ in results) <= tolerance
    for name in results[0][1]:
        assert worst([(sum(shares[name] for _, shares in results), grads[name])]) <= tolerance, name


@networks
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layout", EVERY_LAYOUT)
def test_every_case_and_world_size(layout: str, method: str) -> None:
    for number, case in enumerate(every([case for size in (1, 2, 3, 5, 8) for case in cases(size).values()])):
        check(list(LAYERS)[number % 3], case, layout, method, with_sequence=number % 2 == 0)


@networks
@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    cuts=st.none() | st.lists(st.integers(0, 54), max_size=6),
    layer=st.sampled_from(list(LAYERS)),
    layout=st.sampled_from(LAYOUTS),
    chunk_size=st.sampled_from([None, 1, 3, 8]),
)
def test_random_splits_and_documents(lengths, cuts, layer, layout, chunk_size) -> None:
    total = sum(lengths)
    bounds = None if cuts is None else tuple(sorted([0, *(min(cut, total) for cut in cuts), total]))
    check(layer, Case(tuple(lengths), bounds), layout, "auto", chunk_size=chunk_size)


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize("tile", [1, 2000])
def test_backward_in_tiles_and_fp32(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few chunks are worked on at a time."""
    monkeypatch.setattr(chunk, "TILE_BYTES", tile)
    check("two groups", Case((40, 7, 30)), "zigzag", "ring")
    check("one group", Case((40, 7, 30)), "contiguous", "doubling", dtype=torch.float32, tolerance=3e-5)


def on_gloo(axis: weft.Axis, size: int) -> float:
    group = dist.new_group(range(size))
    if axis.rank >= size:
        return 0.0
    here, found = weft.Axis.of(group), 0.0
    for layout in LAYOUTS:
        case = Case(shard_lengths(8 * size + 3, layout, size), (0, 2, 2, 4 * size, 8 * size + 3))
        for method in METHODS:
            error, shares = run_rank(here, "two groups", case, layout, method, 8, torch.float64, False)
            again, _ = run_rank(here, "two groups", case, layout, method, 8, torch.float64, True)
            for name, share in shares.items():
                dist.all_reduce(share, group=group)
                error = max(error, worst([(share, problem("two groups", case, size)[-1][name])]))
            found = max(found, error, again)
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_on_processes(pool: ProcessWorld, size: int) -> None:
    assert max(pool.run(on_gloo, size)) < 1e-10


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_same_inputs_same_bits(layout: str) -> None:
    def program(axis: weft.Axis) -> bool:
        sequence, found = weft.sequence(total=90, layout=layout, cu_seqlens=[0, 17, 17, 90], group=axis), []
        inputs = {name: x.float() for name, x in draw_inputs("two groups", 1, 90, 3).items()}
        for _ in range(3):
            local = {name: (x.clone() if name in WHOLE else weft.shard(x, 1, sequence=sequence)).requires_grad_()
                     for name, x in inputs.items()}  # fmt: skip
            y, last = weft.selective_scan(**local, delta_softplus=True, return_last_state=True, sequence=sequence)
            grads = torch.autograd.grad(y.square().sum() + last.square().sum(), list(local.values()))
            found.append((y.detach(), last.detach(), *grads))
        return all(torch.equal(a, b) for one in found for a, b in zip(one, found[0], strict=True))

    assert all(virtual_world(5).run(program).results)


def test_the_host_never_waits_and_bf16() -> None:
    simulated = simulated_device()

    def program(axis: weft.Axis) -> list[Tensor]:
        inputs = {name: x.float() for name, x in draw_inputs("one group", 1, 66, 1).items()}
        inputs |= {name: inputs[name].bfloat16() for name in ("u", "B", "C", "z")}
        local = {name: x if name in WHOLE else weft.shard(x, 1, group=axis) for name, x in inputs.items()}
        local = {name: x.to("sim").requires_grad_() for name, x in local.items()}
        how = weft.sequence(22, group=axis)
        with simulated.no_host_sync():
            y, last = weft.selective_scan(**local, delta_softplus=True, return_last_state=True, sequence=how)
            (y.float().sum() + last.sum()).backward()
        assert all(x.grad.dtype == x.dtype for x in local.values()) and last.dtype == torch.float32
        return [y.detach().cpu(), weft.shard(inputs["u"], 1, group=axis)]

    found = weft.world.VirtualWorld(3, rules="nccl", device="sim").run(program).results
    got = torch.cat([one[0] for one in found], dim=1)
    inputs = draw_inputs("one group", 1, 66, 1)
    wanted, _ = selective_reference(inputs, [66], True)
    assert got.dtype == torch.bfloat16 and (got - wanted).abs().max() < 0.02 * wanted.abs().max()


@pytest.mark.filterwarnings("ignore")
def test_as_transformers() -> None:
    """Its PyTorch function, which has channels before tokens, on three virtual ranks."""
    module = pytest.importorskip("transformers.models.mamba.modeling_mamba")
    inputs = {name: x.float() for name, x in draw_inputs("one group", 2, 40, 2).items() if name != "initial_state"}
    whole = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    turned = {name: x if name in WHOLE else x.mT for name, x in whole.items()}
    first = [turned.pop(name) for name in ("u", "delta", "A", "B", "C")]
    y, last = module.mamba_selective_scan(*first, **turned, delta_softplus=True, return_last_state=True)
    true = torch.autograd.grad(y.square().sum() + last.sum(), list(whole.values()))

    def program(axis: weft.Axis) -> dict[str, Tensor]:
        local = {name: (x.clone() if name in WHOLE else weft.shard(x, 1, group=axis)).requires_grad_()
                 for name, x in inputs.items()}  # fmt: skip
        out, end = weft.selective_scan(**local, delta_softplus=True, return_last_state=True, group=axis)
        found = torch.autograd.grad(out.square().sum() + end.sum() / axis.size, list(local.values()))
        return {"y": out.detach(), "last": end.detach(), **dict(zip(local, found, strict=True))}

    parts = virtual_world(3).run(program).results
    for name, wanted in {"y": y.mT, "last": last, **dict(zip(whole, true, strict=True))}.items():
        mine = [part[name] for part in parts]
        got = mine[0] if name == "last" else sum(mine) if name in WHOLE else torch.cat(mine, dim=1)
        assert ((got - wanted).abs().max() / wanted.abs().max()).item() < 2e-5, name


U, RATES, OF_B = torch.ones(1, 6, 4), -torch.ones(4, 3), torch.ones(1, 6, 3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"u": U[0]}, "u must be [B, T, D], got [6, 4] (rank 1)"),
        ({"A": -torch.ones(3, 3)}, "A must be [D, N] with D = 4, got [3, 3] (rank 1)"),
        ({"A": torch.ones(4, 3)}, "A is a rate of decay and must not be positive, got 1 (rank 1)"),
        ({"delta": -U}, "time steps must not be negative without delta_softplus, got -1 (rank 1)"),
        ({"B": torch.ones(1, 6, 3, 3)}, "4 channels are not a multiple of 3 groups (rank 1)"),
        ({"C": torch.ones(1, 6, 2)}, "C must be [1, 6, 3], got [1, 6, 2] (rank 1)"),
        ({"initial_state": torch.ones(1, 3, 4)}, "initial_state must be [1, 4, 3], got [1, 3, 4] (rank 1)"),
        ({"chunk_size": 0}, "chunk_size must be at least 1, got 0 (rank 1)"),
        ({"D": torch.ones(4)}, "rank 1 called selective_scan(D=True)"),
    ],
)
def test_a_rank_that_differs_raises_everywhere(changes, words) -> None:
    def program(axis: weft.Axis) -> None:
        right = {"u": U, "delta": U, "A": RATES, "B": OF_B, "C": OF_B}
        weft.selective_scan(**{**right, **(changes if axis.rank == 1 else {})}, group=axis)

    caught = errors_of(program)
    assert len(caught) == 3 and len(set(caught)) == 1 and words in caught[0], caught
