"""Both attentions of the trainer's model as they are simply done: gather everything first, then compute.

They take what the trainer's mixers take, on a contiguous layout with packed documents, and use weft's own kernels, so
that a comparison is one of what is sent and when it is waited for.

- `gather_then_attend`: all keys and values of the context ranks to each of them, in one blocking all-gather, whether
  their documents meet or not; in the backward again, and a reduction of all gradients.
- `lasp2`: every rank's map of the state to every rank, waited for, then everything local; in the backward again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from weft.bench.attention.baselines import Baseline, options_for, strided
from weft.bench.linear_attention.baselines import CHUNK
from weft.comm import Axis, Call
from weft.ops.linear_attention.distributed import BACKWARD, FORWARD
from weft.ops.scan import Affine, Form
from weft.ops.scan.gather import fold
from weft.ops.sequence import Sequence

FAMILIES = {"strided": "softmax attention", "lasp2": "linear attention"}  # by the names of their calls


def gather_then_attend(q: Tensor, k: Tensor, v: Tensor, where: Sequence) -> Tensor:
    """Causal softmax attention: q ``[1, T, H, D]``, k and v ``[1, T, Hk, D]`` of this rank's tokens."""
    options = options_for(q, k, where.layout, (k.shape[2],), where)
    return Baseline.apply(q, k, v, options, where.axis, strided)


def lasp2(q: Tensor, k: Tensor, v: Tensor, g: Tensor, where: Sequence) -> Tensor:
    """Linear attention without scale: q, k, v ``[1, T, H, D]`` and g ``[1, T, H]`` of this rank's tokens."""
    return PackedLasp2.apply(q, k, v, g, where.axis, Segments.of(where))


@dataclass(frozen=True)
class Segments:
    """The documents on a rank: tokens of each, and whether the first and the last go on beyond the rank."""

    lengths: tuple[int, ...]
    enters: bool
    leaves: bool

    @staticmethod
    def of(where: Sequence) -> Segments:
        """Those of this rank.

        >>> Segments.of(Sequence(Axis.of(None), "contiguous", (5,), (0, 2, 5)))
        Segments(lengths=(2, 3), enters=False, leaves=False)
        """
        assert where.layout == "contiguous", "a rank's tokens are one run"
        begin = sum(where.lengths[: where.axis.rank])
        end = begin + where.length
        bounds = where.bounds or (0, where.total)
        mine = [(low, high) for low, high in pairwise(bounds) if low < end and high > begin]
        lengths = tuple(min(high, end) - max(low, begin) for low, high in mine)
        return Segments(lengths, mine[0][0] < begin, mine[-1][1] > end)


@dataclass(frozen=True)
class Options:
    """What the ranks must have in common."""

    heads: tuple[int, ...]
    dtype: torch.dtype


class PackedLasp2(torch.autograd.Function):
    """LASP-2 where a document's state goes no further than the document."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, axis: Axis, here: Segments) -> Tensor:
        call = axis.begin("lasp2", Options(tuple(v.shape[2:]), v.dtype))
        kernel = FORWARD["torch"](q, k, v, g, 1.0, list(here.lengths), CHUNK)
        entering = _gather(call, kernel.maps, here.enters)
        kernel.intra()
        out, _ = kernel.finish(entering)
        ctx.save_for_backward(q, k, v, g, entering)
        ctx.how = axis, here
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, g, entering = ctx.saved_tensors
        axis, here = ctx.how
        call = axis.begin("lasp2.backward", Options(tuple(v.shape[2:]), v.dtype)).reversed()
        kernel = BACKWARD["torch"](q, k, v, g, 1.0, list(here.lengths), CHUNK, entering, grad)
        log, state = kernel.maps
        # Seen from the end of the sequence a rank's documents come in the opposite order.
        arrived = _gather(call, (None if log is None else log.flip(0), state.flip(0)), here.leaves)
        kernel.intra()
        dq, dk, dv, dg, _ = kernel.finish(None if arrived is None else arrived.flip(0))
        return dq, dk, dv, dg, None, None


def _gather(call: Call, maps: tuple[Tensor | None, Tensor], enters: bool) -> Tensor | None:
    """What arrives in each of a rank's segments ``[N, H, K, V]``, from everybody's map; waited for at once.

    ``maps``: (log decay ``[N, H]``, state) of the segments in the order of the call's ranks. The last one is sent, also
    if its document ends here: then nobody takes it, and it goes no further. What leaves a rank depends on what enters
    it only where one document goes all the way through.
    """
    log, state = maps
    assert log is not None
    through = len(state) == 1 and enters
    own = Affine.of(state[-1:], log[-1:] if through else torch.full_like(log[-1:], -math.inf))
    everybody = torch.stack(call.all_gather(own.flat).wait())
    if not enters:
        return None
    arrived = torch.zeros_like(state)
    arrived[:1] = fold(everybody[: call.rank], Form.of(own.state, own.decay))
    return arrived
