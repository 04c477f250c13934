"""The distributed operation: the local recurrence around one scan of the states, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.comm import Axis
from weft.comm.function import RankFunction
from weft.ops.scan import Form, choose
from weft.ops.scan.state_scan import (
    StateScan,
    collect_final_gradients,
    initial_gradient,
    join_runs,
    plan_sequence,
    segment_maps,
    share_final_states,
    states_by_run,
)
from weft.ops.selective_scan.chunk import SelectiveBackward, SelectiveForward
from weft.ops.sequence.layout import Bounds, Sequence, resolve


@dataclass(frozen=True)
class Options:
    """What the ranks must have in common: everything but their lengths."""

    u: tuple[int, ...]
    A: tuple[int, ...]
    B: tuple[int, ...]
    D: bool
    z: bool
    delta_bias: bool
    delta_softplus: bool
    dtype: torch.dtype
    device: str  # its type
    initial_state: bool
    return_last_state: bool
    cu_seqlens: Bounds | None
    layout: str
    lengths: tuple[int, ...] | None  # of a sequence that was made before
    method: str
    chunk_size: int
    gradients: tuple[bool, ...]

    def form(self, device: torch.device) -> Form:
        """The form of one document's map."""
        shape = torch.Size((self.u[0], *self.A, 1))
        return Form("vector", shape, torch.promote_types(self.dtype, torch.float32), device)


class SelectiveScan(RankFunction):
    """y and the last states ``[B*N, D, N, 1]`` of a selective scan over a sequence on the ranks of an axis.

    | crosses ranks | forward                                       | backward                         |
    |---------------|-----------------------------------------------|----------------------------------|
    | lengths       | a few integers; none if ``sequence`` is given |                                  |
    | state         | exclusive prefix, one scan                    | exclusive suffix of its gradient |
    | last states   | from where they arise to every rank, if asked for | their gradients, back and summed |

    Kept for the backward: the inputs and the states that entered this rank's runs. States of tokens are computed again,
    some chunks at a time.
    """

    operation = "selective_scan"

    @staticmethod
    def forward(
        ctx: Any, u: Tensor, d: Tensor, A: Tensor, B: Tensor, C: Tensor, initial: Tensor | None, options: Options,
        axis: Axis, sequence: Sequence | None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        batch, form = u.shape[0], options.form(u.device)
        method = choose(form, axis.size) if options.method == "auto" else options.method
        call = axis.begin("selective_scan", options, metadata=None if sequence else (u.shape[1],))
        known = sequence or resolve("selective_scan", call, axis, options.layout, options.cu_seqlens)
        plan = plan_sequence(known)
        scan = StateScan(call, plan, form, method)
        kernels = [
            SelectiveForward(u[:, t], d[:, t], A, B[:, t], C[:, t], run.lengths, options.chunk_size)
            for run in plan.runs
            for t in [run.tokens]
        ]
        found = [kernel.maps for kernel in kernels]
        maps = segment_maps(plan, found, batch)
        travelling = scan.start(maps, None if initial is None else initial.detach().to(form.dtype))
        for kernel in kernels:
            kernel.intra()
        entering = travelling.wait()
        arriving = None
        if options.return_last_state:
            ended = {
                one.segment.document: one.own.apply(state)
                for one, state in zip(maps, entering, strict=True)
                if one.segment.is_last
            }
            arriving = share_final_states(call, plan, ended, batch, like=found[0][1])
        states = states_by_run(plan, entering, found)
        outs = [kernel.finish(state) for kernel, state in zip(kernels, states, strict=True)]
        ctx.save_for_backward(u, d, A, B, C, initial, *states)
        ctx.axis = axis
        ctx.how = options, plan, method, call.number
        ctx.set_materialize_grads(False)
        return join_runs(outs), None if arriving is None else arriving.wait()

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor | None, grad_last: Tensor | None) -> tuple[Tensor | None, ...]:
        u, d, A, B, C, initial, *states = ctx.saved_tensors
        options, plan, method, number = ctx.how
        batch, form = u.shape[0], options.form(u.device)
        call = ctx.axis.begin("selective_scan.backward", options, of=number)
        seeds = None
        if options.return_last_state:
            shape = (batch * len(plan.ends), *form.shape[1:])
            grad_last = form.new_empty(*shape).zero_() if grad_last is None else grad_last.to(form.dtype)
            seeds = collect_final_gradients(call, plan, grad_last, batch)
        scan = StateScan(call, plan, form, method, reverse=True)
        dy = torch.zeros_like(u) if grad_y is None else grad_y
        kernels = [
            SelectiveBackward(
                u[:, t], d[:, t], A, B[:, t], C[:, t], run.lengths, options.chunk_size, state, dy[:, t]
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
        du, dd, parts, dB, dC, starts = (list(one) for one in zip(*grads, strict=True))
        wanted = initial if ctx.needs_input_grad[5] else None
        return (
            join_runs(du), join_runs(dd), sum(parts[1:], start=parts[0]), join_runs(dB), join_runs(dC),
            initial_gradient(wanted, maps, starts), None, None, None,
        )  # fmt: skip
