"""How a sequence lies on the ranks of an axis, and `shard`/`unshard` between the whole and the slices.

A *run* is a stretch of consecutive tokens on one rank. ``contiguous``: rank r holds the r-th of P parts, one run.
``zigzag``: rank r holds parts r and 2P-1-r of 2P, two runs one after the other in local memory (on the last
rank they meet and are one), which balances causal attention. Parts are as equal as can be, earlier ones
longer by a token; so of T zigzag tokens the first run has T - T//2 whatever T is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.comm.axis import Axis
from weft.comm.eager import eager

LAYOUTS = ("contiguous", "zigzag")


@dataclass(frozen=True)
class Run:
    """Tokens ``start : start + length`` of rank ``rank``'s slice, at ``offset`` in the whole sequence."""

    rank: int
    start: int
    length: int
    offset: int


def find_layout_fault(operation: str, layout: str, rank: int) -> ValueError | None:
    """The error for a layout nobody knows."""
    if layout in LAYOUTS:
        return None
    return ValueError(f"{operation}: layout {layout!r} is not one of {', '.join(LAYOUTS)} (rank {rank})")


def stops_of(layout: str, size: int) -> list[int]:
    """The rank of each run, in the order of the sequence."""
    ranks = list(range(size))
    return ranks if layout == "contiguous" else ranks + ranks[-2::-1]


def run_lengths(length: int, layout: str, rank: int, size: int) -> list[int]:
    """How a rank's ``length`` tokens are cut into its runs."""
    if layout == "contiguous" or rank == size - 1:
        return [length]
    return [length - length // 2, length // 2]


def shard_lengths(total: int, layout: str, size: int) -> list[int]:
    """The tokens of each rank when `shard` cuts ``total``."""
    if layout == "contiguous":
        return [_part(total, size, rank) for rank in range(size)]
    return [_part(total, 2 * size, rank) + _part(total, 2 * size, 2 * size - 1 - rank) for rank in range(size)]


def _part(total: int, parts: int, index: int) -> int:
    return total // parts + (index < total % parts)


def lay_out(lengths: Sequence[int], layout: str) -> list[Run]:
    """The runs of all ranks in the order of the sequence, for ranks that hold these many tokens."""
    size = len(lengths)
    cuts = [run_lengths(length, layout, rank, size) for rank, length in enumerate(lengths)]
    seen = [0] * size
    runs: list[Run] = []
    offset = 0
    for rank in stops_of(layout, size):
        number, seen[rank] = seen[rank], seen[rank] + 1
        start, length = sum(cuts[rank][:number]), cuts[rank][number]
        runs.append(Run(rank, start, length, offset))
        offset += length
    return runs


def gather_lengths(axis: Axis, length: int, device: torch.device) -> list[int]:
    """Every rank's ``length``: one round of 8 bytes, in host memory unless the wire is NCCL."""
    mine = torch.tensor([length], device=device if getattr(axis.wire, "grouped", False) else "cpu")
    table = [mine if rank == axis.rank else torch.empty_like(mine) for rank in range(axis.size)]
    others = [rank for rank in range(axis.size) if rank != axis.rank]
    axis.exchange([(rank, mine) for rank in others], [(rank, table[rank]) for rank in others]).wait()
    return [int(one) for one in table]


@eager
def shard(x: Tensor, dim: int, *, layout: str = "contiguous", group: Any = None) -> Tensor:
    """This rank's slice of ``x``, cut along ``dim``. Every rank passes the whole; nothing crosses ranks.

    As of any replicated tensor, a rank's gradient of ``x`` is its own part: zero outside its slice.

    >>> shard(torch.arange(6), 0)                     # a world of one holds all of it
    tensor([0, 1, 2, 3, 4, 5])
    """
    axis = Axis.of(group)
    if fault := find_layout_fault("shard", layout, axis.rank):
        axis.refuse("shard", fault)
    runs = lay_out(shard_lengths(x.shape[dim], layout, axis.size), layout)
    mine = [x.narrow(dim, run.offset, run.length) for run in runs if run.rank == axis.rank]
    return mine[0].contiguous() if len(mine) == 1 else torch.cat(mine, dim)


@eager
def unshard(x: Tensor, dim: int, *, layout: str = "contiguous", group: Any = None) -> Tensor:
    """The whole on every rank, from slices as `shard` cuts them, or of any other lengths.

    Lengths along ``dim`` may differ between ranks. Each slice travels to every other rank. The gradient of a slice
    is the sum, in rank order and at least in fp32, of what every rank's loss says about it.

    >>> unshard(torch.arange(6), 0)
    tensor([0, 1, 2, 3, 4, 5])
    """
    axis = Axis.of(group)
    if fault := find_layout_fault("unshard", layout, axis.rank):
        axis.refuse("unshard", fault)
    return _Unshard.apply(x, dim % x.ndim, layout, axis)


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, layout: str, axis: Axis) -> Tensor:
        rest = tuple(size for index, size in enumerate(x.shape) if index != dim)
        call = axis.begin(
            "unshard", dim=dim, rest=rest, dtype=x.dtype, layout=layout, gradient=ctx.needs_input_grad[0]
        )  # fmt: skip
        lengths = gather_lengths(call, x.shape[dim], x.device)
        ctx.dim, ctx.layout, ctx.axis, ctx.lengths = dim, layout, axis, lengths
        mine = x.movedim(dim, 0).contiguous()
        slices = [
            mine if rank == axis.rank else mine.new_empty(length, *mine.shape[1:])
            for rank, length in enumerate(lengths)
        ]
        others = [rank for rank in range(axis.size) if rank != axis.rank]
        call.exchange([(rank, mine) for rank in others], [(rank, slices[rank]) for rank in others]).wait()
        parts = [slices[run.rank][run.start : run.start + run.length] for run in lay_out(lengths, layout)]
        return torch.cat(parts).movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dim, layout, axis, lengths = ctx.dim, ctx.layout, ctx.axis, ctx.lengths
        call = axis.begin("unshard.backward", dim=dim, lengths=tuple(lengths), dtype=grad.dtype, layout=layout)
        whole = grad.movedim(dim, 0)
        runs = lay_out(lengths, layout)
        outgoing = [
            torch.cat([whole[run.offset : run.offset + run.length] for run in runs if run.rank == rank])
            for rank in range(axis.size)
        ]
        incoming = [
            outgoing[axis.rank] if rank == axis.rank else torch.empty_like(outgoing[axis.rank])
            for rank in range(axis.size)
        ]
        others = [rank for rank in range(axis.size) if rank != axis.rank]
        call.exchange([(rank, outgoing[rank]) for rank in others], [(rank, incoming[rank]) for rank in others]).wait()
        total = incoming[0].to(torch.promote_types(grad.dtype, torch.float32))
        for part in incoming[1:]:
            total = total + part
        return total.to(grad.dtype).movedim(0, dim), None, None, None


__all__ = ["LAYOUTS", "Run", "lay_out", "shard", "unshard"]
