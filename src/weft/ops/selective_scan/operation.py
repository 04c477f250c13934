"""`selective_scan`: the public operation and its checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from weft.comm import Axis
from weft.comm.arguments import (
    find_choice_fault,
    find_flag_fault,
    find_integer_fault,
    find_tensor_fault,
    the_choice,
)
from weft.comm.function import eager, tensors_are_real
from weft.ops.scan import METHODS
from weft.ops.selective_scan.distributed import Options, SelectiveScan
from weft.ops.sequence.layout import DTYPES, Bounds, Sequence, read_on_axis, read_sequence

_NAME = "selective_scan"
_OPTIONAL = ("D", "z", "delta_bias", "initial_state")
CHUNK_SIZE = 32


@eager
def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
    cu_seqlens: Tensor | None = None,
    layout: str | None = None,
    method: str = "auto",
    chunk_size: int | None = None,
    sequence: Sequence | None = None,
    group: Any = None,
) -> tuple[Tensor, Tensor | None]:
    """Mamba-1's selective scan over a sequence that lies on the ranks of ``group``: (y, last states or None).

    S_t = exp(A d_t) S_{t-1} + d_t u_t B_t^T ;  y_t = (S_t C_t + D u_t) silu(z_t) for each channel, with time steps
    d = softplus(delta + delta_bias), exactly as on one device. Names are those of mamba_ssm's ``selective_scan_fn``,
    but tokens come before channels; softplus only with ``delta_softplus``, D, z and `delta_bias` only if given.

    | tensor           | shape                                        | on this rank                            |
    |------------------|----------------------------------------------|-----------------------------------------|
    | u, delta, z, y   | ``[B, T, D]``                                | its T tokens; T may differ and may be 0 |
    | B, C             | ``[B, T, N]`` or ``[B, T, G, N]``, D a multiple of G | its T tokens                    |
    | A                | ``[D, N]``, <= 0                             | the whole, on every rank                |
    | D, `delta_bias`  | ``[D]``                                      | the whole, on every rank                |
    | `initial_state`  | ``[B, D, N]``, packed ``[docs, D, N]``       | the whole, on every rank                |
    | last states      | as `initial_state`, fp32 (fp64 for fp64)     | the whole, on every rank                |

    What crosses ranks: one state ``[D, N]`` and its decays for each document that spans ranks, while outputs are
    computed. Time steps must not be negative. Gradients of u, delta,
    B, C and z are this rank's; A, D and `delta_bias` get this rank's part (they add up to the whole);
    `initial_state` gets its own on the rank where the document begins; those of the last states add up over the ranks
    that use them.

    The local recurrence is plain PyTorch: all chunks of ``chunk_size`` tokens (32 if left out) advance together.
    ``layout``, ``method``, ``sequence`` and the rest as in `weft.linear_attention`.

    >>> u, A, B = torch.randn(1, 10, 6), -torch.rand(6, 4), torch.randn(1, 10, 4)
    >>> y, state = selective_scan(u, u, A, B, B, delta_softplus=True, return_last_state=True)
    >>> y.shape, state.shape
    (torch.Size([1, 10, 6]), torch.Size([1, 6, 4]))
    """
    given = {"u": u, "delta": delta, "A": A, "B": B, "C": C, "D": D, "z": z, "delta_bias": delta_bias,
             "initial_state": initial_state}  # fmt: skip

    def read_options(axis: Axis) -> Options | Exception:
        """What the ranks must have in common; or the first thing wrong with this rank's arguments."""
        rank = axis.rank
        if fault := _find_kind_fault(rank, given):
            return fault
        where = read_sequence(_NAME, rank, u.shape[1] if u.ndim == 3 else None, layout, cu_seqlens, group, sequence)
        if isinstance(where, Exception):
            return where
        fault = (
            _find_shape_fault(rank, given, where[1])
            or find_flag_fault(_NAME, "delta_softplus", delta_softplus, rank)
            or find_flag_fault(_NAME, "return_last_state", return_last_state, rank)
            or find_choice_fault(_NAME, "method", method, rank, ("auto", *METHODS))
            or (None if chunk_size is None else find_integer_fault(_NAME, "chunk_size", chunk_size, rank, least=1))
            or (None if delta_softplus else _find_step_fault(rank, delta, delta_bias))
        )
        return fault or Options(
            u=(u.shape[0], u.shape[2]),
            A=tuple(A.shape),
            B=tuple(B.shape[2:]),
            D=D is not None,
            z=z is not None,
            delta_bias=delta_bias is not None,
            delta_softplus=delta_softplus,
            dtype=u.dtype,
            device=u.device.type,
            initial_state=initial_state is not None,
            return_last_state=return_last_state,
            cu_seqlens=where[1],
            layout=where[0],
            lengths=None if sequence is None else sequence.compared,
            method=the_choice(method, ("auto", *METHODS)),
            chunk_size=CHUNK_SIZE if chunk_size is None else int(chunk_size),
            gradients=tuple(torch.is_grad_enabled() and t is not None and t.requires_grad for t in given.values()),
        )

    axis, options = read_on_axis(_NAME, group, sequence, read_options)
    wide = torch.promote_types(u.dtype, torch.float32)
    steps = delta.to(wide) if delta_bias is None else delta.to(wide) + delta_bias.to(wide)
    steps = softplus(steps) if delta_softplus else steps
    grouped = [one if one.ndim == 4 else one.unsqueeze(2) for one in (B, C)]
    start = None if initial_state is None else initial_state.unsqueeze(-1)
    y, last = SelectiveScan.apply(u, steps, A, *grouped, start, options, axis, sequence)
    if D is not None:
        y = y + u * D.to(wide)
    if z is not None:
        y = y * silu(z.to(wide))
    return y.to(u.dtype), None if last is None else last.squeeze(-1)


def _find_kind_fault(rank: int, given: Mapping[str, Any]) -> Exception | None:
    for name, tensor in given.items():
        if tensor is None and name in _OPTIONAL:
            continue
        if fault := find_tensor_fault(_NAME, name, tensor, rank, DTYPES, "a floating tensor"):
            return fault
        if tensor.device != given["u"].device:
            return ValueError(f"{_NAME}: {name} is on {tensor.device}, u on {given['u'].device} (rank {rank})")
    return None


def _find_shape_fault(rank: int, given: Mapping[str, Any], bounds: Bounds | None) -> Exception | None:
    u, A, B = given["u"], given["A"], given["B"]
    if u.ndim != 3:
        return ValueError(f"{_NAME}: u must be [B, T, D], got {list(u.shape)} (rank {rank})")
    batch, tokens, dim = u.shape
    if A.ndim != 2 or A.shape[0] != dim:
        return ValueError(f"{_NAME}: A must be [D, N] with D = {dim}, got {list(A.shape)} (rank {rank})")
    states = A.shape[1]
    if min(batch, dim, states) < 1:
        return ValueError(f"{_NAME}: only T may be zero, got u {list(u.shape)} and A {list(A.shape)} (rank {rank})")
    groups = B.shape[2] if B.ndim == 4 else 1
    wanted_B = (batch, tokens, groups, states) if B.ndim == 4 else (batch, tokens, states)
    if groups < 1 or dim % groups:
        return ValueError(f"{_NAME}: {dim} channels are not a multiple of {groups} groups (rank {rank})")
    if bounds is not None and batch != 1:
        return ValueError(f"{_NAME}: packed sequences (cu_seqlens) need a batch of 1, got {batch} (rank {rank})")
    shapes = {
        "B": wanted_B, "C": wanted_B, "delta": tuple(u.shape), "z": tuple(u.shape), "D": (dim,), "delta_bias": (dim,),
        "initial_state": (batch if bounds is None else len(bounds) - 1, dim, states),
    }  # fmt: skip
    for name, wanted in shapes.items():
        if given[name] is not None and tuple(given[name].shape) != wanted:
            shown = list(given[name].shape)
            return ValueError(f"{_NAME}: {name} must be {list(wanted)}, got {shown} (rank {rank})")
    if A.device.type == "cpu" and tensors_are_real() and A.detach().max() > 0:
        return ValueError(f"{_NAME}: A is a rate of decay and must not be positive, got {A.max():.3g} (rank {rank})")
    return None


def _find_step_fault(rank: int, delta: Tensor, bias: Tensor | None) -> Exception | None:
    """Steps that would let states grow; looked for on the CPU, where that costs no synchronisation."""
    if delta.device.type != "cpu" or not tensors_are_real() or not delta.numel():
        return None
    least = (delta if bias is None else delta + bias).detach().min()
    if not least < 0:
        return None
    return ValueError(f"{_NAME}: time steps must not be negative without delta_softplus, got {least:.3g} (rank {rank})")
