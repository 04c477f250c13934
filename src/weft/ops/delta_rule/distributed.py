"""The distributed operation: the local delta rule around one scan of dense maps, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.comm import Axis
from weft.comm.function import RankFunction
from weft.ops.delta_rule.backward import ChunkBackward
from weft.ops.delta_rule.chunk import ChunkForward, Inputs
from weft.ops.scan import Form, choose
from weft.ops.scan.state_scan import (
    LocalRun,
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
        return Form("dense", shape, torch.promote_types(self.dtype, torch.float32), device)


class DeltaRule(RankFunction):
    """o and the final states of the delta rule over a sequence that lies on the ranks of an axis.

    | crosses ranks | forward                              | backward                                  |
    |---------------|--------------------------------------|-------------------------------------------|
    | lengths       | a few integers, under the first local work; none if ``sequence`` is given | |
    | maps          | exclusive prefix, one scan; ring and pipeline send states only | exclusive suffix, transposed |
    | final states  | from where they arise to every rank, if asked for | their gradients, back and summed |

    Kept for the backward: the inputs, the states that entered this rank's runs and, where one came from another run,
    the run's map [HV, K, K] and what the state was multiplied by, [T, HV, K] in fp32. All else is computed again, under
    the exchange.
    """

    operation = "delta_rule"

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, initial: Tensor | None,
        options: Options, axis: Axis, sequence: Sequence | None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        batch, form, inputs = q.shape[0], options.form(q.device), Inputs(q, k, v, beta, g)
        method = choose(form, axis.size) if options.method == "auto" else options.method
        call = axis.begin("delta_rule", options, metadata=None if sequence else (q.shape[1],))
        start = None if initial is None else initial.detach().to(form.dtype)

        def work_on(plan: SequencePlan) -> list[ChunkForward]:
            return [
                ChunkForward(
                    inputs.cut(run.tokens), options.scale, run.lengths, options.chunk_size,
                    None if _enters(run) else _rows_of(start, run, batch), _enters(run),
                )
                for run in plan.apart().runs
            ]  # fmt: skip

        plan, scan, kernels = begin_work(
            "delta_rule", call, axis, options.layout, options.cu_seqlens, q.shape[1], sequence, form, method, work_on
        )
        plan = plan.apart()
        found = [_sent(kernel.maps, run, form) for kernel, run in zip(kernels, plan.runs, strict=True)]
        maps = segment_maps(plan, found, batch, dense=True)
        travelling = scan.start(maps, None)
        for kernel in kernels:
            kernel.intra()
        entering = travelling.wait()
        arriving = None
        if options.output_final_state:
            ended = {
                one.segment.document: one.own.state if one.segment.is_first else one.own.apply(state)
                for one, state in zip(maps, entering, strict=True)
                if one.segment.is_last
            }
            arriving = share_final_states(call, plan, ended, batch, like=found[0][1])
        arrived = states_by_run(plan, entering, found)
        outs = [kernel.finish(state) for kernel, state in zip(kernels, arrived, strict=True)]
        states = [
            state if _enters(run) else _rows_of(start, run, batch)
            for state, run in zip(arrived, plan.runs, strict=True)
        ]
        transitions, lefts = [kernel.maps[0] for kernel in kernels], [kernel.left for kernel in kernels]
        ctx.save_for_backward(q, k, v, beta, g, initial, *states, *transitions, *lefts)
        ctx.axis = axis
        ctx.how = options, plan, method, call.number
        ctx.set_materialize_grads(False)
        return join_runs(outs), None if arriving is None else arriving.wait()

    @staticmethod
    def backward(ctx: Any, grad_o: Tensor | None, grad_final: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, beta, g, initial, *kept = ctx.saved_tensors
        options, plan, method, number = ctx.how
        batch, form, inputs = q.shape[0], options.form(q.device), Inputs(q, k, v, beta, g)
        call = ctx.axis.begin("delta_rule.backward", options, of=number)
        seeds = None
        if options.output_final_state:
            shape = (batch * len(plan.ends), *form.shape[1:])
            grad_final = form.new_empty(*shape).zero_() if grad_final is None else grad_final.to(form.dtype)
            seeds = collect_final_gradients(call, plan, grad_final, batch)
        scan = StateScan(call, plan, form, method, reverse=True)
        grad_o = torch.zeros_like(v) if grad_o is None else grad_o
        count = len(plan.runs)
        kernels = [
            ChunkBackward(
                inputs.cut(run.tokens), options.scale, run.lengths, options.chunk_size, state, grad_o[:, run.tokens],
                left, transition,
            )
            for run, state, transition, left in zip(
                plan.runs, kept[:count], kept[count : 2 * count], kept[2 * count :], strict=True
            )
        ]  # fmt: skip
        found = [_sent(kernel.maps, run, form) for kernel, run in zip(kernels, plan.runs, strict=True)]
        maps = segment_maps(plan, found, batch, dense=True)
        travelling = scan.start(maps, None if seeds is None else seeds.wait())
        for kernel in kernels:
            kernel.intra()
        leaving = states_by_run(plan, travelling.wait(), found)
        grads = [kernel.finish(grad) for kernel, grad in zip(kernels, leaving, strict=True)]
        dq, dk, dv, dbeta = (join_runs(parts) for parts in list(zip(*grads, strict=True))[:4])
        gates = [grad[4] for grad in grads if grad[4] is not None]
        wanted = initial if ctx.needs_input_grad[5] else None
        start = initial_gradient(wanted, maps, [grad[5] for grad in grads])
        return dq, dk, dv, dbeta, join_runs(gates) if gates else None, start, None, None, None


def _enters(run: LocalRun) -> bool:
    """Whether the one segment of ``run`` goes on from another run."""
    return bool(run.segments) and not run.segments[0].is_first


def _rows_of(states: Tensor | None, run: LocalRun, batch: int) -> Tensor | None:
    """Of all documents' states, those of the documents of a run that begin there."""
    if states is None or not run.segments:
        return None
    return torch.cat([states[one.document * batch : (one.document + 1) * batch] for one in run.segments])


def _sent(maps: tuple[Tensor | None, Tensor], run: LocalRun, form: Form) -> tuple[Tensor | None, Tensor]:
    """The maps of a run's segments. What begins here leaves as it does whatever the map before it is: M is zero."""
    transition, state = maps
    if transition is None and any(one.path.size > 1 for one in run.segments):
        transition = form.new_empty(*state.shape[:-1], state.shape[-2]).zero_()
    return transition, state
