"""`exclusive_scan`: the public operation, its checks and its gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.comm import Axis
from weft.comm.arguments import (
    find_choice_fault,
    find_flag_fault,
    find_integer_fault,
    find_tensor_fault,
    read,
    the_choice,
)
from weft.comm.function import RankFunction, eager
from weft.comm.rounds import Path, ScheduleExecutor
from weft.ops.scan.affine import Affine, Form
from weft.ops.scan.methods import METHODS, schedule
from weft.ops.sequence.layout import DTYPES


@eager
def exclusive_scan(
    state: Tensor,
    *,
    log_decay: Tensor | None = None,
    transition: Tensor | None = None,
    group: Any = None,
    method: str = "doubling",
    reverse: bool = False,
    blocks: int | None = None,
) -> Tensor:
    """The state entering this rank, where each rank turns S into A S + ``state``.

    | argument     | shape                          | A                                        |
    |--------------|--------------------------------|------------------------------------------|
    | (neither)    |                                | 1                                        |
    | `log_decay`  | ``state.shape[:-2]``           | exp(log_decay), one number per state     |
    | `log_decay`  | ``state.shape[:-1]``           | diag(exp(log_decay)), one number per key |
    | `transition` | ``[..., K, K]``                | the matrix                               |

    state: ``[..., K, V]``, the same shape and dtype on every rank of ``group``. Returns a tensor like it:
    zeros on the first rank, on rank r the maps of ranks 0 .. r-1 applied in order to zeros. With
    ``reverse=True`` zeros on the last rank, and the maps of ranks P-1 .. r+1 with transposed transitions, as a
    gradient travels. Differentiable in all three; the gradient is the scan in the other direction, by the
    same method. Computed and sent in fp32 (fp64 for fp64).

    What crosses ranks depends on ``method``, a name of `weft.ops.scan.METHODS`; ``blocks`` is how many pieces
    ``pipeline`` cuts the state into (at most one per row; dense transitions: per column).

    >>> exclusive_scan(torch.ones(2, 3)).sum()          # a world of one: nothing enters
    tensor(0.)
    """
    axis = Axis.of(group)
    fault = read(
        "exclusive_scan",
        axis.rank,
        lambda: _find_fault(axis.rank, state, log_decay, transition, method, reverse, blocks),
    )
    if fault is not None:
        axis.refuse("exclusive_scan", fault)
    method, blocks = the_choice(method, METHODS), None if blocks is None else int(blocks)
    return ExclusiveScan.apply(state, log_decay, transition, axis, method, blocks, reverse, None)


@dataclass(frozen=True)
class Options:
    """What the ranks must have in common."""

    method: str
    state: torch.Size
    dtype: torch.dtype
    device: str  # its type
    decay: torch.Size | None
    transition: bool
    reverse: bool
    blocks: int | None
    gradient: bool


class ExclusiveScan(RankFunction):
    """Exclusive prefix (or suffix, transposed) over ranks. The two are each other's gradient, to any order."""

    operation = "exclusive_scan"
    any_order = True

    @staticmethod
    def forward(
        ctx: Any, state: Tensor, log_decay: Tensor | None, transition: Tensor | None, axis: Axis, method: str,
        blocks: int | None, reverse: bool, of: int | None,
    ) -> Tensor:  # fmt: skip
        """``of``: the number of the scan whose gradient this is."""
        decay = log_decay if transition is None else transition
        options = Options(
            method, state.shape, state.dtype, state.device.type, None if decay is None else decay.shape,
            transition is not None, reverse, blocks, any(ctx.needs_input_grad),
        )  # fmt: skip
        call = axis.begin("exclusive_scan" if of is None else "exclusive_scan.backward", options, of=of)
        applied = transition.mT if reverse and transition is not None else transition
        entering = None
        if axis.size > 1:
            form = Form.of(state, log_decay, applied)
            path = Path.along(call).reversed() if reverse else Path.along(call)
            scan = ScheduleExecutor(call, [(path, schedule(method, path, form, blocks))])
            (entering,) = scan.run(call, [Affine.of(state.to(form.dtype), log_decay, applied)])
        result = state.new_zeros(state.shape) if entering is None else entering.to(state.dtype)
        ctx.save_for_backward(log_decay, transition, result)
        ctx.how = axis, method, blocks, reverse, call.number
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """With E the prefix and D the suffix: d state = the other scan, d A = D E^T (or its part in the logs)."""
        log_decay, transition, result = ctx.saved_tensors
        axis, method, blocks, reverse, number = ctx.how
        other = ExclusiveScan.apply(grad, log_decay, transition, axis, method, blocks, not reverse, number)
        prefix, suffix = (other, result) if reverse else (result, other)
        wide = torch.promote_types(grad.dtype, torch.float32)
        prefix, suffix = prefix.to(wide), suffix.to(wide)
        grad_log = grad_transition = None
        if log_decay is not None and ctx.needs_input_grad[1]:
            products = (prefix * suffix).sum(-1)  # [..., K]
            if log_decay.ndim == prefix.ndim - 2:
                products = products.sum(-1)
            grad_log = (products * log_decay.to(wide).exp()).to(log_decay.dtype)
        if transition is not None and ctx.needs_input_grad[2]:
            grad_transition = (suffix @ prefix.mT).to(transition.dtype)
        return other, grad_log, grad_transition, None, None, None, None, None


def _find_fault(
    rank: int, state: Tensor, log_decay: Tensor | None, transition: Tensor | None, method: str, reverse: bool,
    blocks: int | None,
) -> Exception | None:  # fmt: skip
    name, where = "exclusive_scan", f"(rank {rank})"
    for label, tensor in (("state", state), ("log_decay", log_decay), ("transition", transition)):
        if label != "state" and tensor is None:
            continue
        if fault := find_tensor_fault(name, label, tensor, rank, DTYPES, "a floating tensor"):
            return fault
        assert tensor is not None
        if tensor.device != state.device:
            return ValueError(f"exclusive_scan: {label} is on {tensor.device}, state on {state.device} {where}")
    if state.ndim < 2:
        return ValueError(f"exclusive_scan: state must be [..., K, V], got {list(state.shape)} {where}")
    if log_decay is not None and transition is not None:
        return ValueError(f"exclusive_scan: give log_decay or transition, not both {where}")
    if log_decay is not None and log_decay.shape not in (state.shape[:-2], state.shape[:-1]):
        return ValueError(
            f"exclusive_scan: log_decay {list(log_decay.shape)} fits neither a scalar {list(state.shape[:-2])} nor a "
            f"vector {list(state.shape[:-1])} for state {list(state.shape)} {where}"
        )
    if transition is not None and transition.shape != (*state.shape[:-1], state.shape[-2]):
        return ValueError(
            f"exclusive_scan: transition must be {[*state.shape[:-1], state.shape[-2]]} for state "
            f"{list(state.shape)}, got {list(transition.shape)} {where}"
        )
    if fault := find_choice_fault(name, "method", method, rank, METHODS) or find_flag_fault(
        name, "reverse", reverse, rank
    ):
        return fault
    if blocks is None:
        return None
    if fault := find_integer_fault(name, "blocks", blocks, rank, least=1):
        return fault
    if method != "pipeline":
        return ValueError(f"exclusive_scan: blocks={blocks} is for method 'pipeline' only, not {method!r} {where}")
    return None
