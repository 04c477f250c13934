"""The distributed operation: one autograd Function, whatever the method."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.attention.job import Job
from weft.attention.methods import METHODS, choose_method


class Attention(torch.autograd.Function):
    """out and lse of softmax attention over a sequence that lies on the ranks of an axis.

    | crosses ranks   | forward                                  | backward                                     |
    |-----------------|------------------------------------------|----------------------------------------------|
    | lengths         | 8 bytes to everybody                     |                                              |
    | gather, ring    | k, v to the ranks whose queries see them | the same, and dk, dv back to their owner     |
    | ulysses         | q, k, v for heads; out (and lse) back    | grad of out for heads; dq, dk, dv back       |

    Kept for the backward: q, k, v, out and lse, of this rank's tokens (ulysses: of its heads).
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, job: Job) -> tuple[Tensor, Tensor | None]:
        facts = job.facts(q, k, tuple(ctx.needs_input_grad[:3]))
        call = job.axis.begin("attention", **facts)
        geometry = job.survey(call, q)
        method = job.method
        if method == "auto":
            gathers = job.strides or job.backward_strides or job.backward
            method = "gather" if gathers else choose_method(geometry, q, k, job.grad_dtype)
        out, lse, saved = METHODS[method].forward(job, call, geometry, q, k, v)
        ctx.save_for_backward(*saved)
        ctx.job, ctx.geometry, ctx.facts, ctx.method = job, geometry, facts, job.backward or method
        if not job.return_lse:
            return out, None
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        job, geometry = ctx.job, ctx.geometry
        call = job.axis.begin("attention.backward", **ctx.facts, lengths=geometry.lengths)
        saved = ctx.saved_tensors
        grads = METHODS[ctx.method].backward(job, call, geometry, saved, grad)
        wanted = zip(grads, ctx.needs_input_grad, strict=False)
        return (*(x.to(saved[0].dtype) if need else None for x, need in wanted), None)
