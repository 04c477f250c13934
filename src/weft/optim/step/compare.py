"""What ranks compare before a step: gradients, settings, weights and faults, as integers, with one outcome for all."""

from __future__ import annotations

import functools
import operator
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from weft.comm import Axis
from weft.errors import CommError, DeadlockError, DisagreementError, NcclRuleError, RankError, name_ranks

Merge = Callable[[Axis, list[tuple[int, ...]]], list[int]]
_SHOWN = 8  # faults in one error
_LOST = (CommError, DeadlockError, DisagreementError, NcclRuleError, RankError)
_BITS = 62  # of an integer, for a bit each
_ALIKE = 1e-3  # how far the norm of replicated gradients may differ between ranks: rounding, not another batch
_CHUNK = 1 << 20  # elements looked at together: a digest needs little memory
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters of all groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def names_of(optimizer: torch.optim.Optimizer) -> list[str]:
    """Their names, or their numbers."""
    return [
        group["param_names"][at] if "param_names" in group else f"parameter {at} of group {number}"
        for number, group in enumerate(optimizer.param_groups)
        for at in range(len(group["params"]))
    ]


def is_finite(*tensors: Tensor) -> bool:
    """Whether all elements are.

    A sum that is finite is one of finite elements, and much cheaper than a look at each: that is only taken where it is
    not, since it may have overflowed.
    """
    if not tensors:
        return True
    sums = [tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors]
    joined = torch.stack([one.to(sums[0].device, torch.float64) for one in sums])
    return bool(torch.isfinite(joined).all()) or all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


def is_lost(error: Exception) -> bool:
    """Whether the group itself failed, so that no message about it can reach the other ranks."""
    return isinstance(error, _LOST)


def join_faults(faults: Iterable[Exception | None]) -> Exception | None:
    """All that is wrong as one error, of the kind of the first: nobody is sent from one refusal to the next.

    >>> join_faults([None, ValueError("REKLS: one"), TypeError("REKLS: two")])
    ValueError('REKLS: one; and two')
    """
    found = [fault for fault in faults if fault is not None]
    if not found:
        return None
    words = [str(found[0]), *(str(fault).partition(": ")[2] for fault in found[1:_SHOWN])]
    more = [f"{len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
    return type(found[0])("; and ".join([*words, *more]))


def gather_verdict(
    axes: Sequence[Axis],
    operation: str,
    options: object,
    numbers: Sequence[int],
    merge: Merge,
    fault: Exception | None = None,
) -> list[int]:
    """What the ``numbers`` of all ranks come to; a fault of one rank is raised on all.

    They are gathered along one axis after the other. ``merge(axis, rows)`` makes one list, as long as ``numbers``, of
    the rows of an axis's ranks, or raises; that list is gathered along the next axis, so after the last one it stands
    for every rank of the mesh. A fault goes the same way: no rank raises while others go on to wait for it.
    """
    known = list(numbers)
    for axis in axes:
        try:
            call = axis.begin(operation, options, metadata=known, fault=fault)
            known, fault = merge(axis, call.metadata.wait()), None
        except (ValueError, TypeError, NotImplementedError) as error:
            fault = error
        except RuntimeError as error:
            if is_lost(error):
                raise
            fault = error
    if fault is not None:
        raise fault
    return known


@dataclass
class Examined:
    """What this rank has of a part's gradients before a step, for the ranks to compare.

    ``grads`` are the dense ones that lie here, to be looked through for what is not finite. ``settings`` must be the
    same on every rank. ``alike[i]``: the axis over whose ranks gradient i must be the same already.
    """

    parameters: list[Tensor]
    names: list[str]
    present: list[bool]
    grads: list[Tensor | None]
    settings: object = None
    fault: Exception | None = None
    alike: list[Axis | None] = field(default_factory=list)

    @staticmethod
    def join(parts: Mapping[str, Examined], settings: object, fault: Exception | None) -> Examined:
        """All parts as one; with several, a parameter's name ends with that of its part."""
        joined = Examined([], [], [], [], (settings, *(one.settings for one in parts.values())), fault)
        for part, one in parts.items():
            joined.parameters += one.parameters
            joined.names += one.names if len(parts) == 1 else [f"{name} ({part})" for name in one.names]
            joined.present += one.present
            joined.grads += one.grads
            joined.alike += one.alike or [None] * len(one.grads)
            joined.fault = joined.fault or one.fault
        return joined

    def alike_over(self, axes: Sequence[Axis]) -> list[Axis]:
        """Those of ``axes`` over whose ranks some gradient must be the same."""
        return [axis for axis in axes if any(axis is one for one in self.alike)]


@dataclass
class Seen:
    """What the elements of a rank's gradients are: whether a scaler found infinities, 1 + the index of the first that
    is not finite (0: none), and the norms of those that must be alike, for each such axis."""

    found_inf: bool = False
    nonfinite: int = 0
    norms: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class _Options:
    """What the ranks must have in common in a step: its settings, or how many weights are compared."""

    settings: object


@dataclass(frozen=True)
class Findings:
    """What all ranks know: which parameters have gradients, and the first that is not finite, with its rank."""

    present: list[bool]
    nonfinite: str | None
    found_inf: bool


def compare_gradients(optimizer: str, examined: Examined, axes: Sequence[Axis], seen: Seen | None) -> Findings:
    """Compare over all ranks: integers only, one small round for each axis. ``seen``: None if nobody has looked yet.

    Raises on every rank if a gradient is missing on some or sparse, if those that must be ``alike`` differ, if ranks
    have other ``settings``, or if one has found a ``fault``.
    """
    names, present = examined.names, examined.present
    bits = [sum(has << at for at, has in enumerate(present[start : start + _BITS]))
            for start in range(0, len(present), _BITS)]  # fmt: skip
    alike = examined.alike_over(axes)
    seen = seen or Seen(norms=[0.0] * len(alike))
    # found_inf, 1 + the parameter that is not finite, its rank on each axis; norms; bits of all ranks; bits of any
    head = [int(seen.found_inf), seen.nonfinite, *(axis.rank for axis in axes)]
    middle = [struct.unpack("q", struct.pack("d", norm))[0] for norm in seen.norms]
    after = len(head) + len(middle)

    def merge(axis: Axis, rows: list[tuple[int, ...]]) -> list[int]:
        first = next((row for row in rows if row[1]), rows[0])
        columns = list(zip(*(row[after:] for row in rows), strict=True))
        everywhere = [functools.reduce(operator.and_, column) for column in columns[: len(bits)]]
        anywhere = [functools.reduce(operator.or_, column) for column in columns[len(bits) :]]
        _refuse_missing(optimizer, axis, names, [row[after : after + len(bits)] for row in rows], anywhere)
        for place, one in enumerate(alike):
            if one is axis and not first[1]:
                _refuse_different(optimizer, axis, tuple(row[len(head) + place] for row in rows))
        return [
            max(row[0] for row in rows), *first[1 : len(head)], *rows[0][len(head) : after], *everywhere, *anywhere
        ]  # fmt: skip

    known = gather_verdict(
        axes, f"{optimizer}.step", _Options(examined.settings), [*head, *middle, *bits, *bits], merge, examined.fault
    )
    has = [bool(known[after + at // _BITS] >> at % _BITS & 1) for at in range(len(present))]
    where = ", ".join(f"rank {rank} of {axis.size}" for axis, rank in zip(axes, known[2 : len(head)], strict=True))
    words = f"the gradient of {names[known[1] - 1]} is not finite" if known[1] else None
    return Findings(has, words and words + (f" on {where}" if where else ""), bool(known[0]))


def find_sparse(optimizer: str, examined: Examined, rank: int) -> Exception | None:
    """Whether a gradient is sparse."""
    for grad, name in zip(examined.grads, examined.names, strict=True):
        if grad is not None and grad.layout != torch.strided:
            return TypeError(f"{optimizer}: the gradient of {name} is {grad.layout}, not dense (rank {rank})")
    return None


def first_nonfinite(grads: Sequence[tuple[int, Tensor]]) -> int:
    """1 + the index of the first gradient that is not finite; 0 if there is none."""
    if is_finite(*(grad for _, grad in grads)):
        return 0
    return next(1 + index for index, grad in grads if not is_finite(grad))


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


def compare_weights(
    label: str, names: Sequence[str], digests: Sequence[int], over: Sequence[list[Axis]], axes: Sequence[Axis]
) -> None:
    """Raise on every rank if a parameter differs between the ranks of an axis in ``over[i]``, the i-th of ``names``.

    The digest of each, 8 bytes, is gathered along one axis after the other.
    """
    if not digests:
        return

    def merge(axis: Axis, rows: list[tuple[int, ...]]) -> list[int]:
        found = list(rows[0])
        for place, column in enumerate(zip(*rows, strict=True)):
            if len(set(column)) == 1:
                continue
            if any(one.counter is axis.counter for one in over[place]):
                other = [rank for rank, digest in enumerate(column) if digest != column[0]]
                raise ValueError(
                    f"{label}: {names[place]} has other weights on {name_ranks(other)} of {len(column)} than on "
                    f"rank 0; make the model the same on all ranks, or call weft.broadcast_parameters(model, "
                    f"group=...) before the first step"
                )
            found[place] = zlib.crc32(repr(column).encode())  # shards, whose replicas on the next axis have the same
        return found

    gather_verdict(axes, f"{label}.weights", _Options(len(digests)), digests, merge)


@torch.no_grad()
def digest_of(tensor: Tensor) -> Tensor:
    """63 bits of a tensor's bits and their order, where it is. Sums of integers: the same on every device.

    >>> bool(digest_of(torch.tensor([1.0, 2.0])) == digest_of(torch.tensor([2.0, 1.0])))
    False
    """
    flat = tensor.detach().reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), _CHUNK):
        bits = flat[start : start + _CHUNK].contiguous().view(_INTEGERS[flat.element_size()]).to(torch.int64)
        place = torch.arange(start, start + len(bits), device=flat.device)
        mixed = (bits + 0x9E3779B97F4A7C1) * (place * 0x5851F42D4C957F2D + 1)
        total += (mixed ^ (mixed >> 29)).sum()
    return total >> 1
