"""Every operation over a sequence whose chunks are dealt to ranks, against one process: outputs and gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import errors_of
from torch import Tensor
from torch.nn.functional import normalize
from worlds import current_rules, virtual_world

import weft
from weft.comm.wire import SoloWire
from weft.errors import DisagreementError
from weft.ops.attention.plan import count, plan_attention
from weft.ops.sequence.deal import Deal
from weft.ops.sequence.layout import shard_runs
from weft.ops.sequence.runs import join_chunks, lengths_of
from weft.world.launch import ProcessWorld

HEADS, DIM = 4, 3
Tensors = dict[str, Tensor]


def convolve(x: Tensors, **where: Any) -> Tensor:
    weight = torch.linspace(-1, 1, HEADS * DIM * 4, dtype=x["q"].dtype, device=x["q"].device).view(HEADS * DIM, 4)
    return weft.short_conv(x["q"].flatten(2), weight, activation="silu", **where)[0].view_as(x["q"])


def select(x: Tensors, **where: Any) -> Tensor:
    rates = -torch.linspace(0.1, 0.5, HEADS * DIM * DIM, dtype=x["q"].dtype).view(HEADS * DIM, DIM)
    B, C = x["q"][:, :, 0], x["k"][:, :, 0]
    return weft.selective_scan(x["v"].flatten(2), x["k"].flatten(2).abs(), rates, B, C, **where)[0].view_as(x["v"])


def mamba(x: Tensors, **where: Any) -> Tensor:
    rates = -torch.linspace(0.1, 0.5, HEADS, dtype=x["q"].dtype)
    return weft.mamba2(x["v"], x["g"], rates, x["q"], x["k"], dt_softplus=True, **where)[0]


def delta(x: Tensors, **where: Any) -> Tensor:
    return weft.delta_rule(x["q"], normalize(x["k"], dim=-1), x["v"], x["g"].sigmoid(), -x["g"].abs() / 9, **where)[0]


def linear(x: Tensors, **where: Any) -> Tensor:
    return weft.linear_attention(x["q"], x["k"], x["v"], -x["g"].abs() / 9, **where)[0]


def attend(x: Tensors, method: str, window: tuple[int, int] | None = None, causal: bool = True, **where: Any) -> Tensor:
    return weft.attention(x["q"], x["k"], x["v"], causal=causal, window=window, method=method, **where)


OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "gather": partial(attend, method="gather"),
    "ring": partial(attend, method="ring"),
    "auto, window": partial(attend, method="auto", window=(9, 0)),
    "gather, all see all": partial(attend, method="gather", causal=False),
    "linear_attention": linear,
    "delta_rule": delta,
    "short_conv": convolve,
    "mamba2": mamba,
    "selective_scan": select,
}


def draw(batch: int, total: int) -> Tensors:
    make = torch.Generator().manual_seed(total)
    shape = (batch, total, HEADS, DIM)
    x = {name: torch.randn(shape, generator=make, dtype=torch.float64) for name in ("q", "k", "v", "weight")}
    return {**x, "g": torch.randn(shape[:3], generator=make, dtype=torch.float64)}


def cut_documents(total: int) -> tuple[int, ...]:
    """A long one, an empty one, many short ones."""
    return (0, total // 2, total // 2, *range(total // 2 + 3, total, 7), total)


def gradients(operation: Callable[..., Tensor], x: Tensors, **where: Any) -> list[Tensor]:
    """The result and the gradients of q, k, v and g, zero where one is not used."""
    leaves = {name: x[name].detach().clone().requires_grad_() for name in ("q", "k", "v", "g")}
    out = operation(leaves, **where)
    wanted = list(leaves.values())
    found = torch.autograd.grad((out * x["weight"]).sum(), wanted, allow_unused=True, materialize_grads=True)
    return [out.detach(), *found]


def how_given(kind: str, total: int, bounds: tuple[int, ...] | None, axis: weft.Axis) -> dict[str, Any]:
    """The arguments of an operation: the layout by its name, or a sequence with a deal of its own."""
    if kind == "name":
        return {"layout": "balanced", "cu_seqlens": bounds, "group": axis}
    if kind == "backwards":  # a run for each rank, the last one's first
        cuts = tuple(total * number // axis.size for number in range(axis.size + 1))
        runs = join_chunks(Deal(cuts, tuple(reversed(range(axis.size))), 1.0), axis.size)
        return {"sequence": weft.Sequence(axis, "balanced", lengths_of(runs, axis.size), bounds, runs)}
    if kind == "scattered":  # as many runs as there are chunks
        cuts = tuple(total * number // (6 * axis.size) for number in range(6 * axis.size + 1))
        runs = join_chunks(Deal(cuts, tuple(n % axis.size for n in range(6 * axis.size)), 1.0), axis.size)
        return {"sequence": weft.Sequence(axis, "balanced", lengths_of(runs, axis.size), bounds, runs)}
    mask = weft.Mask.full([0, total // 3, total]) if kind == "mask" else None
    chunks = 3 if kind == "chunks" else None
    made = weft.sequence(
        total=total, layout="balanced", cu_seqlens=bounds, chunks_per_rank=chunks, mask=mask, group=axis
    )
    return {"sequence": made}


def worst_on_rank(axis: weft.Axis, name: str, total: int, packed: bool, kind: str) -> float:
    """The largest difference of this rank's result and gradients from those of one process."""
    whole, bounds = draw(1 if packed else 2, total), cut_documents(total) if packed else None
    wanted = gradients(OPERATIONS[name], whole, cu_seqlens=bounds, group=weft.Axis.over(SoloWire()))
    where = how_given(kind, total, bounds, axis)
    mine = {key: weft.shard(x, 1, **where) for key, x in whole.items()}
    got = gradients(OPERATIONS[name], mine, **where)
    assert torch.equal(weft.unshard(mine["q"], 1, **where), whole["q"])
    pairs = [(one, weft.shard(x, 1, **where)) for one, x in zip(got, wanted, strict=True)]
    return max(((a - b).abs().max().item() if a.numel() else 0.0) for a, b in pairs)


def check(size: int, *case: Any) -> None:
    errors = virtual_world(size).run(lambda axis: worst_on_rank(axis, *case)).results
    assert max(errors) < 1e-10, (size, case, errors)


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation(name: str, packed: bool) -> None:
    for kind in ("name", "scattered") if current_rules() == "ideal" else ("name",):
        check(3, name, 131, packed, kind)


@pytest.mark.slow
@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_size_and_total(name: str, size: int) -> None:
    for total in (0, 1, size - 1, size, 7 * size + 3, 8 * size, 70 * size + 1):
        for packed in (False, True):
            for kind in ("name", "chunks", "mask", "scattered"):
                check(size, name, total, packed, kind)


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize("kind", ["chunks", "mask"])
@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_sizes_and_deals_of_ones_own(size: int, kind: str) -> None:
    for number, name in enumerate(OPERATIONS):
        check(size, name, (70 * size + 1, 4 * size + 3, size - 1)[number % 3], number % 2 == 0, kind)


@pytest.mark.usefixtures("every_network")
def test_ulysses_puts_slices_in_order() -> None:
    for kind in ("name", "scattered", "backwards"):

        def program(axis: weft.Axis) -> float:
            whole, where = draw(1, 301), how_given(kind, 301, cut_documents(301), axis)  # noqa: B023
            alone = {"cu_seqlens": cut_documents(301), "group": weft.Axis.over(SoloWire())}
            wanted = gradients(OPERATIONS["gather"], whole, **alone)
            mine = {key: weft.shard(x, 1, **where) for key, x in whole.items()}
            got = gradients(partial(attend, method="ulysses"), mine, **where)
            return max((a - weft.shard(b, 1, **where)).abs().sum() for a, b in zip(got, wanted, strict=True)).item()

        assert max(virtual_world(4).run(program).results) < 1e-10


@pytest.mark.usefixtures("every_network")
def test_predictions_that_are_wrong_change_nothing() -> None:
    """Totals change from call to call, so that the ranks' lengths of the last call say nothing about this one."""

    def program(axis: weft.Axis) -> float:
        cases = [(name, total) for total in (80, 131, 95, 131) for name in ("gather", "linear_attention")]
        return max(worst_on_rank(axis, *case, packed, "name") for case in cases for packed in (False, True))

    assert max(virtual_world(3).run(program).results) < 1e-10


def test_only_keys_that_are_seen_travel() -> None:
    size, total = 4, 403
    bounds = cut_documents(total)
    runs = shard_runs(total, "balanced", size, bounds)
    plan = plan_attention(runs, lengths_of(runs, size), bounds, True, (-1, -1))
    least = [sum(count(plan.visible_to(owner, rank)) for owner in range(size)) for rank in range(size)]
    starts = {run.offset: max(start for start in bounds if start <= run.offset) for run in runs}
    for rank in range(size):  # by hand: what a rank's documents have before its tokens, without its own
        mine = {at for run in runs if run.rank == rank for at in range(run.offset, run.offset + run.length)}
        seen = {at for run in runs if run.rank == rank for at in range(starts[run.offset], run.offset)}
        assert len(seen - mine) == least[rank]

    def program(axis: weft.Axis) -> int:
        sequence = weft.sequence(total=total, layout="balanced", cu_seqlens=bounds, group=axis)
        x = torch.randn(1, sequence.length, 2, 4)
        with weft.record() as ledger:
            weft.attention(x, x, x, causal=True, method="gather", sequence=sequence)
        return ledger.bytes_received

    assert virtual_world(size).run(program).results == [2 * 2 * 4 * 4 * tokens for tokens in least]


@pytest.mark.usefixtures("every_network")
def test_positions_are_within_documents() -> None:
    total, bounds = 90, cut_documents(90)
    within = torch.cat([torch.arange(b - a) for a, b in pairwise(bounds)])

    def program(axis: weft.Axis) -> bool:
        sequence = weft.sequence(total=total, layout="balanced", cu_seqlens=bounds, group=axis)
        return torch.equal(sequence.positions(), weft.shard(within, 0, sequence=sequence))

    assert all(virtual_world(4).run(program).results)


@pytest.mark.usefixtures("every_network")
def test_lengths_that_were_not_dealt_are_refused_on_all_ranks() -> None:
    def program(axis: weft.Axis) -> object:
        x = torch.ones(1, (30, 31, 29)[axis.rank], 2, 2)
        return calls[name](x, axis)

    calls: dict[str, Callable[[Tensor, weft.Axis], object]] = {
        "attention": lambda x, axis: weft.attention(x, x, x, causal=True, layout="balanced", group=axis),
        "linear_attention": lambda x, axis: weft.linear_attention(x, x, x, layout="balanced", group=axis),
        "short_conv": lambda x, axis: weft.short_conv(x[..., 0], torch.ones(2, 3), layout="balanced", group=axis),
        "sequence": lambda x, axis: weft.sequence(x.shape[1], layout="balanced", group=axis),
        "unshard": lambda x, axis: weft.unshard(x, 1, layout="balanced", group=axis),
    }
    for name in calls:
        assert errors_of(program) == [
            f"{name}: the ranks hold [30, 31, 29] tokens, but layout 'balanced' deals them [30, 30, 30]; cut with "
            f"weft.shard and the same cu_seqlens, or pass the sequence with which they were cut"
        ] * 3  # fmt: skip


class NearlyAMask:
    """Has what the deal asks of a mask, and nothing that attention does."""

    total = 6

    def count(self, cuts: list[int]) -> list[int]:
        return [1] * (len(cuts) - 1)


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"chunks_per_rank": 4}, ValueError, "chunks_per_rank is of layout 'balanced', but this one is 'contiguous'"),
        ({"layout": "zigzag", "mask": weft.Mask.causal(6)}, ValueError, "mask is of layout 'balanced', but this one"),
        ({"layout": "balanced", "chunks_per_rank": 0}, ValueError, "chunks_per_rank must be at least 1, got 0"),
        ({"layout": "balanced", "chunks_per_rank": 1.5}, TypeError, "chunks_per_rank must be an integer"),
        ({"layout": "balanced", "mask": [1, 2]}, TypeError, r"mask must be a weft\.Mask, got list"),
        ({"layout": "balanced", "mask": NearlyAMask()}, TypeError, r"mask must be a weft\.Mask, got NearlyAMask"),
        ({"layout": "balanced", "mask": weft.Mask.causal(7)}, ValueError, "mask is of 7 tokens, but total is 6"),
        ({"layout": "balanced", "cu_seqlens": [0, 5]}, ValueError, "cu_seqlens end at 5, but total is 6"),
    ],
)
def test_wrong_arguments_are_told(arguments: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        weft.sequence(total=6, **arguments)


def test_documents_that_do_not_fit_are_told() -> None:
    with pytest.raises(ValueError, match="x has 6 tokens along dim 0, but cu_seqlens end at 5"):
        weft.shard(torch.arange(6), 0, layout="balanced", cu_seqlens=[0, 5])
    with pytest.raises(ValueError, match="mask is of 7 tokens, but the ranks hold"):
        weft.sequence(6, layout="balanced", mask=weft.Mask.causal(7))


def on_gloo(axis: weft.Axis, size: int) -> float:
    group = dist.new_group(range(size))
    if axis.rank >= size:
        return 0.0
    here = weft.Axis.of(group)
    cases = [("gather", 131, True), ("linear_attention", 70, True), ("delta_rule", 70, False), ("short_conv", 60, True)]
    return max(worst_on_rank(here, *case, kind) for case in cases for kind in ("name", "chunks"))


@pytest.mark.parametrize("size", [2, 4])
def test_on_processes(pool: ProcessWorld, size: int) -> None:
    assert max(pool.run(on_gloo, size)) < 1e-10


def test_ranks_with_other_deals_of_the_same_lengths_are_found_out() -> None:
    """Their lengths are alike, and so would be the messages: only the numbers would be wrong."""
    masks = [weft.Mask.causal(64), weft.Mask.full(64)]

    def program(axis: weft.Axis) -> None:
        every = [weft.sequence(total=64, layout="balanced", mask=mask, group=axis) for mask in masks]
        assert every[0].lengths == every[1].lengths and every[0].runs != every[1].runs
        x = torch.randn(1, every[0].length, 2, 4)
        weft.attention(x, x, x, causal=True, sequence=every[axis.rank])

    with pytest.raises(DisagreementError, match="lengths"):
        weft.world.VirtualWorld(2).run(program)
