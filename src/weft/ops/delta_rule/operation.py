"""`delta_rule`: the public operation, and its autograd Function: kernels of runs around one scan of dense maps."""

from __future__ import annotations

import functools
from collections.abc import Sequence as Items
from typing import Any

import torch
from torch import Tensor

from weft.comm import Axis, Call
from weft.comm.compiled import traceable
from weft.comm.function import RankFunction
from weft.ops.delta_rule.backward import ChunkBackward
from weft.ops.delta_rule.chunk import ChunkForward, Inputs
from weft.ops.delta_rule.fused.phases import FusedBackward, FusedForward
from weft.ops.delta_rule.fused.tiling import MAX_CHUNK
from weft.ops.delta_rule.two_ranks import WaitingBackward, WaitingForward, cut_heads, second_rank_waits
from weft.ops.scan import Kind
from weft.ops.scan.arguments import StateArguments, StateOptions, shapes_of, with_state
from weft.ops.scan.passes import ForwardPass, Started, finish_in_turn, start_backward, start_forward
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
        start = None if initial is None else initial.detach().to(torch.promote_types(q.dtype, torch.float32))
        parts, passes = _parts_of(options, whole, start, waits), []
        for number, (part, inputs, start) in enumerate(parts):
            # The first call gathers lengths, faults and the options of all heads; for the others that is done.
            metadata = None if number or sequence else (q.shape[1],)
            call = axis.begin(options.operation, options, metadata=metadata)
            passes.append(_start_forward(part, call, inputs, start, axis, sequence, backend, waits))
        for (_, _, start), done in zip(parts, finish_in_turn(passes), strict=True):
            outs.append(join_runs([one.finish(state) for one, state in zip(done.kernels, done.entering, strict=True)]))
            kept += _kept_of(done, start, q.shape[0])
            hows.append((done.plan, done.method, done.number))
        ctx.save_for_backward(q, k, v, beta, g, initial, *kept)
        ctx.axis = axis
        ctx.how = options, hows, backend, waits
        ctx.set_materialize_grads(False)
        return _join(outs), None if done.final is None else done.final.wait()

    @staticmethod
    def backward(ctx: Any, grad_o: Tensor | None, grad_final: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, beta, g, initial, *kept = ctx.saved_tensors
        options, hows, backend, waits = ctx.how
        whole, do = Inputs(q, k, v, beta, g), torch.zeros_like(v) if grad_o is None else grad_o
        parts, passes = _parts_of(options, whole, initial, waits), []
        grads = do.split([inputs.v.shape[2] for _, inputs, _ in parts], 2)
        count = len(kept) // len(parts)
        for number, (part, inputs, start) in enumerate(parts):
            saved, how = kept[number * count : (number + 1) * count], hows[number]
            wanted = start if ctx.needs_input_grad[5] else None
            call = ctx.axis.begin(f"{options.operation}.backward", options, of=how[2])
            passes.append(_start_backward(
                part, call, inputs, wanted, saved, how, backend, waits, grads[number], grad_final
            ))  # fmt: skip
        found = [(*_join_gradients(runs), start) for runs, start in finish_in_turn(passes)]
        dq, dk, dv, dbeta, dg, starts = zip(*found, strict=True)
        return (
            _join(dq), _join(dk), _join(dv), _join(dbeta), None if g is None else _join(dg),
            _join(starts, 1) if ctx.needs_input_grad[5] else None, None, None, None, None, None,
        )  # fmt: skip


def _join(parts: Items[Tensor], dim: int = 2) -> Tensor:
    """What groups of heads gave."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


Forward = ChunkForward | FusedForward | WaitingForward
Part = tuple[Options, Inputs, Tensor | None]  # options, inputs and initial states of some heads
How = tuple[SequencePlan, str, int]  # plan, method and number of a forward


def _parts_of(options: Options, inputs: Inputs, initial: Tensor | None, waits: bool) -> list[Part]:
    """All heads, or groups of them that go one behind the other."""
    return list(cut_heads(options, inputs, initial)) if waits else [(options, inputs, initial)]


def _start_forward(
    options: Options, call: Call, inputs: Inputs, start: Tensor | None, axis: Axis, sequence: Sequence | None,
    backend: str, waits: bool,
) -> Started[ForwardPass[Forward]]:  # fmt: skip
    """The forward of these heads, as far as it goes without what comes from other ranks."""
    batch = inputs.q.shape[0]

    def work_on(plan: SequencePlan) -> list[Forward]:
        return [
            WaitingForward(inputs.cut(run.tokens), options.scale, run.lengths, options.chunk_size)
            if waits and _enters(run) else
            FORWARD[backend](
                inputs.cut(run.tokens), options.scale, run.lengths, options.chunk_size,
                _rows_of(start, run, batch), _enters(run), any(one.path.size > 1 for one in run.segments),
            )
            for run in plan.runs
        ]  # fmt: skip

    return start_forward(options, call, axis, sequence, inputs.q.shape[1], inputs.q.device, work_on, None)


def _kept_of(done: ForwardPass[Forward], start: Tensor | None, batch: int) -> list[Tensor | None]:
    """What the backward needs beside the inputs: the states that entered the runs, their maps, what these multiply."""
    states = [
        state if _enters(run) else _rows_of(start, run, batch)
        for state, run in zip(done.entering, done.plan.runs, strict=True)
    ]
    return [*states, *(kernel.maps[0] for kernel in done.kernels), *(kernel.left for kernel in done.kernels)]


def _start_backward(
    options: Options, call: Call, inputs: Inputs, initial: Tensor | None, kept: Items[Tensor | None], how: How,
    backend: str, waits: bool, do: Tensor, grad_final: Tensor | None,
) -> Started[tuple[list[Any], Tensor | None]]:  # fmt: skip
    """The gradients of these heads' inputs, run by run, and of ``initial``, as far as they go without other ranks."""
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

    return start_backward(options, call, how, inputs.q.device, work, grad_final, initial)


def _join_gradients(runs: Items[Items[Any]]) -> tuple[Tensor | None, ...]:
    """dq, dk, dv, dbeta and dg (None without decay) of a rank's tokens."""
    return tuple(None if parts[0] is None else join_runs(parts) for parts in list(zip(*runs, strict=True))[:5])


def _enters(run: LocalRun) -> bool:
    """Whether the one segment of ``run`` goes on from another run."""
    return bool(run.segments) and not run.segments[0].is_first


def _rows_of(states: Tensor | None, run: LocalRun, batch: int) -> Tensor | None:
    """Of all documents' states, those of the documents of a run, if they begin there."""
    if states is None or not run.segments or _enters(run):
        return None
    return torch.cat([states[one.document * batch : (one.document + 1) * batch] for one in run.segments])
