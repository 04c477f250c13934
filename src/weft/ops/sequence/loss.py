"""`mean_loss`: the mean over all tokens of a group, with the gradient that averaging over its ranks makes right."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.comm import Axis
from weft.comm.arguments import at, find_number_fault, find_tensor_fault, read
from weft.comm.device import runs_behind, start_copy_to_host
from weft.comm.function import RankFunction, eager
from weft.comm.rounds import gather_rows
from weft.errors import name_ranks
from weft.ops.sequence.layout import DTYPES


@dataclass(frozen=True)
class _Options:
    """What the ranks must have in common."""

    dtype: torch.dtype
    device: str  # its type
    counted: str  # by "nobody", a number of the "host", or a tensor of the "device"


@eager
def mean_loss(loss_sum: Tensor, count: float | Tensor | None = None, *, group: Any = None) -> Tensor:
    """The mean loss over all tokens of ``group``, the same value on every rank, in the dtype of ``loss_sum``.

    ``loss_sum`` is the sum of the losses of this rank's tokens, a tensor of one element; ``count`` is how many there
    are (or the sum of their weights). Ignored tokens are in neither. Both may be 0 on some ranks; where no rank has a
    token the mean is 0 and so is its gradient. ``count=None``: the ``loss_sum`` of a rank is its share of the mean
    already, divided by the number of all tokens.

    Call ``backward()`` on it on every rank. DistributedDataParallel, FSDP2, `ShardedAdamW`, ``data_group`` of
    `REKLS` and `OverlappedStep` average gradients over ranks, so a rank's gradient is P times that of its
    share, where P are the ranks of ``group``: their average is the gradient of the mean, and norms and clipping are
    right. Do not multiply by P. Second derivatives are refused on more than one rank.

    Two numbers of each rank travel, in one round. A ``loss_sum`` on a device is not read by the host: it travels from
    there, as fp64, in a second round, and so does a ``count`` there. What is wrong with such a count (negative, not
    finite, or losses without a token) makes the mean and its gradient NaN on all ranks; of a number it raises.

    >>> mean_loss(torch.tensor(6.0), 4)
    tensor(1.5000)
    """
    axis = Axis.of(group)
    found = read("mean_loss", axis.rank, lambda: _read(loss_sum, count, axis.rank))
    if isinstance(found, Exception):
        axis.refuse("mean_loss", found, metadata=3)
    options, numbers, needs = found
    call = axis.begin("mean_loss", options, metadata=[*map(_as_integer, numbers), int(needs)])
    gathered = call.metadata.wait()
    without = [rank for rank, row in enumerate(gathered) if not row[2]]
    if 0 < len(without) < axis.size:
        raise ValueError(
            f"mean_loss: loss_sum has no gradient on {name_ranks(without)} of {axis.size}, but on other ranks; compute "
            f"it from the model's output there too: the sum over no tokens is 0 and has a gradient"
        )
    losses, tokens = (math.fsum(_as_float(row[at]) for row in gathered) for at in range(2))
    total: Tensor | None = None
    mean: Tensor
    if isinstance(count, Tensor) and options.counted == "device":
        mine = torch.stack([one.detach().double().reshape(()) for one in (loss_sum, count)])
        mean = _Mean.apply(loss_sum, *_mean_on_device(gather_rows(call, mine).wait()), axis)
        return mean
    if runs_behind(loss_sum.device):
        total = gather_rows(call, loss_sum.detach().double().reshape(1)).wait().sum()
        if count is not None and tokens == 0:  # on all ranks alike, and then there is nothing to wait for
            losses = float(start_copy_to_host(total).wait())
    if count is None:
        tokens = 1.0
    if tokens == 0 and losses != 0:
        raise ValueError(
            f"mean_loss: there are no tokens on any of {axis.size} ranks, but their losses add up to {losses}"
        )
    value = (losses if total is None else total) / tokens if tokens else 0.0
    mean = _Mean.apply(loss_sum, value, axis.size / tokens if tokens else 0.0, axis)
    return mean


def _read(loss_sum: Tensor, count: float | Tensor | None, rank: int) -> tuple[_Options, list[float], bool] | Exception:
    """What the ranks must have in common, this rank's two numbers, and whether a gradient is wanted; or a fault.

    What is on a device is 0 there.
    """
    words = "a floating-point tensor, the sum of the losses of this rank's tokens"
    if fault := find_tensor_fault("mean_loss", "loss_sum", loss_sum, rank, DTYPES, words):
        return fault
    if loss_sum.numel() != 1:
        return ValueError(f"mean_loss: loss_sum must have one element, got {list(loss_sum.shape)}{at(rank)}")
    stays = isinstance(count, Tensor) and runs_behind(count.device) and count.device == loss_sum.device
    if isinstance(count, Tensor):  # one that stays there is looked at for its kind alone
        count = torch.zeros(count.shape, dtype=count.dtype, device="cpu") if stays else start_copy_to_host(count).wait()
    if count is not None:
        if fault := find_number_fault("mean_loss", "count", count, rank, tensor=True):
            return fault
        if float(count) < 0:
            return ValueError(f"mean_loss: count must not be negative, got {float(count)}{at(rank)}")
    loss = 0.0 if runs_behind(loss_sum.device) else float(loss_sum.detach().double())
    numbers = [loss, 0.0 if count is None else float(count)]
    counted = "nobody" if count is None else "device" if stays else "host"
    options = _Options(loss_sum.dtype, loss_sum.device.type, counted)
    return options, numbers, loss_sum.requires_grad and torch.is_grad_enabled()


def _as_integer(number: float) -> int:
    """The bits of a number, to be gathered as an integer."""
    return int(struct.unpack("q", struct.pack("d", number))[0])


def _as_float(bits: int) -> float:
    return float(struct.unpack("d", struct.pack("q", bits))[0])


def _mean_on_device(pairs: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and the scale of its gradient, of losses and counts of all ranks, ``[P, 2]``; NaN if these are wrong."""
    losses, tokens = pairs.sum(0)
    counts = pairs[:, 1]
    right = (counts.isfinite() & (counts >= 0)).all() & ((tokens > 0) | (losses == 0))
    value, scale = (torch.where(tokens > 0, one / tokens, 0.0) for one in (losses, float(len(pairs))))
    return torch.where(right, value, math.nan), torch.where(right, scale, math.nan)


class _Mean(RankFunction):
    operation = "mean_loss"
    any_order = True

    @staticmethod
    def forward(ctx: Any, loss_sum: Tensor, value: float | Tensor, scale: float | Tensor, axis: Axis) -> Tensor:
        ctx.scale, ctx.size = scale, axis.size
        return (
            torch.empty_like(loss_sum).copy_(value) if isinstance(value, Tensor) else torch.full_like(loss_sum, value)
        )

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        if torch.is_grad_enabled() and ctx.size > 1:  # create_graph
            raise NotImplementedError(
                f"mean_loss: second derivatives are not supported over {ctx.size} ranks, where a rank's gradient is "
                f"{ctx.size} times its share of that of the mean; differentiate the sum of this rank's losses instead"
            )
        return (grad * ctx.scale).to(grad.dtype), None, None, None
