"""`linear_attention`: the public operation and its checks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.comm import Axis
from weft.comm.arguments import (
    find_choice_fault,
    find_flag_fault,
    find_integer_fault,
    find_number_fault,
    find_tensor_fault,
    the_choice,
)
from weft.comm.function import eager, tensors_are_real
from weft.ops.fused.tiling import find_triton_fault
from weft.ops.linear_attention.distributed import FORWARD, LinearAttention, Options
from weft.ops.scan import METHODS
from weft.ops.sequence.layout import DTYPES, Bounds, Sequence, read_on_axis, read_tokens

_KINDS = "a floating tensor"
CHUNK_SIZE = 64  # what was fastest in `weft bench linear-attention` on a CPU


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

    ``layout`` is "contiguous" (if left out) or "zigzag" (see `weft.shard`); ``sequence`` (see `weft.sequence`) is given
    in place of ``layout``, ``cu_seqlens`` and ``group`` and saves the round of integers in which lengths are gathered.
    ``scale`` defaults to K^-0.5; ``chunk_size`` (a power of two) to what is fastest. ``backend`` is the local kernels:
    "torch", "triton" (fused; CUDA, K and V up to 256, no fp64), or "auto": Triton on CUDA where it can.

    >>> q = k = v = torch.randn(1, 10, 2, 4)
    >>> o, state = linear_attention(q, k, v, torch.tensor([-0.1, -0.2]), output_final_state=True)
    >>> o.shape, state.shape
    (torch.Size([1, 10, 2, 4]), torch.Size([1, 2, 4, 4]))
    """

    def read_options(axis: Axis) -> Options | Exception:
        """What the ranks must have in common; or the first thing wrong with this rank's arguments."""
        name, rank = "linear_attention", axis.rank
        where = read_tokens(name, rank, q, k, v, "T", _KINDS, layout, cu_seqlens, group, sequence)
        if isinstance(where, Exception):
            return where
        fault = (
            _find_shape_fault(rank, q, k, v, g, initial_state, where[1])
            or (None if scale is None else find_number_fault(name, "scale", scale, rank))
            or find_flag_fault(name, "output_final_state", output_final_state, rank)
            or _find_method_fault(rank, q, v, g, method, chunk_size, backend)
        )
        return fault or Options(
            q=(q.shape[0], *q.shape[2:]),
            v=(v.shape[0], *v.shape[2:]),
            g=None if g is None else tuple(g.shape) if g.ndim == 1 else (g.shape[0], *g.shape[2:]),
            dtype=q.dtype,
            device=q.device.type,
            scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
            initial_state=None if initial_state is None else tuple(initial_state.shape),
            output_final_state=output_final_state,
            cu_seqlens=where[1],
            layout=where[0],
            lengths=None if sequence is None else sequence.lengths,
            method=the_choice(method, ("auto", *METHODS)),
            chunk_size=CHUNK_SIZE if chunk_size is None else int(chunk_size),
            gradients=tuple(
                torch.is_grad_enabled() and t is not None and t.requires_grad for t in (q, k, v, g, initial_state)
            ),
        )

    axis, options = read_on_axis("linear_attention", group, sequence, read_options)
    kernels = choose_backend(backend, q, v, g, options.chunk_size)
    o, final = LinearAttention.apply(q, k, v, g, initial_state, options, axis, sequence, kernels)
    return o, final


def choose_backend(backend: str, q: Tensor, v: Tensor, g: Tensor | None, chunk_size: int) -> str:
    """ "torch" or "triton": auto takes Triton for CUDA tensors where it can."""
    if backend != "auto":
        return backend
    return "triton" if q.is_cuda and find_triton_fault(q, v, g, chunk_size) is None else "torch"


def _find_shape_fault(
    rank: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, initial_state: Tensor | None, bounds: Bounds | None
) -> Exception | None:
    name, where = "linear_attention", f"(rank {rank})"
    for label, tensor in (("g", g), ("initial_state", initial_state)):
        if tensor is not None and (fault := find_tensor_fault(name, label, tensor, rank, DTYPES, _KINDS)):
            return fault
        if tensor is not None and tensor.device != q.device:
            return ValueError(f"{name}: {label} is on {tensor.device}, q on {q.device} {where}")
    if k.shape != q.shape:
        return ValueError(f"{name}: k {list(k.shape)} must have the shape of q {list(q.shape)} {where}")
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
    if g is not None and g.device.type == "cpu" and tensors_are_real() and g.numel() and g.detach().max() > 0:
        return ValueError(f"{name}: g is the log of a decay and must not be positive, got {g.max():.3g} {where}")
    wanted_state = (batch if bounds is None else len(bounds) - 1, value_heads, keys, values)
    if initial_state is not None and tuple(initial_state.shape) != wanted_state:
        shown = list(initial_state.shape)
        return ValueError(f"{name}: initial_state must be {list(wanted_state)}, got {shown} {where}")
    return None


def _find_method_fault(
    rank: int, q: Tensor, v: Tensor, g: Tensor | None, method: str, chunk_size: int | None, backend: str
) -> Exception | None:
    name, where = "linear_attention", f"(rank {rank})"
    if fault := find_choice_fault(name, "method", method, rank, ("auto", *METHODS)):
        return fault
    if chunk_size is not None:
        if fault := find_integer_fault(name, "chunk_size", chunk_size, rank):
            return fault
        if chunk_size < 1 or chunk_size & (chunk_size - 1):
            return ValueError(f"{name}: chunk_size must be a power of two, got {chunk_size} {where}")
    if fault := find_choice_fault(name, "backend", backend, rank, ("auto", *FORWARD)):
        return fault
    if backend == "triton" and (reason := find_triton_fault(q, v, g, chunk_size or CHUNK_SIZE)):
        return ValueError(f"{name}: backend 'triton' {reason} {where}; backend='torch' takes it")
    return None
