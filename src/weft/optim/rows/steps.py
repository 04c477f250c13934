"""Adam on some rows of a shard, in place and block by block so that little memory is used, again and again.

Two ways of one step that give the same bits: `step_rows` copies the rows out, steps them and copies them back;
`step_dense` steps whole blocks where they lie and puts back the rows that were not meant. torch's fused kernel rounds
the last elements of a tensor differently when they do not fill a vector register, so memory is padded to whole ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

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
    _memory: list[Tensor] = field(default_factory=list)

    def of_copies(self, weight: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> Shard:
        """Copies of some rows as a shard of their own, stepped with the same spare memory."""
        return Shard(weight, exp_avg, exp_avg_sq, self._memory)

    @property
    def width(self) -> int:
        return self.weight.shape[1]

    @property
    def block(self) -> int:
        """Rows of a block."""
        return max(_REGISTER, _BLOCK // self.width // _REGISTER * _REGISTER)

    def room(self, index: int, rows: int) -> Tensor:
        """Memory that is used again and again, flat, for ``rows`` rows and to the end of a vector register."""
        usual, needed = (-(-count * self.width // _REGISTER) * _REGISTER
                         for count in (min(self.block, len(self.exp_avg)), rows))  # fmt: skip
        while len(self._memory) <= index:
            self._memory.append(self.exp_avg.new_zeros(max(usual, needed)))
        if self._memory[index].numel() < needed:  # made for fewer: see `of_copies`; a row may be asked for twice
            self._memory[index] = self.exp_avg.new_zeros(max(usual, needed))
        return self._memory[index][:needed]

    def view(self, memory: Tensor, rows: int) -> Tensor:
        return memory[: rows * self.width].view(rows, self.width)


def _take(shard: Shard, places: Tensor) -> list[Tensor]:
    """Copies of weight and moments of some rows, flat and padded."""
    flat = [shard.room(index, len(places)) for index in range(3)]
    for memory, source in zip(flat, (shard.weight, shard.exp_avg, shard.exp_avg_sq), strict=True):
        out = shard.view(memory, len(places))
        if source.dtype == out.dtype:
            torch.index_select(source, 0, places, out=out)
        else:
            out.copy_(source.index_select(0, places))
    return flat


def _put(shard: Shard, places: Tensor, flat: list[Tensor]) -> None:
    for memory, target in zip(flat, (shard.weight, shard.exp_avg, shard.exp_avg_sq), strict=True):
        target.index_copy_(0, places, shard.view(memory, len(places)).to(target.dtype))


def _adam(weight: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: AdamStep) -> None:
    """torch's fused AdamW, on flat memory of whole vector registers."""
    number = torch.tensor(float(step.number), dtype=torch.float32, device=weight.device)
    torch._fused_adamw_(
        [weight], [grad], [exp_avg], [exp_avg_sq], [], [number], lr=step.lr, beta1=step.betas[0], beta2=step.betas[1],
        weight_decay=step.weight_decay, eps=step.eps, amsgrad=False, maximize=False,
    )  # fmt: skip


def _blocks(shard: Shard, places: Tensor) -> Iterator[tuple[slice, Tensor]]:
    for start in range(0, len(places), shard.block):
        part = slice(start, min(start + shard.block, len(places)))
        yield part, places[part]


def step_rows(shard: Shard, places: Tensor, grads: Tensor, step: AdamStep) -> None:
    """Step the rows at ``places`` ``[M]``, each once, with ``grads`` ``[M, d]``."""
    for part, some in _blocks(shard, places):
        flat = _take(shard, some)
        grad = shard.room(3, len(some))
        shard.view(grad, len(some)).copy_(grads[part])
        _adam(flat[0], grad, flat[1], flat[2], step)
        _put(shard, some, flat)


def step_dense(shard: Shard, places: Tensor, grads: Tensor, step: AdamStep) -> None:
    """The same, for ``places`` that rise and are most of the shard: blocks are stepped where they lie."""
    bounds = torch.arange(0, len(shard.weight) + shard.block, shard.block, device=places.device)
    cuts = torch.searchsorted(places, bounds).tolist()
    for start, first, last in zip(range(0, len(shard.weight), shard.block), cuts, cuts[1:], strict=False):
        rows = min(shard.block, len(shard.weight) - start)
        within = places[first:last] - start
        grad = shard.room(3, rows)
        shard.view(grad, rows).zero_().index_copy_(0, within, grads[first:last].to(grad.dtype))
        meant = torch.zeros(rows, dtype=torch.bool, device=places.device)
        meant[within] = True
        others = (~meant).nonzero().view(-1) + start
        here = [x[start : start + rows] for x in (shard.weight, shard.exp_avg, shard.exp_avg_sq)]
        kept = [x.index_select(0, others) for x in (shard.weight, shard.exp_avg, shard.exp_avg_sq)]
        flat = [_where_it_lies(shard, index, x) for index, x in enumerate(here)]
        _adam(flat[0], grad, flat[1], flat[2], step)
        for x, memory in zip(here, flat, strict=True):
            if memory.data_ptr() != x.data_ptr():
                x.copy_(shard.view(memory, rows))
        for x, rest in zip((shard.weight, shard.exp_avg, shard.exp_avg_sq), kept, strict=True):
            x.index_copy_(0, others, rest)


def step_whole(shard: Shard, grads: Tensor, order: Tensor, step: AdamStep) -> None:
    """The same for all rows of a shard, where they lie; the gradient of row r is ``grads[order[r]]``."""
    for part, flat in _in_place(shard, slice(0, len(shard.weight))):
        some = order[part]
        grad = shard.room(3, len(some))
        torch.index_select(grads, 0, some, out=shard.view(grad, len(some)))
        _adam(flat[0], grad, flat[1], flat[2], step)


def _in_place(shard: Shard, rows: slice) -> Iterator[tuple[slice, list[Tensor]]]:
    """Blocks of some rows: weight and moments, flat, to be changed where they lie."""
    for start in range(rows.start, rows.stop, shard.block):
        part = slice(start, min(start + shard.block, rows.stop))
        here = [x[part] for x in (shard.weight, shard.exp_avg, shard.exp_avg_sq)]
        flat = [_where_it_lies(shard, index, x) for index, x in enumerate(here)]
        yield part, flat
        for x, memory in zip(here, flat, strict=True):
            if memory.data_ptr() != x.data_ptr():
                x.copy_(shard.view(memory, len(x)))


def _where_it_lies(shard: Shard, index: int, rows: Tensor) -> Tensor:
    """A block's memory itself, flat, or a padded copy where it cannot be stepped there."""
    if rows.dtype == shard.exp_avg.dtype and rows.is_contiguous() and rows.numel() % _REGISTER == 0:
        return rows.view(-1)
    memory = shard.room(index, len(rows))
    shard.view(memory, len(rows)).copy_(rows)
    return memory


def catch_up_rows(shard: Shard, places: Tensor, which: Tensor, skipped: Skipped, eps: float) -> None:
    """Bring rows to now: row r of ``places`` by ``skipped[which[r]]``."""
    for part, some in _blocks(shard, places):
        flat = _take(shard, some)
        _catch_up(shard, flat, which[part], skipped, eps)
        _put(shard, some, flat)


def catch_up_whole(shard: Shard, rows: slice, which: Tensor, skipped: Skipped, eps: float) -> None:
    """The same for neighbouring rows of a shard, where they lie."""
    for part, flat in _in_place(shard, rows):
        _catch_up(shard, flat, which[part.start - rows.start : part.stop - rows.start], skipped, eps)


def _catch_up(shard: Shard, flat: list[Tensor], kind: Tensor, skipped: Skipped, eps: float) -> None:
    """Bring a block to now, its row r by ``skipped[kind[r]]``."""
    rows = len(kind)
    floor = torch.tensor(eps, dtype=shard.exp_avg.dtype, device=kind.device)
    weight, exp_avg, exp_avg_sq = (shard.view(memory, rows) for memory in flat)
    weight.mul_(skipped.weight[kind])
    if skipped.amounts.shape[1]:  # else they are at rest
        total, term = shard.view(shard.room(3, rows), rows).zero_(), shard.view(shard.room(4, rows), rows)
        root = torch.sqrt(exp_avg_sq, out=shard.view(shard.room(5, rows), rows))
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
