"""The distributed operation: the local delta rule around one scan of dense maps, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.comm import Axis
from weft.comm.function import RankFunction
from weft.ops.delta_rule.backward import ChunkBackward
from weft.ops.delta_rule.chunk import ChunkForward, Inputs
from weft.ops.delta_rule.fused.phases import FusedBackward, FusedForward
from weft.ops.scan import Kind
from weft.ops.scan.arguments import StateOptions
from weft.ops.scan.passes import run_backward, run_forward
from weft.ops.scan.state_scan import LocalRun, SequencePlan, join_runs
from weft.ops.sequence.layout import Sequence

# The local kernels: plain torch operations anywhere, Triton's on CUDA.
FORWARD: dict[str, type[ChunkForward] | type[FusedForward]] = {"torch": ChunkForward, "triton": FusedForward}
BACKWARD: dict[str, type[ChunkBackward] | type[FusedBackward]] = {"torch": ChunkBackward, "triton": FusedBackward}


class Options(StateOptions):
    """A document's map is a dense matrix, whatever the gate."""

    @staticmethod
    def chunk_size_on(device: str) -> int:
        # On a CPU what was fastest in `weft bench delta-rule`; elsewhere half as many steps of the recurrence.
        return 32 if device == "cpu" else 64

    @property
    def kind(self) -> Kind:
        return "dense"


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
        options: Options, axis: Axis, sequence: Sequence | None, backend: str,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        batch, inputs = q.shape[0], Inputs(q, k, v, beta, g)
        start = None if initial is None else initial.detach().to(torch.promote_types(q.dtype, torch.float32))

        def work_on(plan: SequencePlan) -> list[ChunkForward | FusedForward]:
            return [
                FORWARD[backend](
                    inputs.cut(run.tokens), options.scale, run.lengths, options.chunk_size,
                    _rows_of(start, run, batch), _enters(run), any(one.path.size > 1 for one in run.segments),
                )
                for run in plan.runs
            ]  # fmt: skip

        done = run_forward("delta_rule", options, axis, sequence, q.shape[1], q.device, work_on, None)
        kernels, plan = done.kernels, done.plan
        outs = [kernel.finish(state) for kernel, state in zip(kernels, done.entering, strict=True)]
        states = [
            state if _enters(run) else _rows_of(start, run, batch)
            for state, run in zip(done.entering, plan.runs, strict=True)
        ]
        transitions, lefts = [kernel.maps[0] for kernel in kernels], [kernel.left for kernel in kernels]
        ctx.save_for_backward(q, k, v, beta, g, initial, *states, *transitions, *lefts)
        ctx.axis = axis
        ctx.how = options, (plan, done.method, done.number), backend
        ctx.set_materialize_grads(False)
        return join_runs(outs), None if done.final is None else done.final.wait()

    @staticmethod
    def backward(ctx: Any, grad_o: Tensor | None, grad_final: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, beta, g, initial, *kept = ctx.saved_tensors
        options, how, backend = ctx.how
        inputs, runs = Inputs(q, k, v, beta, g), how[0].runs
        do = torch.zeros_like(v) if grad_o is None else grad_o
        count = len(runs)

        def work() -> list[ChunkBackward | FusedBackward]:
            return [
                BACKWARD[backend](
                    inputs.cut(run.tokens), options.scale, run.lengths, options.chunk_size, state,
                    do[:, run.tokens], left, transition,
                )
                for run, state, transition, left in zip(
                    runs, kept[:count], kept[count : 2 * count], kept[2 * count :], strict=True
                )
            ]  # fmt: skip

        wanted = initial if ctx.needs_input_grad[5] else None
        grads, start = run_backward("delta_rule", options, ctx.axis, how, q.device, work, grad_final, wanted)
        dq, dk, dv, dbeta = (join_runs(parts) for parts in list(zip(*grads, strict=True))[:4])
        gates = [grad[4] for grad in grads if grad[4] is not None]
        return dq, dk, dv, dbeta, join_runs(gates) if gates else None, start, None, None, None, None


def _enters(run: LocalRun) -> bool:
    """Whether the one segment of ``run`` goes on from another run."""
    return bool(run.segments) and not run.segments[0].is_first


def _rows_of(states: Tensor | None, run: LocalRun, batch: int) -> Tensor | None:
    """Of all documents' states, those of the documents of a run, if they begin there."""
    if states is None or not run.segments or _enters(run):
        return None
    return torch.cat([states[one.document * batch : (one.document + 1) * batch] for one in run.segments])
