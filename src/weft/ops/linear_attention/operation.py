"""`linear_attention`: the public operation, and its autograd Function: kernels of runs around a scan of states."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from weft.comm import Axis
from weft.comm.compiled import traceable
from weft.comm.function import RankFunction
from weft.ops.linear_attention.chunk import ChunkBackward, ChunkForward
from weft.ops.linear_attention.fused.phases import FusedBackward, FusedForward
from weft.ops.scan import Kind
from weft.ops.scan.arguments import StateArguments, StateOptions, shapes_of, with_state
from weft.ops.scan.passes import run_backward, run_forward
from weft.ops.scan.state_scan import SequencePlan, join_runs
from weft.ops.sequence.layout import Sequence, read_on_axis

CHUNK_SIZE = 64  # what was fastest in `weft bench linear-attention` on a CPU
# The local kernels: plain torch operations anywhere, Triton's on CUDA.
FORWARD: dict[str, type[ChunkForward] | type[FusedForward]] = {"torch": ChunkForward, "triton": FusedForward}
BACKWARD: dict[str, type[ChunkBackward] | type[FusedBackward]] = {"torch": ChunkBackward, "triton": FusedBackward}


class Options(StateOptions):
    """A document's map decays as its gate does."""

    operation = "linear_attention"

    @staticmethod
    def chunk_size_on(device: str) -> int:
        return CHUNK_SIZE

    @property
    def kind(self) -> Kind:
        # A gate without the dimension of the keys is one number for each state, also where it is constant.
        return "none" if self.g is None else "vector" if len(self.g) == 3 else "scalar"


@traceable(shapes_of, with_state)
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    layout: str | None = None,
    method: str = "auto",
    chunk_size: int | None = None,
    backend: str = "auto",
    sequence: Sequence | None = None,
    group: Any = None,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention with decay over a sequence that lies on the ranks of ``group``: (o, final state or None).

    S_t = exp(g_t) S_{t-1} + k_t^T v_t ;  o_t = scale * q_t S_t, exactly as on one device. It is always causal: a token
    sees itself and those before it.

    | tensor          | shape                                       | on this rank                               |
    |-----------------|---------------------------------------------|--------------------------------------------|
    | q, k            | ``[B, T, H, K]``                            | its T tokens; T may differ and may be 0    |
    | v, o            | ``[B, T, HV, V]``, HV a multiple of H       | its T tokens                               |
    | g               | None, ``[H]``, ``[B, T, H]``, ``[B, T, H, K]`` | log decay, <= 0 (HV in place of H too)  |
    | `initial_state` | ``[B, HV, K, V]``, packed ``[N, HV, K, V]`` | the whole, on every rank                   |
    | final state     | as `initial_state`, fp32 (fp64 for fp64)    | the whole, on every rank                   |
    | `cu_seqlens`    | ``[N+1]``, of the whole sequence, B = 1     | the whole, on every rank                   |

    What crosses ranks: one state for each document that spans ranks, by ``method`` (of `weft.ops.scan.METHODS` or
    "auto"), while the within-chunk part is computed; forward a prefix, backward a suffix. Final states go to
    every rank only if asked for. Gradients: those of q, k, v and gates are this rank's; a constant ``g`` gets
    this rank's part (they add up to the whole); `initial_state` gets its gradient on the rank where the sequence
    begins; gradients of the final state add up over the ranks that use it.

    ``layout`` is "contiguous" (if left out), "zigzag" or "balanced" (see `weft.shard`); ``sequence`` (see
    `weft.sequence`) is given in place of ``layout``, ``cu_seqlens`` and ``group`` and saves the round of integers in
    which lengths are gathered.
    ``scale`` defaults to K^-0.5; ``chunk_size`` (a power of two) to what is fastest. ``backend`` is the local kernels:
    "torch", "triton" (fused; CUDA, K and V up to 256, no fp64), or "auto": Triton on CUDA where it can.

    >>> q = k = v = torch.randn(1, 10, 2, 4)
    >>> o, state = linear_attention(q, k, v, torch.tensor([-0.1, -0.2]), output_final_state=True)
    >>> o.shape, state.shape
    (torch.Size([1, 10, 2, 4]), torch.Size([1, 2, 4, 4]))
    """

    given = StateArguments(
        "linear_attention", q, k, v, {}, g, scale, initial_state, output_final_state, cu_seqlens, layout,
        method, chunk_size, backend, sequence, group,
    )  # fmt: skip

    def read_options(axis: Axis) -> Options | Exception:
        return given.read(Options, axis.rank, tuple(FORWARD), functools.partial(_find_gate_fault, q, v, g))

    axis, options = read_on_axis("linear_attention", group, sequence, read_options)
    kernels = given.choose_backend(options)
    o, final = LinearAttention.apply(q, k, v, g, initial_state, options, axis, sequence, kernels)
    return o, final


def _find_gate_fault(q: Tensor, v: Tensor, g: Tensor | None, place: str) -> Exception | None:
    (batch, tokens, heads, keys), value_heads = q.shape, v.shape[2]
    shapes = [shape for h in (heads, value_heads) for shape in ((h,), (batch, tokens, h), (batch, tokens, h, keys))]
    if g is not None and tuple(g.shape) not in shapes:
        wanted = "[H], [B, T, H] or [B, T, H, K]"
        return ValueError(f"linear_attention: g {list(g.shape)} is not {wanted} of q {list(q.shape)} {place}")
    return None


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

        done = run_forward(options, axis, sequence, q.shape[1], q.device, work_on, initial)
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
        grads, start = run_backward(options, ctx.axis, how, q.device, work, grad_final, wanted)
        dq, dk, dv = (join_runs(parts) for parts in list(zip(*grads, strict=True))[:3])
        gates = [grad[3] for grad in grads if grad[3] is not None]
        dg = None if not gates else sum(gates[1:], start=gates[0]) if gates[0].ndim == 1 else join_runs(gates)
        return dq, dk, dv, dg, start, None, None, None, None


def _cut(g: Tensor | None, tokens: slice) -> Tensor | None:
    return g if g is None or g.ndim == 1 else g[:, tokens]
