"""`delta_rule`: the public operation and its checks."""

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
from weft.ops.delta_rule.distributed import DeltaRule, Options
from weft.ops.scan import METHODS
from weft.ops.sequence.layout import DTYPES, Bounds, Sequence, read_on_axis, read_tokens

_KINDS = "a floating tensor"
CHUNK_SIZE = 64


@eager
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

    ``layout`` is "contiguous" (if left out) or "zigzag" (see `weft.shard`); ``sequence`` (see `weft.sequence`) is given
    in place of ``layout``, ``cu_seqlens`` and ``group`` and saves the round of integers in which lengths are gathered.
    ``scale`` defaults to K^-0.5; ``chunk_size`` (a power of two) to 64. ``backend`` is "torch" or "auto", which is the
    same: there are no fused kernels of it yet.

    >>> q = k = torch.nn.functional.normalize(torch.randn(1, 10, 2, 4), dim=-1)
    >>> o, state = delta_rule(q, k, torch.randn(1, 10, 2, 3), torch.rand(1, 10, 2), output_final_state=True)
    >>> o.shape, state.shape
    (torch.Size([1, 10, 2, 3]), torch.Size([1, 2, 4, 3]))
    """

    def read_options(axis: Axis) -> Options | Exception:
        """What the ranks must have in common; or the first thing wrong with this rank's arguments."""
        name, rank = "delta_rule", axis.rank
        where = read_tokens(name, rank, q, k, v, "T", _KINDS, layout, cu_seqlens, group, sequence)
        if isinstance(where, Exception):
            return where
        fault = (
            _find_shape_fault(rank, q, k, v, beta, g, initial_state, where[1])
            or (None if scale is None else find_number_fault(name, "scale", scale, rank))
            or find_flag_fault(name, "output_final_state", output_final_state, rank)
            or _find_method_fault(rank, method, chunk_size, backend)
        )
        return fault or Options(
            q=(q.shape[0], *q.shape[2:]),
            v=(v.shape[0], *v.shape[2:]),
            g=None if g is None else (g.shape[0], *g.shape[2:]),
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
                torch.is_grad_enabled() and t is not None and t.requires_grad for t in (q, k, v, beta, g, initial_state)
            ),
        )

    axis, options = read_on_axis("delta_rule", group, sequence, read_options)
    o, final = DeltaRule.apply(q, k, v, beta, g, initial_state, options, axis, sequence)
    return o, final


def _find_shape_fault(
    rank: int, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, initial_state: Tensor | None,
    bounds: Bounds | None,
) -> Exception | None:  # fmt: skip
    name, where = "delta_rule", f"(rank {rank})"
    for label, tensor in (("beta", beta), ("g", g), ("initial_state", initial_state)):
        if tensor is None and label != "beta":
            continue
        if fault := find_tensor_fault(name, label, tensor, rank, DTYPES, _KINDS):
            return fault
        assert tensor is not None
        if tensor.device != q.device:
            return ValueError(f"{name}: {label} is on {tensor.device}, q on {q.device} {where}")
    if k.shape != q.shape:
        return ValueError(f"{name}: k {list(k.shape)} must have the shape of q {list(q.shape)} {where}")
    batch, tokens, heads, keys = q.shape
    value_heads, values = v.shape[2:]
    if min(batch, heads, keys, value_heads, values) < 1:
        return ValueError(f"{name}: only T may be zero, got q {list(q.shape)} and v {list(v.shape)} {where}")
    if value_heads % heads:
        return ValueError(f"{name}: {value_heads} value heads are not a multiple of {heads} heads {where}")
    rates = (batch, tokens, value_heads)
    if tuple(beta.shape) != rates:
        return ValueError(f"{name}: beta must be [B, T, HV] = {list(rates)}, got {list(beta.shape)} {where}")
    if g is not None and tuple(g.shape) not in (rates, (*rates, keys)):
        wanted = f"[B, T, HV] = {list(rates)} nor [B, T, HV, K] = {[*rates, keys]}"
        return ValueError(f"{name}: g {list(g.shape)} is neither {wanted} {where}")
    if g is not None and g.device.type == "cpu" and tensors_are_real() and g.numel() and g.detach().max() > 0:
        return ValueError(f"{name}: g is the log of a decay and must not be positive, got {g.max():.3g} {where}")
    wanted_state = (batch if bounds is None else len(bounds) - 1, value_heads, keys, values)
    if initial_state is not None and tuple(initial_state.shape) != wanted_state:
        shown = list(initial_state.shape)
        return ValueError(f"{name}: initial_state must be {list(wanted_state)}, got {shown} {where}")
    return None


def _find_method_fault(rank: int, method: str, chunk_size: int | None, backend: str) -> Exception | None:
    name, where = "delta_rule", f"(rank {rank})"
    if fault := find_choice_fault(name, "method", method, rank, ("auto", *METHODS)):
        return fault
    if chunk_size is not None:
        if fault := find_integer_fault(name, "chunk_size", chunk_size, rank):
            return fault
        if chunk_size < 1 or chunk_size & (chunk_size - 1):
            return ValueError(f"{name}: chunk_size must be a power of two, got {chunk_size} {where}")
    if fault := find_choice_fault(name, "backend", backend, rank, ("auto", "torch", "triton")):
        return fault
    if backend == "triton":
        return NotImplementedError(f"{name}: there are no Triton kernels of it yet {where}; backend='torch' takes it")
    return None
