"""A few parameters with mixed placements, trained alone and over ranks, by every rule of a matrix optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from worlds import place

import weft
from weft import optim

# What steps matrices; "rare": factors are not decomposed at every step, and L and R take turns.
RULES: dict[str, Callable[..., Any]] = {
    "exact": partial(optim.REKLS, variant="exact"),
    "exact, rare": partial(optim.REKLS, variant="exact", root_every=3, dense_steps=2),
    "stable": partial(optim.REKLS, root_every=1),
    "stable, rare": partial(optim.REKLS, root_every=3, dense_steps=2),
    "Muon": optim.Muon,
    "NorMuon": optim.NorMuon,
    "SOAP": partial(optim.SOAP, root_every=3),
}
OF_REKLS = [rule for rule in RULES if rule.startswith(("exact", "stable"))]


def make(params: Any, rule: str = "exact", lr: Any = 0.01, **options: Any) -> Any:
    """An optimizer of one of the rules."""
    return RULES[rule](params, lr=lr, **options)


@dataclass(frozen=True)
class Kind:
    """A parameter: its shape, how it is cut and what steps it."""

    shape: tuple[int, ...]
    partition_dim: int | None
    options: dict[str, Any] = field(default_factory=dict)


KINDS = (
    Kind((7, 5), 0),
    Kind((6, 10), 1),
    Kind((8, 8), None),
    Kind((5,), None),
    Kind((9,), 0),
    Kind((4, 6), 0, {"algorithm": "adamw"}),
    Kind((3, 11), 1, {"algorithm": "adamw"}),
    Kind((5, 2, 3), 0, {"flatten": True}),
    Kind((12, 3), 1, {"max_factor_dim": 8}),
    Kind((1, 4), 1),
)
CUT_KINDS = (  # into several matrices each
    Kind((11, 7), 0, {"block_dim": 4}),
    Kind((6, 9), 1, {"split": (1, 3, 2), "block_dim": 5}),
    Kind((3, 4, 6), 0, {"stacked": True}),
    Kind((2, 5, 6), 1, {"stacked": True, "block_dim": 4}),
    Kind((2, 6, 5), 2, {"stacked": True, "split": 2}),
)


def sizes_of(total: int, ranks: int, uneven: bool) -> list[int]:
    """How many of ``total`` each rank has; uneven: the first has nothing, where there are three and more."""
    if not uneven:
        return [len(part) for part in torch.arange(total).tensor_split(ranks)]
    shares = [0] + list(range(1, ranks)) if ranks > 2 else [1] * (ranks - 1) + [2]
    cuts = [total * sum(shares[: rank + 1]) // sum(shares) for rank in range(ranks)]
    return [end - start for start, end in zip([0, *cuts], cuts, strict=False)]


def part_of(whole: Tensor, kind: Kind, rank: int, ranks: int, uneven: bool) -> Tensor:
    if kind.partition_dim is None:
        return whole.clone()
    return whole.split(sizes_of(whole.shape[kind.partition_dim], ranks, uneven), kind.partition_dim)[rank].clone()


def weights(kinds=KINDS, dtype=torch.float32) -> list[Tensor]:
    make = torch.Generator().manual_seed(0)
    return [torch.randn(kind.shape, generator=make, dtype=torch.float64).to(dtype) for kind in kinds]


def gradients(step: int, data_rank: int = 0, kinds=KINDS, dtype=torch.float32) -> list[Tensor]:
    make = torch.Generator().manual_seed(1000 * step + data_rank + 1)
    return [torch.randn(kind.shape, generator=make, dtype=torch.float64).to(dtype) for kind in kinds]


def averaged(step: int, data_ranks: int, **options: Any) -> list[Tensor]:
    """In rank order and fp32, as the optimizer must."""
    every = [gradients(step, rank, **options) for rank in range(data_ranks)]
    found = []
    for parts in zip(*every, strict=True):
        total = parts[0].to(torch.promote_types(parts[0].dtype, torch.float32))
        for part in parts[1:]:
            total = total + part
        found.append(total / data_ranks)
    return found


def groups_of(parameters: list[Tensor], kinds=KINDS) -> list[dict[str, Any]]:
    return [
        {"params": [parameter], "partition_dim": kind.partition_dim, **kind.options}
        for parameter, kind in zip(parameters, kinds, strict=True)
    ]


def train_alone(steps: int, data_ranks: int = 1, kinds=KINDS, dtype=torch.float32, **options: Any) -> list[Tensor]:
    parameters = [torch.nn.Parameter(weight) for weight in weights(kinds, dtype)]
    optimizer = make(groups_of(parameters, kinds), **options)
    for step in range(steps):
        for parameter, grad in zip(parameters, averaged(step, data_ranks, kinds=kinds, dtype=dtype), strict=True):
            parameter.grad = grad.to(dtype) if data_ranks == 1 else grad
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


def parts_of_rank(axis: weft.Axis, uneven: bool, kinds=KINDS, dtype=torch.float32) -> list[torch.nn.Parameter]:
    return place([
        torch.nn.Parameter(part_of(weight, kind, axis.rank, axis.size, uneven))
        for weight, kind in zip(weights(kinds, dtype), kinds, strict=True)
    ])  # fmt: skip


def train_over(
    axis: weft.Axis, steps: int, uneven: bool = False, data: weft.Axis | None = None, kinds=KINDS, dtype=torch.float32,
    **options: Any,
) -> list[Tensor]:  # fmt: skip
    """This rank's parts after some steps."""
    parameters = parts_of_rank(axis, uneven, kinds, dtype)
    optimizer = make(groups_of(parameters, kinds), group=axis, data_group=data, **options)
    for step in range(steps):
        grads = gradients(step, 0 if data is None else data.rank, kinds, dtype)
        for parameter, kind, grad in zip(parameters, kinds, grads, strict=True):
            parameter.grad = place(part_of(grad, kind, axis.rank, axis.size, uneven))
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


def assert_same(whole: list[Tensor], parts: list[list[Tensor]], uneven: bool, kinds=KINDS) -> None:
    """Every rank's parts have the bits of the whole."""
    for rank, mine in enumerate(parts):
        for kind, wanted, found in zip(kinds, whole, mine, strict=True):
            assert torch.equal(found, part_of(wanted, kind, rank, len(parts), uneven)), (rank, kind)
