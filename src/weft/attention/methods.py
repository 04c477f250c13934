"""The table of methods. A new one is a file with its communication and an entry here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from weft.attention.gather import gather
from weft.attention.geometry import Geometry, count
from weft.attention.job import Job
from weft.attention.ring import ring
from weft.attention.staged import Saved, Triple, backward_in_stages, forward_in_stages
from weft.attention.ulysses import backward_by_heads, forward_by_heads
from weft.comm import Axis

UNBALANCED = 1.25  # the slowest rank's share of scores over the mean, from which balance is worth more than bytes


@dataclass(frozen=True)
class Method:
    """forward: (job, call, geometry, q, k, v) -> (out, lse, saved); backward: (.., saved, grad) -> (dq, dk, dv)."""

    forward: Callable[[Job, Axis, Geometry, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Saved]]
    backward: Callable[[Job, Axis, Geometry, Saved, Tensor], Triple]
    divides_heads: bool = False  # every rank takes whole heads, so their number must be a multiple of the ranks


METHODS: dict[str, Method] = {
    "gather": Method(partial(forward_in_stages, gather), partial(backward_in_stages, gather)),
    "ring": Method(partial(forward_in_stages, ring), partial(backward_in_stages, ring)),
    "ulysses": Method(forward_by_heads, backward_by_heads, divides_heads=True),
}


def choose_method(geometry: Geometry, q: Tensor, k: Tensor, grad_dtype: torch.dtype | None) -> str:
    """gather or ulysses: whichever moves fewer bytes in a forward and backward, unless gather is out of balance.

    Both are counted on this very mask and layout, and every rank finds the same.
    """
    size, heads, kv_heads = geometry.size, q.shape[2], k.shape[2]
    if size == 1 or heads % size or kv_heads % size:
        return "gather"
    pairs = [geometry.pairs(rank) for rank in range(size)]
    if max(pairs) * size > UNBALANCED * sum(pairs):
        return "ulysses"
    wide = grad_dtype or torch.promote_types(q.dtype, torch.float32)
    travelling = sum(count(geometry.lent(a, b)) for a in range(size) for b in range(size))
    gather_bytes = 2 * kv_heads * travelling * (2 * q.dtype.itemsize + wide.itemsize)
    tokens = sum(geometry.lengths) * (size - 1) / size
    ulysses_bytes = tokens * q.dtype.itemsize * (4 * heads + 4 * kv_heads)
    return "gather" if gather_bytes <= ulysses_bytes else "ulysses"
