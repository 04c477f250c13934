"""Before a step: do all ranks have the same gradients, and are they finite?"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from weft.comm import Axis
from weft.errors import name_ranks
from weft.optim.owners import is_finite
from weft.optim.step.verdict import gather_verdict

if TYPE_CHECKING:
    from weft.optim.step.part import Examined

_BITS = 62  # of an integer, for a bit each
_ALIKE = 1e-3  # how far the norm of replicated gradients may differ between ranks: rounding, not another batch


@dataclass(frozen=True)
class _Options:
    """What the ranks must have in common in a step."""

    settings: object


@dataclass(frozen=True)
class Findings:
    """What all ranks know: which parameters have gradients, and the first that is not finite, with its rank."""

    present: list[bool]
    nonfinite: str | None
    found_inf: bool


def compare_gradients(optimizer: str, examined: Examined, axes: Sequence[Axis], *, found_inf: bool) -> Findings:
    """Compare over all ranks: integers only, one small round for each axis.

    Raises on every rank if a gradient is missing on some or sparse, if those that must be ``alike`` differ, if ranks
    have other ``settings``, or if one has found a ``fault``.
    """
    names, grads, present = examined.names, examined.grads, examined.present
    bits = [sum(has << at for at, has in enumerate(present[start : start + _BITS]))
            for start in range(0, len(present), _BITS)]  # fmt: skip
    rank = axes[-1].rank if axes else 0
    fault = examined.fault or _find_sparse(optimizer, grads, names, rank)
    bad = 0 if fault else _first_nonfinite(grads)
    alike = [axis for axis in axes if any(axis is one for one in examined.alike)]
    norms = [0.0 if fault else _norm(_of(examined, axis)) for axis in alike]
    # found_inf, 1 + the parameter that is not finite, its rank on each axis; norms; bits of all ranks; bits of any
    head = [int(found_inf), bad, *(axis.rank for axis in axes)]
    middle = [struct.unpack("q", struct.pack("d", norm))[0] for norm in norms]
    after = len(head) + len(middle)

    def merge(axis: Axis, told: list[tuple[int, ...]]) -> list[int]:
        first = next((row for row in told if row[1]), told[0])
        columns = list(zip(*(row[after:] for row in told), strict=True))
        everywhere = [_over(column, both=True) for column in columns[: len(bits)]]
        anywhere = [_over(column, both=False) for column in columns[len(bits) :]]
        _refuse_missing(optimizer, axis, names, [row[after : after + len(bits)] for row in told], anywhere)
        if not first[1]:
            for place, one in enumerate(alike):
                if one is axis:
                    _refuse_different(optimizer, axis, tuple(row[len(head) + place] for row in told))
        return [
            max(row[0] for row in told), *first[1 : len(head)], *told[0][len(head) : after], *everywhere, *anywhere
        ]  # fmt: skip

    known = gather_verdict(
        axes, f"{optimizer}.step", _Options(examined.settings), [*head, *middle, *bits, *bits], merge, fault
    )
    has = [bool(known[after + at // _BITS] >> at % _BITS & 1) for at in range(len(present))]
    where = ", ".join(f"rank {rank} of {axis.size}" for axis, rank in zip(axes, known[2 : len(head)], strict=True))
    words = f"the gradient of {names[known[1] - 1]} is not finite" if known[1] else None
    return Findings(has, words and words + (f" on {where}" if where else ""), bool(known[0]))


def _of(examined: Examined, axis: Axis) -> list[Tensor]:
    """The gradients that must be the same over the ranks of an axis."""
    return [g for g, one in zip(examined.grads, examined.alike, strict=True) if one is axis and g is not None]


def _find_sparse(optimizer: str, grads: Sequence[Tensor | None], names: Sequence[str], rank: int) -> Exception | None:
    for grad, name in zip(grads, names, strict=True):
        if grad is not None and grad.layout != torch.strided:
            return TypeError(f"{optimizer}: the gradient of {name} is {grad.layout}, not dense (rank {rank})")
    return None


def _over(column: tuple[int, ...], both: bool) -> int:
    """The bits that all numbers have, or any of them."""
    result = column[0]
    for number in column[1:]:
        result = result & number if both else result | number
    return result


def _first_nonfinite(grads: Sequence[Tensor | None]) -> int:
    """1 + the index of the first gradient that is not finite; 0 if there is none."""
    there = [(index, grad) for index, grad in enumerate(grads) if grad is not None and grad.numel()]
    if is_finite(*(grad for _, grad in there)):
        return 0
    return next(1 + index for index, grad in there if not is_finite(grad))


def _norm(grads: Sequence[Tensor]) -> float:
    filled = [grad for grad in grads if grad.numel()]
    return float(torch.nn.utils.get_total_norm(filled)) if filled else 0.0


def _refuse_missing(
    optimizer: str, axis: Axis, names: Sequence[str], rows: list[tuple[int, ...]], anywhere: list[int]
) -> None:
    for index, name in enumerate(names):
        word, bit = index // _BITS, index % _BITS
        without = [rank for rank, row in enumerate(rows) if not row[word] >> bit & 1]
        if without and anywhere[word] >> bit & 1:
            raise ValueError(
                f"{optimizer}: {name} has no gradient on {name_ranks(without)} of {axis.size}, but on other ranks; "
                f"give it one on all ranks (zeros if it was not used) or on none"
            )


def _refuse_different(optimizer: str, axis: Axis, column: tuple[int, ...]) -> None:
    norms = [struct.unpack("d", struct.pack("q", number))[0] for number in column]
    if any(abs(norm - norms[0]) > _ALIKE * max(norm, norms[0]) for norm in norms):
        shown = ", ".join(f"{norm:.6g}" for norm in norms[:16])
        raise ValueError(
            f"{optimizer}: the gradients of replicated parameters differ between the {axis.size} ranks of group (their "
            f"norms are {shown}); average them first, as DistributedDataParallel does, or pass the ranks as data_group"
        )
