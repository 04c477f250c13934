"""The distributed operation: local kernels around one scan of the states, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.comm import Axis
from weft.comm.function import RankFunction
from weft.ops.linear_attention.chunk import ChunkBackward, ChunkForward
from weft.ops.linear_attention.fused.phases import FusedBackward, FusedForward
from weft.ops.linear_attention.state_scan import (
    SegmentMap,
    SequencePlan,
    StateScan,
    collect_final_gradients,
    plan_dense,
    plan_sequence,
    segment_maps,
    share_final_states,
    states_by_run,
)
from weft.ops.scan import Form, choose
from weft.ops.sequence.layout import Bounds, Sequence, predict, resolve

# The local kernels: plain torch operations anywhere, Triton's on CUDA.
FORWARD: dict[str, type[ChunkForward] | type[FusedForward]] = {"torch": ChunkForward, "triton": FusedForward}
BACKWARD: dict[str, type[ChunkBackward] | type[FusedBackward]] = {"torch": ChunkBackward, "triton": FusedBackward}


@dataclass(frozen=True)
class Options:
    """What the ranks must have in common: everything but their lengths."""

    q: tuple[int, ...]
    v: tuple[int, ...]
    g: tuple[int, ...] | None
    dtype: torch.dtype
    device: str  # its type
    scale: float
    initial_state: tuple[int, ...] | None
    output_final_state: bool
    cu_seqlens: Bounds | None
    layout: str
    lengths: tuple[int, ...] | None  # of a sequence that was made before
    method: str
    chunk_size: int
    gradients: tuple[bool, ...]

    def form(self, device: torch.device) -> Form:
        """The form of one document's map."""
        batch, _, keys = self.q
        shape = torch.Size((batch, self.v[1], keys, self.v[2]))
        # A gate without the dimension of the keys is one number for each state, also where it is constant.
        kind = "none" if self.g is None else "vector" if len(self.g) == 3 else "scalar"
        return Form(kind, shape, torch.promote_types(self.dtype, torch.float32), device)  # type: ignore[arg-type]


class LinearAttention(RankFunction):
    """o and the final states of linear attention over a sequence that lies on the ranks of an axis.

    | crosses ranks   | forward                            | backward                              |
    |-----------------|------------------------------------|---------------------------------------|
    | lengths         | a few integers, under the first local work; none if ``sequence`` is given | |
    | state           | exclusive prefix, one scan         | exclusive suffix of its gradient      |
    | final states    | from where they arise to every rank, if asked for | their gradients, back and summed |

    Kept for the backward: the inputs and the states that entered this rank's runs, one [HV, K, V] for each document and
    run. The states between chunks are computed again: that costs one product of fourteen, keeping them would
    cost as much memory as k or v at chunk size 64 and K = V = 64.
    """

    operation = "linear_attention"

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, initial: Tensor | None, options: Options,
        axis: Axis, sequence: Sequence | None, backend: str,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        batch, form = q.shape[0], options.form(q.device)
        method = choose(form, axis.size) if options.method == "auto" else options.method
        call = axis.begin("linear_attention", options, metadata=None if sequence else (q.shape[1],))

        def work_on(plan: SequencePlan) -> list[ChunkForward | FusedForward]:
            return [
                FORWARD[backend](q[:, t], k[:, t], v[:, t], _cut(g, t), options.scale, run.lengths, options.chunk_size)
                for run in plan.runs
                for t in [run.tokens]
            ]

        if options.cu_seqlens is None or sequence is not None:
            plan = plan_dense(axis, options.layout, q.shape[1]) if sequence is None else plan_sequence(sequence)
            scan = StateScan(call, plan, form, method)
            kernels = work_on(plan)
            if sequence is None:
                call.metadata.wait()
        else:  # packed, and lengths are still being gathered: begin on a prediction, and again if it was wrong
            predicted = predict(axis, q.shape[1], options.layout, options.cu_seqlens)
            if predicted is not None:
                plan = plan_sequence(predicted)
                kernels = work_on(plan)
            sequence = resolve("linear_attention", call, axis, options.layout, options.cu_seqlens)
            if predicted is None or predicted.lengths != sequence.lengths:
                plan = plan_sequence(sequence)
                kernels = work_on(plan)
            scan = StateScan(call, plan, form, method)
        found = [kernel.maps for kernel in kernels]
        maps = segment_maps(plan, found, batch)
        travelling = scan.start(maps, None if initial is None else initial.detach().to(form.dtype))
        for kernel in kernels:
            kernel.intra()
        entering = travelling.wait()
        arriving = None
        if options.output_final_state:
            ended = {
                one.segment.document: one.own.apply(state)
                for one, state in zip(maps, entering, strict=True)
                if one.segment.is_last
            }
            arriving = share_final_states(call, plan, ended, batch, like=found[0][1])
        states = states_by_run(plan, entering, found)
        outs = [kernel.finish(state)[0] for kernel, state in zip(kernels, states, strict=True)]
        ctx.save_for_backward(q, k, v, g, initial, *states)
        ctx.axis = axis
        ctx.how = options, plan, method, backend, call.number
        ctx.set_materialize_grads(False)
        return _join(outs), None if arriving is None else arriving.wait()

    @staticmethod
    def backward(ctx: Any, grad_o: Tensor | None, grad_final: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, g, initial, *states = ctx.saved_tensors
        options, plan, method, backend, number = ctx.how
        batch, form = q.shape[0], options.form(q.device)
        call = ctx.axis.begin("linear_attention.backward", options, of=number)
        seeds = None
        if options.output_final_state:
            shape = (batch * len(plan.ends), *form.shape[1:])
            grad_final = form.new_empty(*shape).zero_() if grad_final is None else grad_final.to(form.dtype)
            seeds = collect_final_gradients(call, plan, grad_final, batch)
        scan = StateScan(call, plan, form, method, reverse=True)
        grad_o = torch.zeros_like(v) if grad_o is None else grad_o
        kernels = [
            BACKWARD[backend](
                q[:, t], k[:, t], v[:, t], _cut(g, t), options.scale, run.lengths, options.chunk_size, state,
                grad_o[:, t],
            )
            for run, state in zip(plan.runs, states, strict=True)
            for t in [run.tokens]
        ]  # fmt: skip
        found = [kernel.maps for kernel in kernels]
        maps = segment_maps(plan, found, batch)
        travelling = scan.start(maps, None if seeds is None else seeds.wait())
        for kernel in kernels:
            kernel.intra()
        leaving = states_by_run(plan, travelling.wait(), found)
        grads = [kernel.finish(grad) for kernel, grad in zip(kernels, leaving, strict=True)]
        dq, dk, dv = _join([x[0] for x in grads]), _join([x[1] for x in grads]), _join([x[2] for x in grads])
        gates = [grad[3] for grad in grads if grad[3] is not None]
        dg = None if not gates else sum(gates[1:], start=gates[0]) if gates[0].ndim == 1 else _join(gates)
        wanted = initial if ctx.needs_input_grad[4] else None
        return dq, dk, dv, dg, _initial_gradient(wanted, maps, [grad[4] for grad in grads]), None, None, None, None


def _initial_gradient(initial: Tensor | None, maps: Items[SegmentMap], grads: Items[Tensor]) -> Tensor | None:
    """The gradient of the initial states of the documents that begin here; zero for all others."""
    if initial is None:
        return None
    total = grads[0].new_zeros(initial.shape)
    for one in maps:
        if one.segment.is_first:
            total[one.document_rows] = grads[one.run][one.rows]
    return total.to(initial.dtype)


def _cut(g: Tensor | None, tokens: slice) -> Tensor | None:
    return g if g is None or g.ndim == 1 else g[:, tokens]


def _join(parts: Items[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=1)
