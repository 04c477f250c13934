"""Adam on some rows of a shard, in place and block by block so that little memory is used, again and again.

`Shard.blocks` brings rows to flat memory and back, `_adam` is one step, `catch_up_rows` many without a gradient: every
step of `RowAdam` is made of these. Places and orders are on the host, rows may be on a device. torch's fused kernel
rounds the last elements of a tensor differently when they do not fill a vector register, so memory is padded to whole
ones: rows get the same bits wherever they are stepped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from weft.comm.device import copy_to_device, finish_work
from weft.optim.rows.skipped_steps import Skipped

_BLOCK = 1 << 19  # elements of a block: few enough for a cache, enough to be worth a call
_REGISTER = 16  # elements of the widest vector register


@dataclass(frozen=True)
class AdamStep:
    """One step's numbers."""

    number: int
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


@dataclass
class Shard:
    """Own rows and their moments, ``[n, d]``: weight in any dtype, possibly strided; moments at least fp32."""

    weight: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    _scratch: dict[int, Tensor] = field(default_factory=dict)

    def of_copies(self, weight: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> Shard:
        """Copies of some rows as a shard of their own, stepped with the same scratch memory."""
        return Shard(weight, exp_avg, exp_avg_sq, self._scratch)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.weight, self.exp_avg, self.exp_avg_sq

    @property
    def width(self) -> int:
        return self.weight.shape[1]

    @property
    def block(self) -> int:
        """Rows of a block."""
        return max(_REGISTER, _BLOCK // self.width // _REGISTER * _REGISTER)

    def scratch(self, index: int, rows: int) -> Tensor:
        """Memory that is used again and again, flat, for ``rows`` rows and to the end of a vector register."""
        usual, needed = (-(-count * self.width // _REGISTER) * _REGISTER
                         for count in (min(self.block, len(self.exp_avg)), rows))  # fmt: skip
        memory = self._scratch.get(index)
        if memory is None or memory.numel() < needed:  # made for fewer: see `of_copies`; rows may be asked for twice
            memory = self._scratch[index] = self.exp_avg.new_zeros(max(usual, needed))
        return memory[:needed]

    def view(self, memory: Tensor, rows: int) -> Tensor:
        return memory[: rows * self.width].view(rows, self.width)

    def blocks(self, rows: Tensor | slice) -> Iterator[tuple[slice, list[Tensor]]]:
        """Blocks of ``rows``: which of them, and their weight and moments, flat and padded, to be changed.

        Rows given by their places ``[M]`` are copied out and back; neighbours, a slice, are changed where they lie, or
        in a copy where they cannot be.
        """
        count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
        rows = rows if isinstance(rows, slice) else copy_to_device(rows, self.weight.device)
        for start in range(0, count, self.block):
            part = slice(start, min(start + self.block, count))
            if isinstance(rows, slice):
                here = [x[rows.start + part.start : rows.start + part.stop] for x in self.tensors]
                flat = [self._where_it_lies(index, x) for index, x in enumerate(here)]
                yield part, flat
                for x, memory in zip(here, flat, strict=True):
                    if memory.data_ptr() != x.data_ptr():
                        x.copy_(self.view(memory, len(x)))
            else:
                some = rows[part]
                flat = [self._copy(index, x, some) for index, x in enumerate(self.tensors)]
                yield part, flat
                for x, memory in zip(self.tensors, flat, strict=True):
                    x.index_copy_(0, some, self.view(memory, len(some)).to(x.dtype))

    def _copy(self, index: int, source: Tensor, places: Tensor) -> Tensor:
        memory = self.scratch(index, len(places))
        out = self.view(memory, len(places))
        if source.dtype == out.dtype:
            torch.index_select(source, 0, places, out=out)
        else:
            out.copy_(source.index_select(0, places))
        return memory

    def _where_it_lies(self, index: int, rows: Tensor) -> Tensor:
        if rows.dtype == self.exp_avg.dtype and rows.is_contiguous() and rows.numel() % _REGISTER == 0:
            return rows.view(-1)
        memory = self.scratch(index, len(rows))
        self.view(memory, len(rows)).copy_(rows)
        return memory


def _adam(flat: list[Tensor], grad: Tensor, step: AdamStep) -> None:
    """torch's fused AdamW, on flat memory of whole vector registers."""
    weight, exp_avg, exp_avg_sq = flat
    number = torch.full((), float(step.number), dtype=torch.float32, device=weight.device)
    torch._fused_adamw_(
        [weight], [grad], [exp_avg], [exp_avg_sq], [], [number], lr=step.lr, beta1=step.betas[0], beta2=step.betas[1],
        weight_decay=step.weight_decay, eps=step.eps, amsgrad=False, maximize=False,
    )  # fmt: skip


def step_rows(shard: Shard, rows: Tensor | slice, grads: Tensor, step: AdamStep, order: Tensor | None = None) -> None:
    """Step rows as `Shard.blocks` takes them, each once: the r-th with ``grads[r]``, or with ``grads[order[r]]``."""
    order = None if order is None else copy_to_device(order, grads.device)
    for part, flat in shard.blocks(rows):
        grad = shard.scratch(3, part.stop - part.start)
        out = shard.view(grad, part.stop - part.start)
        if order is None:
            out.copy_(grads[part])
        else:
            torch.index_select(grads, 0, order[part], out=out)
        _adam(flat, grad, step)


def step_dense(shard: Shard, places: Tensor, grads: Tensor, step: AdamStep) -> None:
    """The same bits, for ``places`` that rise and are most of the shard: blocks are stepped where they lie.

    The rows that were not meant are put back.
    """
    bounds = torch.arange(0, len(shard.weight) + shard.block, shard.block, device=places.device)
    cuts = torch.searchsorted(places, bounds).tolist()
    blocks = shard.blocks(slice(0, len(shard.weight)))
    for (part, flat), first, last in zip(blocks, cuts, cuts[1:], strict=False):
        rows = part.stop - part.start
        within = places[first:last] - part.start
        grad = shard.scratch(3, rows)
        there = copy_to_device(within, grad.device)
        shard.view(grad, rows).zero_().index_copy_(0, there, grads[first:last].to(grad.dtype))
        others = torch.ones(rows, dtype=torch.bool, device=places.device)
        others[within] = False
        rest = copy_to_device(others.nonzero().view(-1), grad.device)
        kept = [shard.view(memory, rows).index_select(0, rest) for memory in flat]
        _adam(flat, grad, step)
        for memory, values in zip(flat, kept, strict=True):
            shard.view(memory, rows).index_copy_(0, rest, values)


def catch_up_rows(shard: Shard, rows: Tensor | slice, which: Tensor, skipped: Skipped, eps: float) -> None:
    """Bring rows as `Shard.blocks` takes them to now: the r-th by ``skipped[which[r]]``."""
    which, skipped = copy_to_device(which, shard.exp_avg.device), skipped.on(shard.exp_avg.device)
    floor = torch.full((), eps, dtype=shard.exp_avg.dtype, device=which.device)
    for part, flat in shard.blocks(rows):
        kind, count = which[part], part.stop - part.start
        weight, exp_avg, exp_avg_sq = (shard.view(memory, count) for memory in flat)
        weight.mul_(skipped.weight[kind])
        if skipped.amounts.shape[1]:  # else they are at rest
            total, term, root = (shard.view(shard.scratch(index, count), count) for index in (3, 4, 5))
            total.zero_()
            torch.sqrt(exp_avg_sq, out=root)
            amounts = skipped.amounts[kind]
            for k in range(amounts.shape[1]):  # total += W / (root X + eps), in two passes
                if skipped.points.ndim == 1:
                    torch.add(floor, root, alpha=float(skipped.points[k]), out=term)
                else:
                    torch.addcmul(floor, root, skipped.points[kind, k, None], out=term)
                total.addcdiv_(amounts[:, k, None], term)
            weight.sub_(total.mul_(exp_avg))
        exp_avg.mul_(skipped.momentum[kind])
        exp_avg_sq.mul_(skipped.variance[kind])


@dataclass(frozen=True)
class RowCosts:
    """Seconds for each row: stepped by copies, stepped where it lies, and kept by copies while others are stepped."""

    copied: float
    in_place: float
    kept: float

    def prefer_dense(self, touched: int, rows: int) -> bool:
        """Whether a step of ``touched`` of ``rows`` rows is cheaper where they lie."""
        return rows * self.in_place + (rows - touched) * self.kept < touched * self.copied

    @staticmethod
    def measure(shard: Shard) -> RowCosts:
        """Time both ways on rows of zeros of the same kind, a few milliseconds; once for each width and dtype."""
        rows = shard.block
        weight = torch.zeros(rows, shard.width, dtype=shard.weight.dtype, device=shard.weight.device)
        first, second, grads = (shard.exp_avg.new_ones(rows, shard.width) for _ in range(3))
        trial, step = Shard(weight, first, second), AdamStep(1, 0.0, (0.9, 0.999), 1e-8, 0.0)
        places = torch.arange(rows, device="cpu")

        def seconds(way: Callable[..., None], chosen: Tensor) -> float:
            best = float("inf")
            for _ in range(3):
                finish_work(weight.device)
                start = time.perf_counter()
                way(trial, chosen, grads[: len(chosen)], step)
                finish_work(weight.device)
                best = min(best, time.perf_counter() - start)
            return best

        copied, dense = seconds(step_rows, places), seconds(step_dense, places)
        half = seconds(step_dense, places[::2].contiguous())
        return RowCosts(copied / rows, dense / rows, max(0.0, 2 * (half - dense) / rows))
