"""The distributed operation: local kernels around one scan of the states, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from weft.comm import Axis
from weft.comm.function import RankFunction
from weft.ops.linear_attention.chunk import ChunkBackward, ChunkForward
from weft.ops.linear_attention.fused.phases import FusedBackward, FusedForward
from weft.ops.scan import Form, choose
from weft.ops.scan.state_scan import (
    SequencePlan,
    StateScan,
    begin_work,
    collect_final_gradients,
    initial_gradient,
    join_runs,
    segment_maps,
    share_final_states,
    states_by_run,
)
from weft.ops.sequence.layout import Bounds, Sequence

# The local kernels: plain torch operations anywhere, Triton's on CUDA.
FORWARD: dict[str, type[ChunkForward] | type[FusedForward]] = {"torch": ChunkForward, "triton": FusedForward}
BACKWARD: dict[str, type[ChunkBackward] | type[FusedBackward]] = {"torch": ChunkBackward, "triton": FusedBackward}


@dataclass(frozen=True)
class Options:
    """What the ranks must have in common: everything but their lengths."""

    operation: ClassVar[str] = "linear_attention"  # what their calls are named
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
        call = axis.begin(options.operation, options, metadata=None if sequence else (q.shape[1],))

        def work_on(plan: SequencePlan) -> list[ChunkForward | FusedForward]:
            return [
                FORWARD[backend](q[:, t], k[:, t], v[:, t], _cut(g, t), options.scale, run.lengths, options.chunk_size)
                for run in plan.runs
                for t in [run.tokens]
            ]

        plan, scan, kernels = begin_work(
            options.operation,
            call,
            axis,
            options.layout,
            options.cu_seqlens,
            q.shape[1],
            sequence,
            form,
            method,
            work_on,
        )
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
        return join_runs(outs), None if arriving is None else arriving.wait()

    @staticmethod
    def backward(ctx: Any, grad_o: Tensor | None, grad_final: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, g, initial, *states = ctx.saved_tensors
        options, plan, method, backend, number = ctx.how
        batch, form = q.shape[0], options.form(q.device)
        call = ctx.axis.begin(f"{options.operation}.backward", options, of=number)
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
        dq, dk, dv = (join_runs(parts) for parts in list(zip(*grads, strict=True))[:3])
        gates = [grad[3] for grad in grads if grad[3] is not None]
        dg = None if not gates else sum(gates[1:], start=gates[0]) if gates[0].ndim == 1 else join_runs(gates)
        wanted = initial if ctx.needs_input_grad[4] else None
        return dq, dk, dv, dg, initial_gradient(wanted, maps, [grad[4] for grad in grads]), None, None, None, None


def _cut(g: Tensor | None, tokens: slice) -> Tensor | None:
    return g if g is None or g.ndim == 1 else g[:, tokens]
