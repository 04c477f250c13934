"""The distributed operation: local kernels around one scan of the states, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.comm import Axis
from weft.comm.function import RankFunction
from weft.ops.linear_attention.chunk import ChunkBackward, ChunkForward
from weft.ops.linear_attention.fused.phases import FusedBackward, FusedForward
from weft.ops.scan import Kind
from weft.ops.scan.arguments import StateOptions
from weft.ops.scan.passes import run_backward, run_forward
from weft.ops.scan.state_scan import SequencePlan, join_runs
from weft.ops.sequence.layout import Sequence

CHUNK_SIZE = 64  # what was fastest in `weft bench linear-attention` on a CPU
# The local kernels: plain torch operations anywhere, Triton's on CUDA.
FORWARD: dict[str, type[ChunkForward] | type[FusedForward]] = {"torch": ChunkForward, "triton": FusedForward}
BACKWARD: dict[str, type[ChunkBackward] | type[FusedBackward]] = {"torch": ChunkBackward, "triton": FusedBackward}


class Options(StateOptions):
    """A document's map decays as its gate does."""

    @staticmethod
    def chunk_size_on(device: str) -> int:
        return CHUNK_SIZE

    @property
    def kind(self) -> Kind:
        # A gate without the dimension of the keys is one number for each state, also where it is constant.
        return "none" if self.g is None else "vector" if len(self.g) == 3 else "scalar"


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
        def work_on(plan: SequencePlan) -> list[ChunkForward | FusedForward]:
            return [
                FORWARD[backend](q[:, t], k[:, t], v[:, t], _cut(g, t), options.scale, run.lengths, options.chunk_size)
                for run in plan.runs
                for t in [run.tokens]
            ]

        done = run_forward("linear_attention", options, axis, sequence, q.shape[1], q.device, work_on, initial)
        outs = [kernel.finish(state)[0] for kernel, state in zip(done.kernels, done.entering, strict=True)]
        ctx.save_for_backward(q, k, v, g, initial, *done.entering)
        ctx.axis = axis
        ctx.how = options, backend, (done.plan, done.method, done.number)
        ctx.set_materialize_grads(False)
        return join_runs(outs), None if done.final is None else done.final.wait()

    @staticmethod
    def backward(ctx: Any, grad_o: Tensor | None, grad_final: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, g, initial, *states = ctx.saved_tensors
        options, backend, how = ctx.how
        do = torch.zeros_like(v) if grad_o is None else grad_o

        def work() -> list[ChunkBackward | FusedBackward]:
            return [
                BACKWARD[backend](
                    q[:, t], k[:, t], v[:, t], _cut(g, t), options.scale, run.lengths, options.chunk_size, state,
                    do[:, t],
                )
                for run, state in zip(how[0].runs, states, strict=True)
                for t in [run.tokens]
            ]  # fmt: skip

        wanted = initial if ctx.needs_input_grad[4] else None
        grads, start = run_backward("linear_attention", options, ctx.axis, how, q.device, work, grad_final, wanted)
        dq, dk, dv = (join_runs(parts) for parts in list(zip(*grads, strict=True))[:3])
        gates = [grad[3] for grad in grads if grad[3] is not None]
        dg = None if not gates else sum(gates[1:], start=gates[0]) if gates[0].ndim == 1 else join_runs(gates)
        return dq, dk, dv, dg, start, None, None, None, None


def _cut(g: Tensor | None, tokens: slice) -> Tensor | None:
    return g if g is None or g.ndim == 1 else g[:, tokens]
