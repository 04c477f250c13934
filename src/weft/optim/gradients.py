"""Before a step: do all ranks have the same gradients, and are they finite?"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.comm import Axis
from weft.comm.dtensor import local_of
from weft.errors import name_ranks
from weft.optim.verdict import tell_all

_BITS = 62  # of an integer, for a bit each
_ALIKE = 1e-3  # how far the norm of replicated gradients may differ between ranks: rounding, not another batch


@dataclass(frozen=True)
class _Options:
    """What the ranks must have in common in a step."""

    settings: tuple[object, ...]


@dataclass(frozen=True)
class Findings:
    """What all ranks know: which parameters have gradients, and the first that is not finite, with its rank."""

    present: list[bool]
    nonfinite: str | None
    found_inf: bool


def compare_gradients(
    optimizer: str, parameters: Sequence[Tensor], names: Sequence[str], axes: Sequence[Axis],
    settings: tuple[object, ...], *, found_inf: bool, fault: Exception | None,
    replicated: Sequence[bool] = (), replicated_over: Axis | None = None,
) -> Findings:  # fmt: skip
    """Compare over all ranks: integers only, one small round for each axis.

    Raises on every rank if a gradient is missing on some or sparse, if those of ``replicated`` parameters differ
    between the ranks of ``replicated_over``, if ranks have other ``settings``, or if one has found a ``fault``.
    """
    grads = [None if parameter.grad is None else local_of(parameter.grad) for parameter in parameters]
    bits = [sum((grad is not None) << at for at, grad in enumerate(grads[start : start + _BITS]))
            for start in range(0, len(grads), _BITS)]  # fmt: skip
    rank = axes[-1].rank if axes else 0
    fault = fault or _find_sparse(optimizer, grads, names, rank)
    bad = 0 if fault else _first_nonfinite(grads)
    alike = [grad for grad, same in zip(grads, replicated, strict=False) if same and grad is not None]
    # found_inf, 1 + the parameter that is not finite, its rank on each axis; norm; bits of all ranks; bits of any
    head = [int(found_inf), bad, *(axis.rank for axis in axes)]
    numbers = [*head, struct.unpack("q", struct.pack("d", 0.0 if fault else _norm(alike)))[0], *bits, *bits]

    def merge(axis: Axis, told: list[tuple[int, ...]]) -> list[int]:
        first = next((row for row in told if row[1]), told[0])
        columns = list(zip(*(row[len(head) :] for row in told), strict=True))
        everywhere = [_over(column, both=True) for column in columns[1 : 1 + len(bits)]]
        anywhere = [_over(column, both=False) for column in columns[1 + len(bits) :]]
        _refuse_missing(
            optimizer, axis, names, [row[len(head) + 1 : len(head) + 1 + len(bits)] for row in told], anywhere
        )
        if axis is replicated_over and not first[1]:
            _refuse_different(optimizer, axis, columns[0])
        return [max(row[0] for row in told), *first[1 : len(head)], columns[0][0], *everywhere, *anywhere]

    known = tell_all(axes, f"{optimizer}.step", _Options(settings), numbers, merge, fault)
    present = [bool(known[len(head) + 1 + at // _BITS] >> at % _BITS & 1) for at in range(len(grads))]
    where = ", ".join(f"rank {rank} of {axis.size}" for axis, rank in zip(axes, known[2 : len(head)], strict=True))
    words = f"the gradient of {names[known[1] - 1]} is not finite" if known[1] else None
    return Findings(present, words and words + (f" on {where}" if where else ""), bool(known[0]))


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
    if not there or math.isfinite(_norm([grad for _, grad in there], math.inf)):
        return 0
    return next(1 + index for index, grad in there if not bool(torch.isfinite(grad).all()))


def _norm(grads: Sequence[Tensor], order: float = 2.0) -> float:
    filled = [grad for grad in grads if grad.numel()]
    return float(torch.nn.utils.get_total_norm(filled, order)) if filled else 0.0


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
