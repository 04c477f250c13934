"""The distributed operation: the local recurrence around one scan of the states, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from weft.comm import Axis
from weft.comm.function import RankFunction
from weft.ops.scan import Form
from weft.ops.scan.passes import run_backward, run_forward
from weft.ops.scan.state_scan import SequencePlan, join_runs
from weft.ops.selective_scan.chunk import SelectiveBackward, SelectiveForward
from weft.ops.sequence.layout import Bounds, Sequence


@dataclass(frozen=True)
class Options:
    """What the ranks must have in common: everything but their lengths."""

    operation: ClassVar[str] = "selective_scan"
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

    @property
    def output_final_state(self) -> bool:
        return self.return_last_state

    def form(self, device: torch.device) -> Form:
        """The form of one document's map."""
        shape = torch.Size((self.u[0], *self.A, 1))
        return Form("vector", shape, torch.promote_types(self.dtype, torch.float32), device)


class SelectiveScan(RankFunction):
    """y and the last states ``[B*N, D, N, 1]`` of a selective scan over a sequence on the ranks of an axis.

    | crosses ranks | forward                                       | backward                         |
    |---------------|-----------------------------------------------|----------------------------------|
    | lengths       | a few integers, under the first local work; none if ``sequence`` is given |      |
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
        def work_on(plan: SequencePlan) -> list[SelectiveForward]:
            return [
                SelectiveForward(u[:, t], d[:, t], A, B[:, t], C[:, t], run.lengths, options.chunk_size)
                for run in plan.runs
                for t in [run.tokens]
            ]

        done = run_forward(options, axis, sequence, u.shape[1], u.device, work_on, initial)
        outs = [kernel.finish(state) for kernel, state in zip(done.kernels, done.entering, strict=True)]
        ctx.save_for_backward(u, d, A, B, C, initial, *done.entering)
        ctx.axis = axis
        ctx.how = options, (done.plan, done.method, done.number)
        ctx.set_materialize_grads(False)
        return join_runs(outs), None if done.final is None else done.final.wait()

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor | None, grad_last: Tensor | None) -> tuple[Tensor | None, ...]:
        u, d, A, B, C, initial, *states = ctx.saved_tensors
        options, how = ctx.how
        dy = torch.zeros_like(u) if grad_y is None else grad_y

        def work() -> list[SelectiveBackward]:
            return [
                SelectiveBackward(
                    u[:, t], d[:, t], A, B[:, t], C[:, t], run.lengths, options.chunk_size, state, dy[:, t]
                )
                for run, state in zip(how[0].runs, states, strict=True)
                for t in [run.tokens]
            ]  # fmt: skip

        wanted = initial if ctx.needs_input_grad[5] else None
        grads, start = run_backward(options, ctx.axis, how, u.device, work, grad_last, wanted)
        du, dd, parts, dB, dC = (list(one) for one in list(zip(*grads, strict=True))[:5])
        whole = sum(parts[1:], start=parts[0])
        return join_runs(du), join_runs(dd), whole, join_runs(dB), join_runs(dC), start, None, None, None
