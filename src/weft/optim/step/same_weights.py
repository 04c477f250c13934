"""Before the first step: do ranks have the same weights, where they must?"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from weft.comm import Axis
from weft.errors import name_ranks
from weft.optim.step.verdict import gather_verdict
from weft.parallel.dtensor import local_of

if TYPE_CHECKING:
    from weft.optim.step.part import StepPart

_CHUNK = 1 << 20  # elements looked at together: a digest needs little memory
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class _Options:
    """What the ranks must have in common."""

    parameters: int


def compare_weights(label: str, parts: Sequence[StepPart], names: Sequence[str], axes: Sequence[Axis]) -> None:
    """Raise on every rank if a parameter differs between ranks over which a part says that it is replicated.

    Each parameter's digest is told, 8 bytes, along one axis after the other; once for each part, until it has loaded a
    state or got parameters. ``names`` are those of all parts' parameters.
    """
    parameters, over = list[Tensor](), list[list[Axis]]()
    for part in parts:
        for parameter in (parameter for group in part.param_groups for parameter in group["params"]):
            parameters.append(parameter)
            over.append([a for a in part.replicated_over(parameter) if a.size > 1] if part.compares_weights else [])
    asked = [at for at, some in enumerate(over) if some]
    if asked:
        digests = [digest_of(local_of(parameters[at])) for at in asked]

        def merge(axis: Axis, told: list[tuple[int, ...]]) -> list[int]:
            found = list(told[0])
            for place, column in enumerate(zip(*told, strict=True)):
                if len(set(column)) == 1:
                    continue
                if any(one.counter is axis.counter for one in over[asked[place]]):
                    raise _difference(label, names[asked[place]], column)
                found[place] = zlib.crc32(
                    repr(column).encode()
                )  # shards, whose replicas on the next axis have the same
            return found

        gather_verdict(axes, f"{label}.weights", _Options(len(asked)), digests, merge)
    for part in parts:
        part.compares_weights = False


def _difference(label: str, name: str, column: tuple[int, ...]) -> ValueError:
    other = [rank for rank, digest in enumerate(column) if digest != column[0]]
    return ValueError(
        f"{label}: {name} has other weights on {name_ranks(other)} of {len(column)} than on rank 0; make the model the "
        f"same on all ranks, or call weft.broadcast_parameters(model, group=...) before the first step"
    )


@torch.no_grad()
def digest_of(tensor: Tensor) -> int:
    """63 bits of a tensor's bits and their order. Sums of integers: the same on every device.

    >>> digest_of(torch.tensor([1.0, 2.0])) == digest_of(torch.tensor([2.0, 1.0]))
    False
    """
    flat = tensor.detach().reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), _CHUNK):
        bits = flat[start : start + _CHUNK].contiguous().view(_INTEGERS[flat.element_size()]).to(torch.int64)
        place = torch.arange(start, start + len(bits), device=flat.device)
        mixed = (bits + 0x9E3779B97F4A7C1) * (place * 0x5851F42D4C957F2D + 1)
        total += (mixed ^ (mixed >> 29)).sum()
    return int(total) >> 1
