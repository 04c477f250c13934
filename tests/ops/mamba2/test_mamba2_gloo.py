"""On real Gloo processes, against transformers' function, on tensors of a simulated device, in other dtypes."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from ranks import errors_of
from ssm_recurrence import ssm_reference
from test_mamba2 import WHOLE, draw_inputs
from torch import Tensor
from worlds import simulated_device, virtual_world

import weft
from weft.ops.scan import METHODS
from weft.world.launch import ProcessWorld

NAMES = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states")


def cut(tensors: dict[str, Tensor], group: object, layout: str = "contiguous") -> dict[str, Tensor]:
    """This rank's part of each, as leaves."""
    return {
        name: (x.clone() if name in WHOLE else weft.shard(x, 1, layout=layout, group=group)).requires_grad_()
        for name, x in tensors.items()
    }


def every_method(axis: weft.Axis, size: int) -> float:
    group = dist.new_group(range(size))
    if axis.rank >= size:
        return 0.0
    total, worst = 8 * size + 3, 0.0
    for layout, bounds in itertools.product(("contiguous", "zigzag"), (None, [0, 2, 2, total // 2, total])):
        lengths = [total] if bounds is None else [b - a for a, b in itertools.pairwise(bounds)]
        tensors = draw_inputs(1, total, len(lengths), "full")
        leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
        y, state = ssm_reference(*(leaves[name] for name in NAMES), lengths, softplus=True)
        true = torch.autograd.grad(y.square().sum() + state.sum() * size, list(leaves.values()))
        for method in METHODS:
            local = cut(tensors, group, layout)
            out, final = weft.mamba2(
                **local, dt_softplus=True, return_final_states=True, layout=layout, method=method, group=group,
                chunk_size=8, cu_seqlens=None if bounds is None else torch.tensor(bounds),
            )  # fmt: skip
            found = torch.autograd.grad(out.square().sum() + final.sum(), list(local.values()))
            got = dict(zip(local, found, strict=True))
            for name in WHOLE:
                dist.all_reduce(got[name], group=group)
            wanted = {name: grad if name in WHOLE else weft.shard(grad, 1, layout=layout, group=group)
                      for name, grad in zip(leaves, true, strict=True)}  # fmt: skip
            pairs = [(got[name], wanted[name]) for name in NAMES] + [(final, state)]
            pairs.append((out, weft.shard(y.detach(), 1, layout=layout, group=group)))
            for a, b in pairs:
                worst = max(worst, ((a - b).abs().max() / b.abs().max()).item())
    return worst


@pytest.mark.parametrize("size", [2, 4])
def test_every_method_layout_and_packing(pool: ProcessWorld, size: int) -> None:
    assert max(pool.run(every_method, size)) < 1e-10


def repeat(axis: weft.Axis) -> bool:
    tensors = {name: x.float() for name, x in draw_inputs(2, 90, 2, "full").items()}
    found = []
    for _ in range(3):
        local = cut(tensors, axis, "zigzag")
        y, final = weft.mamba2(**local, dt_softplus=True, return_final_states=True, layout="zigzag", group=axis)
        loss = y.square().sum() + final.square().sum()
        found.append((y.detach(), final.detach(), *torch.autograd.grad(loss, list(local.values()))))
    return all(torch.equal(a, b) for one in found for a, b in zip(one, found[0], strict=True))


def test_same_inputs_same_bits(pool: ProcessWorld) -> None:
    assert all(pool.run(repeat))


@pytest.mark.usefixtures("every_network")
@pytest.mark.filterwarnings("ignore")
def test_as_transformers() -> None:
    """Its PyTorch function, forward and backward, in one process and over three virtual ranks; B = 2."""
    module = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    tensors = {name: x.float() for name, x in draw_inputs(2, 50, 2, "full").items()}
    del tensors["z"]
    options = {"dt_softplus": True, "dt_limit": (0.1, 2.0), "return_final_states": True}
    whole = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    arguments = [whole[name] for name in ("x", "dt", "A", "B", "C")]
    extra = {name: whole[name] for name in ("D", "dt_bias", "initial_states")}
    y, state = module.mamba2_chunk_scan(*arguments, 16, **extra, **options)
    true = dict(zip(whole, torch.autograd.grad(y.square().sum() + state.sum(), list(whole.values())), strict=True))

    def program(axis: weft.Axis) -> dict[str, Tensor]:
        local = cut(tensors, axis)
        out, final = weft.mamba2(**local, **options, group=axis, chunk_size=16)
        loss = out.square().sum() + final.sum() / axis.size
        found = torch.autograd.grad(loss, list(local.values()))
        return {"y": out.detach(), "state": final.detach(), **dict(zip(local, found, strict=True))}

    for size in (1, 3):
        parts = virtual_world(size).run(program).results
        for name, wanted in {"y": y, "state": state, **true}.items():
            mine = [part[name] for part in parts]
            got = mine[0] if name == "state" else sum(mine) if name in WHOLE else torch.cat(mine, dim=1)
            assert ((got - wanted).abs().max() / wanted.abs().max()).item() < 2e-5, name


def test_the_host_never_waits_for_the_device() -> None:
    simulated = simulated_device()

    def program(axis: weft.Axis) -> tuple[int, float]:
        tensors = draw_inputs(1, 66, 4, "full")
        wanted, _ = ssm_reference(*(tensors[name] for name in NAMES), [7, 23, 0, 36], softplus=True)
        local = {name: x.detach().to("sim").requires_grad_() for name, x in cut(tensors, axis).items()}
        how = weft.sequence(22, cu_seqlens=[0, 7, 30, 30, 66], group=axis)
        with simulated.no_host_sync():
            y, final = weft.mamba2(**local, dt_softplus=True, return_final_states=True, sequence=how, chunk_size=8)
            (y.sum() + final.sum()).backward()
        error = (y.detach().cpu() - weft.shard(wanted, 1, group=axis)).abs().max().item()
        return sum(x.grad is None for x in local.values()), error

    for missing, error in weft.world.VirtualWorld(3, rules="nccl", device="sim").run(program).results:
        assert missing == 0 and error < 1e-12


def test_bf16_with_fp32_steps_and_rates_also_under_autocast() -> None:
    low = ("x", "B", "C", "z")
    tensors = {
        name: x.bfloat16() if name in low else x.float() for name, x in draw_inputs(1, 96, 1, "full").items()
    }  # fmt: skip
    exact, _ = ssm_reference(*(tensors[name].double() for name in NAMES), [96], softplus=True)

    def program(axis: weft.Axis, autocast: bool) -> list[Tensor]:
        local = cut(tensors, axis)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y, state = weft.mamba2(**local, dt_softplus=True, return_final_states=True, group=axis)
        y.float().square().sum().backward()
        assert y.dtype == torch.bfloat16 and state.dtype == torch.float32
        assert all(x.grad.dtype == x.dtype for x in local.values())
        return [y.detach(), *(x.grad for x in local.values())]

    single = program(weft.Axis.of(None), False)[0]
    plain, cast = (weft.world.VirtualWorld(3).run(lambda axis, a=a: program(axis, a)).results for a in (False, True))
    together = torch.cat([one[0] for one in plain], dim=1)
    assert (single - exact).abs().max() < 0.02 * exact.abs().max()
    assert (together - exact).abs().max() <= 1.05 * (single - exact).abs().max()
    assert all(torch.equal(a, b) for one, two in zip(plain, cast, strict=True) for a, b in zip(one, two, strict=True))


def test_nothing_travels_between_documents() -> None:
    def sent(bounds: list[int]) -> list[int]:
        def program(axis: weft.Axis) -> int:
            tensors = draw_inputs(1, 24, 1, "scan")
            del tensors["initial_states"]
            sequence = weft.sequence(8, cu_seqlens=bounds, group=axis)
            with weft.record() as ledger:
                weft.mamba2(**cut(tensors, axis), method="ring", sequence=sequence)[0].sum().backward()
            return ledger.bytes_sent

        return weft.world.VirtualWorld(3).run(program).results

    state = 4 * 3 * 2 * 8
    assert sent([0, 8, 16, 24]) == [0, 0, 0]
    assert sent([0, 24]) == [state, 2 * state, state]  # states alone, each way


X, DT, B = torch.ones(1, 6, 4, 3), torch.ones(1, 6, 4), torch.ones(1, 6, 2, 5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x": X[0]}, "x must be [B, T, H, P], got [6, 4, 3] (rank 1)"),
        ({"dt": torch.ones(1, 6, 2)}, "dt must be [B, T, H] = [1, 6, 4], got [1, 6, 2] (rank 1)"),
        ({"B": torch.ones(1, 5, 2, 5)}, "B [1, 5, 2, 5] must have the batch and length of x [1, 6, 4, 3] (rank 1)"),
        ({"B": torch.ones(1, 6, 3, 5)}, "4 heads are not a multiple of 3 groups (rank 1)"),
        ({"C": torch.ones(1, 6, 2, 4)}, "C must be [B, T, G, N] = [1, 6, 2, 5], got [1, 6, 2, 4] (rank 1)"),
        ({"A": torch.ones(4)}, "A is a rate of decay and must not be positive, got 1 (rank 1)"),
        ({"D": torch.ones(3)}, "D must be [H] or [H, P] = [4] or [4, 3], got [3] (rank 1)"),
        ({"dt_limit": (1.0, 0.5)}, "dt_limit must be two numbers that rise from 0 or more, got (1.0, 0.5) (rank 1)"),
        ({"initial_states": torch.ones(1, 4, 5, 3)}, "initial_states must be [docs, H, P, N] = [1, 4, 3, 5], got"),
        ({"chunk_size": 48}, "chunk_size must be a power of two, got 48 (rank 1)"),
        ({"backend": "triton"}, "backend 'triton' needs CUDA tensors"),
        ({"method": "tree"}, "rank 1 called mamba2(method=tree)"),
        ({"D": torch.ones(4)}, "rank 1 called mamba2(D=(4,))"),
        ({"dt_softplus": True}, "rank 1 called mamba2(dt_softplus=True)"),
        ({"x": X[..., :2]}, "rank 1 called mamba2(x=(1, 4, 2))"),
    ],
)
def test_a_rank_that_differs_raises_everywhere(changes, words) -> None:
    def program(axis: weft.Axis) -> None:
        right = {"x": X, "dt": DT, "A": -torch.ones(4), "B": B, "C": B, "method": "ring"}
        weft.mamba2(**{**right, **(changes if axis.rank == 1 else {})}, group=axis)

    caught = errors_of(program)
    assert len(caught) == 3 and len(set(caught)) == 1 and words in caught[0], caught
