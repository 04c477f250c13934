"""The distributed operation: one autograd Function, whatever the method."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from weft.comm import Axis
from weft.comm.function import RankFunction, tie
from weft.ops.attention.methods import METHODS, resolve_method
from weft.ops.attention.options import Options
from weft.ops.sequence import Sequence
from weft.ops.sequence.sequence import guess, resolve


class Attention(RankFunction):
    """out and lse of softmax attention over a sequence that lies on the ranks of an axis.

    | crosses ranks   | forward                                  | backward                                     |
    |-----------------|------------------------------------------|----------------------------------------------|
    | lengths         | a few integers, under the first local work; none if ``sequence`` is given | |
    | gather, ring    | k, v to the ranks whose queries see them | the same, and dk, dv back to their owner     |
    | ulysses         | q, k, v for heads; out (and lse) back    | grad of out for heads; dq, dk, dv back       |

    Kept for the backward: q, k, v, out and lse, of this rank's tokens (ulysses: of its heads).
    """

    operation = "attention"

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: Options, axis: Axis, sequence: Sequence | None
    ) -> tuple[Tensor, Tensor | None]:
        call = axis.begin("attention", options, metadata=None if sequence else (q.shape[1],))
        started, begun = None, ""
        if sequence is None:
            assumed = guess(axis, q.shape[1], options.layout, options.cu_seqlens)
            if assumed is not None:
                plan = options.plan(assumed)
                begun = resolve_method(options, plan)
                started = METHODS[begun].begin(options, call, plan, q, k, v)
            sequence = resolve("attention", call, axis, options.layout, options.cu_seqlens)
        plan = options.plan(sequence)
        method = resolve_method(options, plan)
        out, lse, saved = METHODS[method].forward(options, call, plan, q, k, v, started if method == begun else None)
        ties = () if saved[0] is q else (tie(x) for x in (q, k, v) if x.requires_grad)
        ctx.save_for_backward(*saved, *ties)
        ctx.axis = axis
        ctx.how = options, plan, options.backward or method, len(saved), call.number
        if not options.return_lse:
            return out, None
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        options, plan, method, count, number = ctx.how
        call = ctx.axis.begin("attention.backward", options, of=number)
        saved = ctx.saved_tensors[:count]
        grads = METHODS[method].backward(options, call, plan, saved, grad)
        wanted = zip(grads, ctx.needs_input_grad, strict=False)
        return (*(x.to(saved[0].dtype) if need else None for x, need in wanted), None, None, None)
