"""The distributed operation: local kernels around one scan of the state a document, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.comm import Axis, Pending
from weft.comm.layout import gather_lengths
from weft.linear_attention.chunk import Backward, Forward
from weft.linear_attention.final_state import collect_final_gradients, share_final_states
from weft.linear_attention.journey import Journey, Part, plan_dense, plan_packed
from weft.scan import METHODS, Affine


@dataclass(frozen=True)
class Job:
    """The options of a call, the same on every rank."""

    axis: Axis
    layout: str
    method: str
    scale: float
    chunk_size: int
    bounds: tuple[int, ...] | None  # of packed documents
    output_final_state: bool

    def plan(self, call: Axis, q: Tensor) -> Journey:
        """Where the documents lie. The ranks' lengths are asked for once a total length: one round of 8 bytes."""
        length = q.shape[1]
        if self.bounds is None:
            return plan_dense(call, self.layout, length)
        known = self.axis.space.notes
        if self.notes_key not in known:
            lengths = gather_lengths(call, length, q.device)
            if sum(lengths) != self.bounds[-1]:
                raise ValueError(
                    f"linear_attention: cu_seqlens end at {self.bounds[-1]}, but the ranks hold {lengths}, "
                    f"{sum(lengths)} tokens in all (rank {call.rank})"
                )
            known[self.notes_key] = lengths
        return plan_packed(call, self.layout, known[self.notes_key], self.bounds)

    @property
    def notes_key(self) -> tuple[str, str, int]:
        """Under which the ranks' lengths are remembered: they may change only with the total."""
        return "lengths", self.layout, self.bounds[-1] if self.bounds else 0


class LinearAttention(torch.autograd.Function):
    """o and the final states of linear attention over a sequence that lies on the ranks of an axis.

    | crosses ranks   | forward                            | backward                              |
    |-----------------|------------------------------------|---------------------------------------|
    | state           | exclusive prefix, one scan         | exclusive suffix of its gradient      |
    | final states    | from where they arise to every rank, if asked for | their gradients, back and summed |

    Kept for the backward: the inputs and the states that entered this rank's runs, one [HV, K, V] a document and
    run. The states between chunks are computed again: that costs one product of fourteen, keeping them would
    cost as much memory as k or v at chunk size 64 and K = V = 64.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, initial: Tensor | None, job: Job
    ) -> tuple[Tensor, Tensor | None]:
        axis, batch = job.axis, q.shape[0]
        facts = _facts(q, k, v, g, initial, job, ctx.needs_input_grad)
        call = axis.begin("linear_attention", **facts)
        journey = job.plan(call, q)
        kernels = [
            Forward(q[:, t], k[:, t], v[:, t], _cut(g, t), job.scale, stretch.lengths, job.chunk_size)
            for stretch in journey.stretches
            for t in [stretch.tokens]
        ]
        seats = _seats(journey, kernels, batch)
        wide = kernels[0].maps[1].dtype
        start = None if initial is None else initial.detach().to(wide)

        def boundary(seat: _Seat) -> Tensor | None:
            return start[seat.document_rows] if start is not None and seat.part.is_first else None

        travelling = [_send_off(call, seat, boundary(seat), job.method) for seat in seats]
        for kernel in kernels:
            kernel.intra()
        entering = [boundary(seat) if t is None else t.wait() for seat, t in zip(seats, travelling, strict=True)]
        arriving = None
        if job.output_final_state:
            leaving = [seat.own.apply(state) for seat, state in zip(seats, entering, strict=True)]
            ended = {s.part.document: x for s, x in zip(seats, leaving, strict=True) if s.part.is_last}
            arriving = share_final_states(call, journey, ended, batch, like=kernels[0].maps[1])
        states = _per_stretch(journey, entering, kernels)
        outs = [kernel.finish(state)[0] for kernel, state in zip(kernels, states, strict=True)]
        ctx.save_for_backward(q, k, v, g, *states)
        ctx.job, ctx.journey, ctx.facts = job, journey, facts
        ctx.initial = None if initial is None else (initial.shape, initial.dtype)
        ctx.set_materialize_grads(False)
        return _join(outs), None if arriving is None else arriving.wait()

    @staticmethod
    def backward(ctx: Any, grad_o: Tensor | None, grad_final: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, g, *states = ctx.saved_tensors
        job, journey, batch = ctx.job, ctx.journey, q.shape[0]
        call = job.axis.begin("linear_attention.backward", **ctx.facts)
        seeds = None
        if job.output_final_state:
            heads, values = v.shape[2:]
            shape = (batch * len(journey.ends), heads, q.shape[-1], values)
            wide = torch.promote_types(q.dtype, torch.float32)
            grad_final = q.new_zeros(shape, dtype=wide) if grad_final is None else grad_final.to(wide)
            seeds = collect_final_gradients(call, journey, grad_final, batch)
        grad_o = torch.zeros_like(v) if grad_o is None else grad_o
        kernels = [
            Backward(
                q[:, t], k[:, t], v[:, t], _cut(g, t), job.scale, stretch.lengths, job.chunk_size, state, grad_o[:, t]
            )
            for stretch, state in zip(journey.stretches, states, strict=True)
            for t in [stretch.tokens]
        ]
        seats = _seats(journey, kernels, batch)
        total = None if seeds is None else seeds.wait()

        def boundary(seat: _Seat) -> Tensor | None:
            return total[seat.document_rows] if total is not None and seat.part.is_last else None

        travelling = [_send_off(call, seat, boundary(seat), job.method, reverse=True) for seat in seats]
        for kernel in kernels:
            kernel.intra()
        leaving = [boundary(seat) if t is None else t.wait() for seat, t in zip(seats, travelling, strict=True)]
        grads = [
            kernel.finish(grad) for kernel, grad in zip(kernels, _per_stretch(journey, leaving, kernels), strict=True)
        ]
        dq, dk, dv = _join([x[0] for x in grads]), _join([x[1] for x in grads]), _join([x[2] for x in grads])
        gates = [grad[3] for grad in grads if grad[3] is not None]
        dg = None if not gates else sum(gates[1:], start=gates[0]) if gates[0].ndim == 1 else _join(gates)
        return dq, dk, dv, dg, _initial_gradient(ctx, seats, [grad[4] for grad in grads], batch), None


@dataclass(frozen=True)
class _Seat:
    """A part of a document in a stretch, with what the kernel says its tokens do to a state."""

    stretch: int
    part: Part
    own: Affine
    rows: slice  # of the stretch's states [B*N, ...]
    document_rows: slice  # of all documents' states


def _seats(journey: Journey, kernels: Sequence[Forward | Backward], batch: int) -> list[_Seat]:
    seats = []
    for index, (stretch, kernel) in enumerate(zip(journey.stretches, kernels, strict=True)):
        log, state = kernel.maps
        for number, part in enumerate(stretch.parts):
            rows = slice(number * batch, (number + 1) * batch)
            own = Affine.of(state[rows], None if log is None else log[rows])
            seats.append(_Seat(index, part, own, rows, slice(part.document * batch, (part.document + 1) * batch)))
    return seats


def _send_off(
    call: Axis, seat: _Seat, boundary: Tensor | None, method: str, reverse: bool = False
) -> Pending[Tensor | None] | None:
    """Start the scan of a document that other runs hold too; ``boundary`` enters at its beginning (or end)."""
    part, own = seat.part, seat.own
    if len(part.stops) == 1:
        return None
    if boundary is not None:
        own = Affine(own.kind, own.apply(boundary), own.decay)
    path = call.path(part.stops, part.places, part.position)

    def scan(lane: Axis) -> Tensor | None:
        entering = METHODS[method](lane.reversed() if reverse else lane, own, None)
        return boundary if entering is None else entering

    return path.start(scan, own.state.device)


def _per_stretch(
    journey: Journey, states: Sequence[Tensor | None], kernels: Sequence[Forward | Backward]
) -> list[Tensor | None]:
    """The seats' states put together a stretch; None where all of them are zero."""
    joined: list[Tensor | None] = []
    rest = list(states)
    for stretch, kernel in zip(journey.stretches, kernels, strict=True):
        mine, rest = rest[: len(stretch.parts)], rest[len(stretch.parts) :]
        if all(state is None for state in mine):
            joined.append(None)
            continue
        zero = kernel.maps[1].new_zeros(kernel.maps[1].shape[0] // len(mine), *kernel.maps[1].shape[1:])
        joined.append(mine[0] if len(mine) == 1 else torch.cat([zero if s is None else s for s in mine]))
    return joined


def _initial_gradient(ctx: Any, seats: Sequence[_Seat], grads: Sequence[Tensor], batch: int) -> Tensor | None:
    """The gradient of the initial states of the documents that begin here; zero for all others."""
    if ctx.initial is None or not ctx.needs_input_grad[4]:
        return None
    shape, dtype = ctx.initial
    total = grads[0].new_zeros(shape)
    for seat in seats:
        if seat.part.is_first:
            total[seat.document_rows] = grads[seat.stretch][seat.rows]
    return total.to(dtype)


def _cut(g: Tensor | None, tokens: slice) -> Tensor | None:
    return g if g is None or g.ndim == 1 else g[:, tokens]


def _join(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=1)


def _facts(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, initial: Tensor | None, job: Job, grads: Sequence[bool]
) -> dict[str, object]:
    """What the ranks must agree on: everything but their lengths."""
    return {
        "q": (q.shape[0], *q.shape[2:]),
        "v": (v.shape[0], *v.shape[2:]),
        "g": None if g is None else g.shape if g.ndim == 1 else (g.shape[0], *g.shape[2:]),
        "dtypes": tuple(str(t.dtype).removeprefix("torch.") for t in (q, k, v)),
        "scale": job.scale,
        "initial_state": None if initial is None else tuple(initial.shape),
        "output_final_state": job.output_final_state,
        "cu_seqlens": job.bounds,
        "layout": job.layout,
        "method": job.method,
        "chunk_size": job.chunk_size,
        "gradients": tuple(grads[:5]),
    }
