"""Every operation on tensors of the simulated device, through its public name: the same numbers as on the CPU.

No step lets the host wait for the device, forward or backward, and the device reports nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from every_operation import OPERATIONS, Operation, tokens, weights_like
from torch import Tensor
from worlds import move, simulated_device

import weft
from weft.ops.attention.distributed import METHODS as ATTENTION_METHODS
from weft.ops.scan import METHODS as SCAN_METHODS

SIZES = (1, 2, 3)
HEADS, DIM = 6, 8  # heads that 1, 2 and 3 ranks divide
EVEN, UNEVEN = (6, 6, 6), {1: (5,), 2: (5, 3), 3: (5, 0, 4)}  # tokens of each rank
LAYOUTS = ("contiguous", "zigzag")
GATES = (None, "constant", "scalar", "vector")
Shapes = dict[str, tuple[int, ...]]  # of inputs, by name; -1 stands for the tokens of a rank
Case = tuple[Callable[..., tuple[Tensor, ...]], Shapes]


def packed(axis: weft.Axis, lengths: tuple[int, ...]) -> Tensor:
    """Boundaries of three documents, on the host; one of them is empty."""
    total = sum(lengths[: axis.size])
    return torch.tensor([0, total // 3, total // 3, total])


def attend(axis: weft.Axis, lengths: tuple[int, ...], documents: bool = False, **given: Any) -> tuple[Tensor, ...]:
    bounds = packed(axis, lengths) if documents else None
    return weft.attention(**given, causal=True, return_lse=True, cu_seqlens=bounds, group=axis)


def attend_linearly(
    axis: weft.Axis, lengths: tuple[int, ...], g: Tensor | None = None, start: Tensor | None = None,
    documents: bool = False, **given: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    o, final = weft.linear_attention(
        **given, g=None if g is None else -g.abs(), initial_state=start, output_final_state=start is not None,
        cu_seqlens=packed(axis, lengths) if documents else None, group=axis,
    )  # fmt: skip
    return (o,) if final is None else (o, final)


def layers(axis: weft.Axis, lengths: tuple[int, ...], x: Tensor, layout: str, documents: bool) -> tuple[Tensor, ...]:
    """Two layers that are given one `weft.sequence`, and what lies between the whole and the slices."""
    bounds = packed(axis, lengths) if documents else None
    where = weft.sequence(x.shape[1], layout=layout, cu_seqlens=bounds, group=axis)
    x = x + where.positions(x.device)[:, None, None] / 8
    x = x + weft.attention(x, x, x, causal=True, sequence=where)
    o, _ = weft.linear_attention(x, x, x, -x.abs()[..., 0], sequence=where)
    whole = weft.unshard(o, 1, sequence=where)
    return o, whole, weft.shard(whole * 2, 1, sequence=where)


def scan(axis: weft.Axis, lengths: tuple[int, ...], log: Tensor | None = None, **given: Any) -> tuple[Tensor, ...]:
    return (weft.exclusive_scan(**given, log_decay=None if log is None else -log.abs(), group=axis),)


def qkv(kv_heads: int, gate: str | None = None, start: bool = False) -> Shapes:
    shapes = {"q": (1, -1, HEADS, DIM), "k": (1, -1, kv_heads, DIM), "v": (1, -1, kv_heads, DIM)}
    if gate is not None:
        shapes["g"] = {"constant": (HEADS,), "scalar": (1, -1, HEADS), "vector": (1, -1, HEADS, DIM)}[gate]
    return {**shapes, "start": (1, HEADS, DIM, DIM)} if start else shapes


def the_cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for layout in LAYOUTS:
        for method in ATTENTION_METHODS:
            for word, options in {
                "": {}, " documents": {"documents": True}, " window": {"window": (3, 0)},
            }.items():  # fmt: skip
                run = partial(attend, method=method, layout=layout, **options)
                cases[f"attention {method} {layout}{word}"] = run, qkv(HEADS // 2)
        for gate in GATES:
            run = partial(attend_linearly, layout=layout, documents=True)
            cases[f"linear_attention {gate} {layout} documents"] = run, qkv(HEADS, gate)
            for method in SCAN_METHODS:
                run = partial(attend_linearly, method=method, layout=layout)
                cases[f"linear_attention {gate} {method} {layout}"] = run, qkv(HEADS, gate, start=True)
        for documents in (False, True):
            run = partial(layers, layout=layout, documents=documents)
            cases[f"layers {layout}{' documents' * documents}"] = run, {"x": (1, -1, HEADS, DIM)}
    cases["attention backward ring"] = partial(attend, method="gather", backward="ring"), qkv(HEADS // 2)
    cases["attention bf16 on the way"] = partial(attend, method="gather", grad_dtype=torch.bfloat16), qkv(HEADS // 2)
    for method in SCAN_METHODS:
        for reverse in (False, True):
            for kind, decay in {
                "none": {},
                "scalar": {"log": ()},
                "vector": {"log": (4,)},
                "dense": {"transition": (4, 4)},
            }.items():
                run = partial(scan, method=method, reverse=reverse)
                cases[f"exclusive_scan {kind} {method}{' reverse' * reverse}"] = run, {"state": (4, 3), **decay}
    return cases


CASES = the_cases()


def step(axis: weft.Axis, device: str, name: str, lengths: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    run, shapes = CASES[name]
    given = {}
    for word, shape in shapes.items():
        common = word == "start" or (word == "g" and len(shape) == 1)  # every rank has the same
        make = torch.Generator().manual_seed(len(given) + (0 if common else 10 * (axis.rank + 1)))
        local = [lengths[axis.rank] if n < 0 else n for n in shape]
        given[word] = (torch.randn(local, generator=make) / 2).to(dtype)
    return train(lambda *leaves: run(axis, lengths, **dict(zip(given, leaves, strict=True))), [*given.values()], device)


def train(run: Callable[..., tuple[Tensor, ...]], given: list[Tensor], device: str) -> list[Tensor]:
    """Results and gradients of one training step; its inputs are on the device before it begins."""
    leaves = [move(x.detach(), device).requires_grad_() for x in given]
    with simulated_device().no_host_sync() if device == "sim" else nullcontext():
        found = backward(run(*leaves))
    gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    assert all(x.device.type == device for x in (*found, *gradients))
    return [*found, *gradients]


def backward(results: tuple[Tensor, ...]) -> list[Tensor]:
    torch.stack([(weights_like(out) * out.square()).sum() for out in results if out.requires_grad]).sum().backward()
    return [out.detach() for out in results]


def expect_the_same(size: int, program: Callable[[weft.Axis, str], list[Tensor]], bound: float) -> None:
    """On the device as on the CPU: within ``bound`` of the largest number of each tensor."""
    simulated = simulated_device()
    with simulated.collect_reports() as reports:
        world = weft.world.VirtualWorld(size, rules="nccl", device="sim")
        got = world.run(lambda axis: move(program(axis, "sim"), "cpu")).results
    assert reports == []
    wanted = weft.world.VirtualWorld(size).run(lambda axis: program(axis, "cpu")).results
    for mine, true in zip(got, wanted, strict=True):
        for x, y in zip(mine, true, strict=True):
            assert x.dtype == y.dtype and x.shape == y.shape
            if y.numel():
                assert (x - y).abs().max() <= bound * y.abs().max().clamp(min=1e-3), (x, y)


def by_turns(names: Iterable[str], turns: tuple[int, ...] = SIZES) -> list[Any]:
    """Every name with one of the sizes, in turn, and the others where there is time: `make soak`."""
    return [
        pytest.param(name, size, marks=[] if size == turns[(at + at // 3) % len(turns)] else pytest.mark.slow)
        for at, name in enumerate(names)
        for size in SIZES
    ]


@pytest.mark.parametrize(("name", "size"), by_turns(OPERATIONS))
def test_every_operation(name: str, size: int) -> None:
    run: Operation = OPERATIONS[name]

    def program(axis: weft.Axis, device: str) -> list[Tensor]:
        return train(lambda x: (run(axis, x),), [tokens(axis.rank)], device)

    expect_the_same(size, program, 1e-5)


@pytest.mark.parametrize(("name", "size"), by_turns(CASES, (2, 3)))
def test_every_combination(name: str, size: int) -> None:
    """Uneven ranks, of three one without tokens, in fp32."""
    expect_the_same(size, lambda axis, device: step(axis, device, name, UNEVEN[size], torch.float32), 2e-5)


SOME = [
    pytest.param(name, marks=[] if at % 8 == 3 else pytest.mark.slow) for at, name in enumerate(CASES)
]  # `make soak` takes all


@pytest.mark.parametrize("name", SOME)
def test_half_precision(name: str) -> None:
    expect_the_same(3, lambda axis, device: step(axis, device, name, EVEN, torch.bfloat16), 3e-2)


@pytest.mark.parametrize(("name", "size"), by_turns(OPERATIONS))
def test_arithmetic_is_outside_autocast(name: str, size: int) -> None:
    """The dtype of the inputs decides: not a bit differs, wherever an autocast of the device is on."""
    run: Operation = OPERATIONS[name]
    simulated_device()

    def once(axis: weft.Axis, forward: bool, backward: bool) -> list[Tensor]:
        given = tokens(axis.rank).detach()
        leaves = [x.to("sim").requires_grad_() for x in (given, given[0, 1].mT @ given[0, 2] / DIM)]
        with torch.autocast("sim", torch.bfloat16, enabled=forward):
            if name.startswith("exclusive_scan dense"):  # its decay would be computed under autocast there
                state = leaves[0][0, 0].mT
                out = weft.exclusive_scan(state, transition=leaves[1], reverse="reverse" in name, group=axis)
            else:
                out = run(axis, leaves[0])
        with torch.autocast("sim", torch.bfloat16, enabled=backward):
            (weights_like(out) * out.square()).sum().backward()
        return [out.detach().cpu(), *(leaf.grad.cpu() for leaf in leaves if leaf.grad is not None)]

    def program(axis: weft.Axis) -> bool:
        wanted = once(axis, False, False)
        found = [once(axis, *on) for on in ((True, False), (False, True), (True, True))]
        return all(x.dtype == y.dtype and torch.equal(x, y) for one in found for x, y in zip(one, wanted, strict=True))

    assert all(weft.world.VirtualWorld(size, rules="nccl", device="sim").run(program).results)
