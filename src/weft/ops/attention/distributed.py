"""The distributed operation: the table of methods, and one autograd Function whatever the method.

A new method is a file with its communication and an entry in the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from weft.comm import Axis, Call
from weft.comm.function import RankFunction, tie
from weft.ops.attention.blockwise import Grads, Saved, backward_by_blocks, begin_by_blocks, forward_by_blocks
from weft.ops.attention.gather import gather
from weft.ops.attention.heads import deal_heads, head_parts
from weft.ops.attention.plan import AttentionPlan, Options, count
from weft.ops.attention.ring import ring
from weft.ops.attention.ulysses import backward_by_heads, begin_by_heads, forward_by_heads, own_only, wire_dtype
from weft.ops.sequence.layout import Sequence, predict, resolve
from weft.ops.sequence.mask import Mask

UNBALANCED = 1.25  # the slowest rank's share of scores over the mean, from which balance is worth more than bytes


@dataclass(frozen=True)
class Method:
    """begin: (options, call, plan, q, k, v) -> local work to do while lengths are gathered, on a predicted plan;
    forward: (.., what begin returned or None, sinks) -> (out, lse, saved); backward: (options, call, plan, saved, grad,
    grad_lse, sinks) -> (dq, dk, dv, this rank's part of dsinks)."""

    begin: Callable[[Options, Call, AttentionPlan, Tensor, Tensor, Tensor], Any]
    forward: Callable[
        [Options, Call, AttentionPlan, Tensor, Tensor, Tensor, Any, Tensor | None], tuple[Tensor, Tensor, Saved]
    ]  # fmt: skip
    backward: Callable[[Options, Call, AttentionPlan, Saved, Tensor, Tensor | None, Tensor | None], Grads]
    moves_queries: bool = False  # so that gradients of their lse travel: all ranks have them then, or none


METHODS: dict[str, Method] = {
    "gather": Method(begin_by_blocks, partial(forward_by_blocks, gather), partial(backward_by_blocks, gather)),
    "ring": Method(begin_by_blocks, partial(forward_by_blocks, ring), partial(backward_by_blocks, ring)),
    "ulysses": Method(
        begin_by_heads, partial(forward_by_heads, own_only), partial(backward_by_heads, own_only), moves_queries=True
    ),
}
TWO_LEVELS: dict[tuple[str, str], Method] = {
    ("ulysses", name): Method(
        begin_by_heads, partial(forward_by_heads, schedule), partial(backward_by_heads, schedule), moves_queries=True
    )
    for name, schedule in (("gather", gather), ("ring", ring))
}
NAMES: tuple[str | tuple[str, str], ...] = ("auto", *METHODS, *TWO_LEVELS)


def method_of(name: str | tuple[str, str]) -> Method:
    """From either table."""
    return METHODS[name] if isinstance(name, str) else TWO_LEVELS[name]


def resolve_method(options: Options, plan: AttentionPlan) -> str | tuple[str, str]:
    """The method asked for; for "auto" the one that suits this plan, the same on every rank."""
    if options.method != "auto":
        return options.method
    if options.strides or options.backward_strides or options.backward:
        return "gather"
    return choose_method(plan, options.q[1], options.kv_heads, options.dtype, options.grad_dtype)


def choose_method(
    plan: AttentionPlan, heads: int, kv_heads: int, dtype: torch.dtype, grad_dtype: torch.dtype | None
) -> str:
    """gather or ulysses: whichever moves fewer bytes in a forward and backward, unless it is far less in balance.

    Both are counted on this very mask, layout and deal of heads, and every rank finds the same.
    """
    size = plan.size
    if size == 1:
        return "gather"
    pairs = [plan.pairs(rank) for rank in range(size)]
    most_pairs, most_heads = max(pairs) * heads, max(deal_heads(heads, kv_heads, size)) * sum(pairs)
    if most_pairs > UNBALANCED * most_heads:
        return "ulysses"
    if most_heads > UNBALANCED * most_pairs:
        return "gather"
    wide = grad_dtype or torch.promote_types(dtype, torch.float32)
    moved = sum(count(plan.visible_to(a, b)) for a in range(size) for b in range(size))
    gather_bytes = 2 * kv_heads * moved * (2 * dtype.itemsize + wide.itemsize)
    ulysses_bytes = 0
    for length, parts in zip(plan.lengths, head_parts(heads, kv_heads, size), strict=True):
        for part in parts:
            back = wire_dtype(part, dtype, grad_dtype).itemsize
            token = 4 * part.heads * dtype.itemsize + 2 * part.kv_heads * (dtype.itemsize + back)
            ulysses_bytes += (sum(plan.lengths) - length) * token
    return "gather" if gather_bytes <= ulysses_bytes else "ulysses"


def find_mask_fault(mask: Mask | None, lengths: tuple[int, ...], where: str = "") -> Exception | None:
    """The error for a mask of another sequence."""
    if mask is None or mask.total == sum(lengths):
        return None
    return ValueError(
        f"attention: mask is of {mask.total} tokens, but the ranks hold {list(lengths)}, {sum(lengths)} in all; it "
        f"must be of the whole sequence{where}"
    )


class Attention(RankFunction):
    """out and lse of softmax attention over a sequence that lies on the ranks of an axis.

    | crosses ranks   | forward                                  | backward                                     |
    |-----------------|------------------------------------------|----------------------------------------------|
    | lengths         | a few integers, under the first local work; none if ``sequence`` is given | |
    | gather, ring    | k, v to the ranks whose queries see them | the same, and dk, dv back to their owner     |
    | ulysses         | q, k, v for heads; out (and lse) back    | grad of out (and lse) for heads; dq, dk, dv back |
    | on two levels   | ulysses among the inner ranks, gather or ring among the outer | both                    |

    Kept for the backward: q, k, v, out and lse, of this rank's tokens (ulysses: of its heads), and the sinks, which
    every rank has; their gradient is this rank's part of the sum over ranks.
    """

    operation = "attention"

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: Options, axis: Axis, sequence: Sequence | None,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        call = axis.begin("attention", options, metadata=None if sequence else (q.shape[1],))
        begun: Any = None
        begun_by: str | tuple[str, str] = ""
        if sequence is None:
            whole = None if options.mask is None else (0, options.mask.total)
            predicted = predict(axis, q.shape[1], options.layout, options.cu_seqlens or whole)
            if predicted is not None:
                plan = options.plan(predicted)
                begun_by = resolve_method(options, plan)
                begun = method_of(begun_by).begin(options, call, plan, q, k, v)
            sequence = resolve("attention", call, axis, options.layout, options.cu_seqlens)
            if fault := find_mask_fault(options.mask, sequence.lengths):
                raise fault
        plan = options.plan(sequence)
        method = resolve_method(options, plan)
        begun = begun if method == begun_by else None
        out, lse, saved = method_of(method).forward(options, call, plan, q, k, v, begun, sinks)
        ties = () if saved[0] is q else (tie(x) for x in (q, k, v) if x.requires_grad)
        ctx.save_for_backward(sinks, *saved, *ties)
        ctx.axis = axis
        ctx.how = options, plan, options.backward or method, len(saved), call.number
        ctx.set_materialize_grads(False)  # most who ask for lse want no gradient of it, and kernels are faster without
        return out, lse if options.return_lse else None

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        options, plan, method, count, number = ctx.how
        asks = options.return_lse and method_of(method).moves_queries
        metadata = (int(grad_lse is not None),) if asks else None
        call = ctx.axis.begin("attention.backward", options, metadata=metadata, of=number)
        sinks, *saved = ctx.saved_tensors[: count + 1]
        shape = options.q[0], plan.lengths[call.rank], options.q[1]
        if grad is None:
            grad = saved[0].new_zeros(*shape, saved[2].shape[3])
        if asks and any(has for (has,) in call.metadata.wait()) and grad_lse is None:
            grad_lse = saved[4].new_zeros(shape)
        learned = sinks if ctx.needs_input_grad[-1] else None
        *grads, dsinks = method_of(method).backward(options, call, plan, tuple(saved), grad, grad_lse, learned)
        wanted = zip(grads, ctx.needs_input_grad, strict=False)
        of_tokens = (x.to(saved[0].dtype) if need else None for x, need in wanted)
        return (*of_tokens, None, None, None, None if dsinks is None else dsinks.to(sinks.dtype))
