"""`linear_attention`: the public operation and its checks."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from weft.comm import Axis
from weft.comm.eager import eager
from weft.comm.layout import find_layout_fault
from weft.linear_attention.distributed import Job, LinearAttention
from weft.scan import METHODS

SMALL_STATE = 256 * 1024  # bytes: below, rounds decide; above, bytes do
FEW_RANKS = 8


@eager
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
    layout: str = "contiguous",
    group: Any = None,
    method: str = "auto",
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention with decay over a sequence that lies on the ranks of ``group``: (o, final state or None).

    S_t = exp(g_t) S_{t-1} + k_t^T v_t ;  o_t = scale * q_t S_t, exactly as on one device.

    | tensor          | shape                                       | on this rank                               |
    |-----------------|---------------------------------------------|--------------------------------------------|
    | q, k            | ``[B, T, H, K]``                            | its T tokens; T may differ and may be 0    |
    | v, o            | ``[B, T, HV, V]``, HV a multiple of H       | its T tokens                               |
    | g               | None, ``[H]``, ``[B, T, H]``, ``[B, T, H, K]`` | log decay, <= 0 (HV in place of H too)  |
    | `initial_state` | ``[B, HV, K, V]``, packed ``[N, HV, K, V]`` | the whole, on every rank                   |
    | final state     | as `initial_state`, fp32 (fp64 for fp64)    | the whole, on every rank                   |
    | `cu_seqlens`    | ``[N+1]``, of the whole sequence, B = 1     | the whole, on every rank                   |

    What crosses ranks: one state a document that spans ranks, by ``method`` (a name of `weft.scan.METHODS` or
    "auto"), while the within-chunk part is computed; forward a prefix, backward a suffix. Final states go to
    every rank only if asked for. Gradients: those of q, k, v and gates are this rank's; a constant ``g`` gets
    this rank's part (they add up to the whole); `initial_state` gets its gradient on the rank where the sequence
    begins; gradients of the final state add up over the ranks that use it.

    ``layout`` is "contiguous" or "zigzag" (see `weft.shard`); ``scale`` defaults to K^-0.5; ``chunk_size`` (a
    power of two) to what is fastest.

    >>> q = k = v = torch.randn(1, 10, 2, 4)
    >>> o, state = linear_attention(q, k, v, torch.tensor([-0.1, -0.2]), output_final_state=True)
    >>> o.shape, state.shape
    (torch.Size([1, 10, 2, 4]), torch.Size([1, 2, 4, 4]))
    """
    axis = Axis.of(group)
    bounds = None if cu_seqlens is None else tuple(torch.as_tensor(cu_seqlens).tolist())
    fault = _find_fault(axis, q, k, v, g, initial_state, bounds, layout, method, chunk_size)
    if fault:
        axis.refuse("linear_attention", fault)
    if method == "auto":
        wide = 8 if q.dtype == torch.float64 else 4
        method = choose_method(q.shape[0] * v.shape[2] * q.shape[3] * v.shape[3] * wide, axis.size)
    job = Job(
        axis=axis,
        layout=layout,
        method=method,
        scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
        chunk_size=chunk_size or default_chunk_size(g),
        bounds=bounds,
        output_final_state=output_final_state,
    )
    if fault := _find_length_fault(job, q.shape[1]):
        axis.refuse("linear_attention", fault)
    o, final = LinearAttention.apply(q, k, v, g, initial_state, job)
    return o, final


def choose_method(state_bytes: int, size: int) -> str:
    """The schedule for a state of this size: few rounds for small ones, few bytes on the way for large ones."""
    if state_bytes <= SMALL_STATE or size <= 2:
        return "doubling"
    return "pipeline" if size <= FEW_RANKS else "transpose"


def default_chunk_size(g: Tensor | None) -> int:
    """What was fastest in `weft bench linear-attention` on a CPU."""
    return 64


def _find_fault(
    axis: Axis,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    initial_state: Tensor | None,
    bounds: tuple[int, ...] | None,
    layout: str,
    method: str,
    chunk_size: int | None,
) -> Exception | None:
    """The first thing wrong with this rank's arguments."""
    name, where = "linear_attention", f"(rank {axis.rank})"
    for label, tensor in (("q", q), ("k", k), ("v", v), ("g", g), ("initial_state", initial_state)):
        if tensor is None and label in ("g", "initial_state"):
            continue
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            return TypeError(f"{name}: {label} must be a floating tensor, got {kind} {where}")
        if label in "qkv" and tensor.ndim != 4:
            return ValueError(f"{name}: {label} must be [B, T, heads, dim], got {list(tensor.shape)} {where}")
        if tensor.device != q.device:
            return ValueError(f"{name}: {label} is on {tensor.device}, q on {q.device} {where}")
    if k.shape != q.shape:
        return ValueError(f"{name}: k {list(k.shape)} must have the shape of q {list(q.shape)} {where}")
    if v.shape[:2] != q.shape[:2]:
        return ValueError(f"{name}: v {list(v.shape)} must have the batch and length of q {list(q.shape)} {where}")
    if k.dtype != q.dtype or v.dtype != q.dtype:
        return ValueError(f"{name}: q, k and v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype} {where}")
    batch, tokens, heads, keys = q.shape
    value_heads, values = v.shape[2:]
    if min(batch, heads, keys, value_heads, values) < 1:
        return ValueError(f"{name}: only T may be zero, got q {list(q.shape)} and v {list(v.shape)} {where}")
    if value_heads % heads:
        return ValueError(f"{name}: {value_heads} value heads are not a multiple of {heads} heads {where}")
    shapes = [shape for h in (heads, value_heads) for shape in ((h,), (batch, tokens, h), (batch, tokens, h, keys))]
    if g is not None and tuple(g.shape) not in shapes:
        wanted = "[H], [B, T, H] or [B, T, H, K]"
        return ValueError(f"{name}: g {list(g.shape)} is not {wanted} of q {list(q.shape)} {where}")
    if g is not None and not g.is_meta and g.device.type == "cpu" and g.numel() and g.detach().max() > 0:
        return ValueError(f"{name}: g is the log of a decay and must not be positive, got {g.max():.3g} {where}")
    states = batch
    if bounds is not None:
        if batch != 1:
            return ValueError(f"{name}: packed sequences (cu_seqlens) need a batch of 1, got {batch} {where}")
        rising = len(bounds) > 1 and bounds[0] == 0 and all(a <= b for a, b in pairwise(bounds))
        if not rising or not all(isinstance(b, int) for b in bounds):
            shown = list(bounds[:8])
            return ValueError(f"{name}: cu_seqlens must be integers that rise from 0, got {shown} {where}")
        states = len(bounds) - 1
    wanted_state = (states, value_heads, keys, values)
    if initial_state is not None and tuple(initial_state.shape) != wanted_state:
        shown = list(initial_state.shape)
        return ValueError(f"{name}: initial_state must be {list(wanted_state)}, got {shown} {where}")
    if method != "auto" and method not in METHODS:
        return ValueError(f"{name}: method {method!r} is not one of auto, {', '.join(METHODS)} {where}")
    if chunk_size is not None and (chunk_size < 1 or chunk_size & (chunk_size - 1)):
        return ValueError(f"{name}: chunk_size must be a power of two, got {chunk_size} {where}")
    if getattr(axis.wire, "grouped", False) and (layout == "zigzag" or bounds is not None):
        return NotImplementedError(f"{name}: zigzag and packed sequences are not supported on NCCL yet {where}")
    return find_layout_fault(name, layout, axis.rank)


def _find_length_fault(job: Job, length: int) -> Exception | None:
    """Packed: this rank must hold what it held when the ranks last told each other their lengths."""
    lengths = job.axis.space.notes.get(job.notes_key) if job.bounds is not None else None
    rank = job.axis.rank
    if lengths is None or lengths[rank] == length:
        return None
    return ValueError(
        f"linear_attention: this rank holds {length} tokens, but held {lengths[rank]} of a packed sequence of the same "
        f"total {job.bounds[-1] if job.bounds else 0} before; the split may only change with the total (rank {rank})"
    )
