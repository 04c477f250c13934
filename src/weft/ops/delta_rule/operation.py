"""`delta_rule`: the public operation, and its autograd Function: kernels of runs around one scan of dense maps."""

from __future__ import annotations

import functools
from collections.abc import Sequence as Items
from typing import Any

import torch
from torch import Tensor

from weft.comm import Axis, Pending
from weft.comm.compiled import traceable
from weft.comm.function import RankFunction
from weft.ops.delta_rule.backward import ChunkBackward
from weft.ops.delta_rule.chunk import ChunkForward, Inputs
from weft.ops.delta_rule.fused.phases import FusedBackward, FusedForward
from weft.ops.delta_rule.fused.tiling import MAX_CHUNK
from weft.ops.delta_rule.two_ranks import WaitingBackward, WaitingForward, cut_heads, second_rank_waits
from weft.ops.scan import Kind
from weft.ops.scan.arguments import StateArguments, StateOptions, shapes_of, with_state
from weft.ops.scan.passes import run_backward, run_forward
from weft.ops.scan.state_scan import LocalRun, SequencePlan, join_runs
from weft.ops.sequence.layout import Sequence, read_on_axis

# The local kernels: plain torch operations anywhere, Triton's on CUDA.
FORWARD: dict[str, type[ChunkForward] | type[FusedForward]] = {"torch": ChunkForward, "triton": FusedForward}
BACKWARD: dict[str, type[ChunkBackward] | type[FusedBackward]] = {"torch": ChunkBackward, "triton": FusedBackward}


class Options(StateOptions):
    """A document's map is a dense matrix, whatever the gate."""

    operation = "delta_rule"
    max_chunk = MAX_CHUNK

    @staticmethod
    def chunk_size_on(device: str) -> int:
        # On a CPU what was fastest in `weft bench delta-rule`; elsewhere half as many steps of the recurrence.
        return 32 if device == "cpu" else 64

    @property
    def kind(self) -> Kind:
        return "dense"


@traceable(shapes_of, with_state)
def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
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
    """The delta rule over a sequence that lies on the ranks of ``group``: (o, final state or None).

    S_t = (I - beta_t k_t^T k_t) Diag(exp(g_t)) S_{t-1} + beta_t k_t^T v_t ;  o_t = scale * q_t S_t, exactly as on one
    device: DeltaNet (no ``g``), gated delta net (one number per token and head) and KDA (one per key, too). It is
    always causal. Keys are taken as they are: models normalise them before.

    | tensor          | shape                                       | on this rank                               |
    |-----------------|---------------------------------------------|--------------------------------------------|
    | q, k            | ``[B, T, H, K]``                            | its T tokens; T may differ and may be 0    |
    | v, o            | ``[B, T, HV, V]``, HV a multiple of H       | its T tokens                               |
    | beta            | ``[B, T, HV]``                              | its T tokens                               |
    | g               | None, ``[B, T, HV]``, ``[B, T, HV, K]``     | log decay, <= 0                            |
    | `initial_state` | ``[B, HV, K, V]``, packed ``[N, HV, K, V]`` | the whole, on every rank                   |
    | final state     | as `initial_state`, fp32 (fp64 for fp64)    | the whole, on every rank                   |
    | `cu_seqlens`    | ``[N+1]``, of the whole sequence, B = 1     | the whole, on every rank                   |

    What crosses ranks: one map [K, K + V] per head for each document that spans ranks, by ``method`` (of
    `weft.ops.scan.METHODS` or "auto"; "ring" and "pipeline" send states only), while outputs are computed; forward a
    prefix, backward a suffix. Final states go to every rank only if asked for. Gradients: those of q, k, v, beta and g
    are this rank's; `initial_state` gets its gradient on the rank where the sequence begins; gradients of the final
    state add up over the ranks that use it.

    ``layout`` is "contiguous" (if left out), "zigzag" or "balanced" (see `weft.shard`); ``sequence`` (see
    `weft.sequence`) is given in place of ``layout``, ``cu_seqlens`` and ``group`` and saves the round of integers in
    which lengths are gathered.
    ``scale`` defaults to K^-0.5; ``chunk_size`` (a power of two) to what is fastest. ``backend`` is the local kernels:
    "torch", "triton" (fused; CUDA, K and V up to 256, chunks to 64, no fp64), or "auto": Triton on CUDA where it can.

    >>> q = k = torch.nn.functional.normalize(torch.randn(1, 10, 2, 4), dim=-1)
    >>> o, state = delta_rule(q, k, torch.randn(1, 10, 2, 3), torch.rand(1, 10, 2), output_final_state=True)
    >>> o.shape, state.shape
    (torch.Size([1, 10, 2, 3]), torch.Size([1, 2, 4, 3]))
    """

    given = StateArguments(
        "delta_rule", q, k, v, {"beta": beta}, g, scale, initial_state, output_final_state, cu_seqlens, layout,
        method, chunk_size, backend, sequence, group,
    )  # fmt: skip

    def read_options(axis: Axis) -> Options | Exception:
        return given.read(Options, axis.rank, tuple(FORWARD), functools.partial(_find_gate_fault, q, v, beta, g))

    axis, options = read_on_axis("delta_rule", group, sequence, read_options)
    kernels = given.choose_backend(options)
    waits = kernels == "torch" and second_rank_waits(options, axis, sequence)
    o, final = DeltaRule.apply(q, k, v, beta, g, initial_state, options, axis, sequence, kernels, waits)
    return o, final


def _find_gate_fault(q: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, place: str) -> Exception | None:
    rates = v.shape[:3]
    if beta.shape != rates:
        return ValueError(f"delta_rule: beta must be [B, T, HV] = {list(rates)}, got {list(beta.shape)} {place}")
    if g is not None and g.shape not in (rates, (*rates, q.shape[3])):
        wanted = f"[B, T, HV] = {list(rates)} nor [B, T, HV, K] = {[*rates, q.shape[3]]}"
        return ValueError(f"delta_rule: g {list(g.shape)} is neither {wanted} {place}")
    return None


class DeltaRule(RankFunction):
    """o and the final states of the delta rule over a sequence that lies on the ranks of an axis.

    | crosses ranks | forward                              | backward                                  |
    |---------------|--------------------------------------|-------------------------------------------|
    | lengths       | a few integers, under the first local work; none if ``sequence`` is given | |
    | maps          | exclusive prefix, one scan; ring and pipeline send states only | exclusive suffix, transposed |
    | final states  | from where they arise to every rank, if asked for | their gradients, back and summed |

    Kept for the backward: the inputs, the states that entered this rank's runs and, where one came from another run,
    the run's map [HV, K, K] and what the state was multiplied by, [T, HV, K] in fp32. All else is computed again, under
    the exchange. ``waits``: no document lies on more than two runs; see `two_ranks`.
    """

    operation = "delta_rule"

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, initial: Tensor | None,
        options: Options, axis: Axis, sequence: Sequence | None, backend: str, waits: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        whole, outs, kept, hows = Inputs(q, k, v, beta, g), list[Tensor](), list[Tensor | None](), []
        for part, inputs, start in cut_heads(options, whole, initial) if waits else [(options, whole, initial)]:
            o, saved, how, final = _go_forward(part, inputs, start, axis, sequence, backend, waits)
            outs.append(o)
            kept += saved
            hows.append(how)
        ctx.save_for_backward(q, k, v, beta, g, initial, *kept)
        ctx.axis = axis
        ctx.how = options, hows, backend, waits
        ctx.set_materialize_grads(False)
        return _join(outs), None if final is None else final.wait()

    @staticmethod
    def backward(ctx: Any, grad_o: Tensor | None, grad_final: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, beta, g, initial, *kept = ctx.saved_tensors
        options, hows, backend, waits = ctx.how
        whole, do = Inputs(q, k, v, beta, g), torch.zeros_like(v) if grad_o is None else grad_o
        parts = list(cut_heads(options, whole, initial)) if waits else [(options, whole, initial)]
        grads = do.split([inputs.v.shape[2] for _, inputs, _ in parts], 2)
        count, found = len(kept) // len(parts), []
        for number, (part, inputs, start) in enumerate(parts):
            saved = kept[number * count : (number + 1) * count]
            wanted = start if ctx.needs_input_grad[5] else None
            how = hows[number], ctx.axis, backend, waits
            found.append(_go_backward(part, inputs, wanted, saved, *how, grads[number], grad_final))
        dq, dk, dv, dbeta, dg, starts = zip(*found, strict=True)
        return (
            _join(dq), _join(dk), _join(dv), _join(dbeta), None if g is None else _join(dg),
            _join(starts, 1) if ctx.needs_input_grad[5] else None, None, None, None, None, None,
        )  # fmt: skip


def _join(parts: Items[Tensor], dim: int = 2) -> Tensor:
    """What groups of heads gave."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


How = tuple[SequencePlan, str, int]  # plan, method and number of a forward


def _go_forward(
    options: Options, inputs: Inputs, initial: Tensor | None, axis: Axis, sequence: Sequence | None, backend: str,
    waits: bool,
) -> tuple[Tensor, list[Tensor | None], How, Pending[Tensor] | None]:  # fmt: skip
    """o of these heads, what their backward needs, and the final states on their way, if asked for."""
    batch = inputs.q.shape[0]
    start = None if initial is None else initial.detach().to(torch.promote_types(inputs.q.dtype, torch.float32))

    def work_on(plan: SequencePlan) -> list[ChunkForward | FusedForward | WaitingForward]:
        return [
            WaitingForward(inputs.cut(run.tokens), options.scale, run.lengths, options.chunk_size)
            if waits and _enters(run) else
            FORWARD[backend](
                inputs.cut(run.tokens), options.scale, run.lengths, options.chunk_size,
                _rows_of(start, run, batch), _enters(run), any(one.path.size > 1 for one in run.segments),
            )
            for run in plan.runs
        ]  # fmt: skip

    done = run_forward(options, axis, sequence, inputs.q.shape[1], inputs.q.device, work_on, None)
    kernels, plan = done.kernels, done.plan
    outs = [kernel.finish(state) for kernel, state in zip(kernels, done.entering, strict=True)]
    states = [
        state if _enters(run) else _rows_of(start, run, batch)
        for state, run in zip(done.entering, plan.runs, strict=True)
    ]
    kept = [*states, *(kernel.maps[0] for kernel in kernels), *(kernel.left for kernel in kernels)]
    return join_runs(outs), kept, (plan, done.method, done.number), done.final


def _go_backward(
    options: Options, inputs: Inputs, initial: Tensor | None, kept: Items[Tensor | None], how: How, axis: Axis,
    backend: str, waits: bool, do: Tensor, grad_final: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """The gradients of these heads' inputs and of ``initial``."""
    runs = how[0].runs
    count = len(runs)

    def work() -> list[ChunkBackward | FusedBackward]:
        return [
            WaitingBackward(
                inputs.cut(run.tokens), options.scale, run.lengths, options.chunk_size, state, do[:, run.tokens]
            )
            if waits and _enters(run) else
            BACKWARD[backend](
                inputs.cut(run.tokens), options.scale, run.lengths, options.chunk_size, state,
                do[:, run.tokens], left, transition,
            )
            for run, state, transition, left in zip(
                runs, kept[:count], kept[count : 2 * count], kept[2 * count :], strict=True
            )
        ]  # fmt: skip

    grads, start = run_backward(options, axis, how, inputs.q.device, work, grad_final, initial)
    dq, dk, dv, dbeta = (join_runs(parts) for parts in list(zip(*grads, strict=True))[:4])
    gates = [grad[4] for grad in grads if grad[4] is not None]
    return dq, dk, dv, dbeta, join_runs(gates) if gates else None, start


def _enters(run: LocalRun) -> bool:
    """Whether the one segment of ``run`` goes on from another run."""
    return bool(run.segments) and not run.segments[0].is_first


def _rows_of(states: Tensor | None, run: LocalRun, batch: int) -> Tensor | None:
    """Of all documents' states, those of the documents of a run, if they begin there."""
    if states is None or not run.segments or _enters(run):
        return None
    return torch.cat([states[one.document * batch : (one.document + 1) * batch] for one in run.segments])
