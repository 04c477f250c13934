"""What `mamba2` demands of its arguments, and what the ranks must have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from weft.comm.arguments import (
    find_choice_fault,
    find_flag_fault,
    find_integer_fault,
    find_number_fault,
    find_tensor_fault,
    show,
    the_choice,
)
from weft.comm.function import tensors_are_real
from weft.ops.linear_attention.operation import CHUNK_SIZE, FORWARD, LinearAttention
from weft.ops.linear_attention.operation import Options as ScanOptions
from weft.ops.scan import METHODS
from weft.ops.scan.arguments import find_triton_fault
from weft.ops.sequence.layout import DTYPES, Bounds, read_sequence

_NAME = "mamba2"
_KINDS = "a floating tensor"
_OPTIONAL = ("D", "z", "dt_bias", "initial_states")
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Options(ScanOptions):
    """Those of the scan, compared by the names that `mamba2` has for them."""

    operation: ClassVar[str] = _NAME
    q: Shape = field(compare=False)
    v: Shape = field(compare=False)
    g: Shape | None = field(compare=False)
    initial_state: Shape | None = field(compare=False)
    output_final_state: bool = field(compare=False)
    x: Shape
    B: Shape
    D: Shape | None
    z: bool
    dt_bias: bool
    initial_states: Shape | None
    return_final_states: bool
    dt_softplus: bool
    dt_limit: tuple[float, float]


class Mamba2Scan(LinearAttention):
    """The scan of `mamba2`, whose calls and errors have its name."""

    operation = _NAME


def read_options(
    rank: int, given: Mapping[str, Any], where: tuple[Any, Any, Any, Any], how: tuple[Any, Any, Any, Any, Any, Any]
) -> Options | Exception:
    """What the ranks must have in common; or the first thing wrong with this rank's arguments.

    ``where``: layout, cu_seqlens, group and sequence. ``how``: dt_softplus, dt_limit, return_final_states, method,
    chunk_size and backend.
    """
    softplus, limit, final, method, chunk_size, backend = how
    if fault := _find_kind_fault(rank, given):
        return fault
    x, B, D, start = (given[name] for name in ("x", "B", "D", "initial_states"))
    found = read_sequence(_NAME, rank, x.shape[1] if x.ndim == 4 else None, *where)
    if isinstance(found, Exception):
        return found
    fault = (
        _find_shape_fault(rank, given, found[1])
        or find_flag_fault(_NAME, "dt_softplus", softplus, rank)
        or _find_limit_fault(rank, limit)
        or find_flag_fault(_NAME, "return_final_states", final, rank)
        or _find_method_fault(rank, given, method, chunk_size, backend)
    )
    return fault or Options(
        q=(B.shape[0], *B.shape[2:]),
        v=(x.shape[0], *x.shape[2:]),
        g=(x.shape[0], x.shape[2]),
        x=(x.shape[0], *x.shape[2:]),
        B=(B.shape[0], *B.shape[2:]),
        D=None if D is None else tuple(D.shape),
        z=given["z"] is not None,
        dt_bias=given["dt_bias"] is not None,
        dtype=torch.promote_types(x.dtype, torch.promote_types(B.dtype, given["C"].dtype)),
        device=x.device.type,
        scale=1.0,
        initial_state=None if start is None else (*start.shape[:2], start.shape[3], start.shape[2]),
        initial_states=None if start is None else tuple(start.shape),
        output_final_state=final,
        return_final_states=final,
        dt_softplus=softplus,
        dt_limit=(float(limit[0]), float(limit[1])),
        cu_seqlens=found[1],
        layout=found[0],
        lengths=None if where[3] is None else where[3].compared,
        method=the_choice(method, ("auto", *METHODS)),
        chunk_size=CHUNK_SIZE if chunk_size is None else int(chunk_size),
        gradients=tuple(torch.is_grad_enabled() and t is not None and t.requires_grad for t in given.values()),
    )


def _find_kind_fault(rank: int, given: Mapping[str, Any]) -> Exception | None:
    for name, tensor in given.items():
        if tensor is None and name in _OPTIONAL:
            continue
        if fault := find_tensor_fault(_NAME, name, tensor, rank, DTYPES, _KINDS):
            return fault
        if tensor.device != given["x"].device:
            return ValueError(f"{_NAME}: {name} is on {tensor.device}, x on {given['x'].device} (rank {rank})")
    return None


def _find_shape_fault(rank: int, given: Mapping[str, Tensor | None], bounds: Bounds | None) -> Exception | None:
    x, B, A = given["x"], given["B"], given["A"]
    assert x is not None and B is not None and A is not None
    for name, tensor, wanted in (("x", x, "[B, T, H, P]"), ("B", B, "[B, T, G, N]")):
        if tensor.ndim != 4:
            return ValueError(f"{_NAME}: {name} must be {wanted}, got {list(tensor.shape)} (rank {rank})")
    batch, tokens, heads, dim = x.shape
    groups, states = B.shape[2:]
    if min(batch, heads, dim, groups, states) < 1:
        return ValueError(f"{_NAME}: only T may be zero, got x {list(x.shape)} and B {list(B.shape)} (rank {rank})")
    if B.shape[:2] != x.shape[:2]:
        return ValueError(
            f"{_NAME}: B {list(B.shape)} must have the batch and length of x {list(x.shape)} (rank {rank})"
        )
    if heads % groups:
        return ValueError(f"{_NAME}: {heads} heads are not a multiple of {groups} groups (rank {rank})")
    if bounds is not None and batch != 1:
        return ValueError(f"{_NAME}: packed sequences (cu_seqlens) need a batch of 1, got {batch} (rank {rank})")
    documents = batch if bounds is None else len(bounds) - 1
    shapes: dict[str, tuple[str, list[Shape]]] = {
        "C": ("[B, T, G, N]", [tuple(B.shape)]),
        "dt": ("[B, T, H]", [(batch, tokens, heads)]),
        "A": ("[H]", [(heads,)]),
        "D": ("[H] or [H, P]", [(heads,), (heads, dim)]),
        "z": ("[B, T, H, P]", [tuple(x.shape)]),
        "dt_bias": ("[H]", [(heads,)]),
        "initial_states": ("[docs, H, P, N]", [(documents, heads, dim, states)]),
    }
    for name, (words, allowed) in shapes.items():
        value = given[name]
        if value is not None and tuple(value.shape) not in allowed:
            wanted = " or ".join(str(list(shape)) for shape in allowed)
            return ValueError(f"{_NAME}: {name} must be {words} = {wanted}, got {list(value.shape)} (rank {rank})")
    if A.device.type == "cpu" and tensors_are_real() and A.detach().max() > 0:
        return ValueError(f"{_NAME}: A is a rate of decay and must not be positive, got {A.max():.3g} (rank {rank})")
    return None


def _find_limit_fault(rank: int, limit: Any) -> Exception | None:
    if not isinstance(limit, tuple | list) or len(limit) != 2:
        return TypeError(f"{_NAME}: dt_limit must be a pair of numbers, got {show(limit)} (rank {rank})")
    for number in limit:
        if fault := find_number_fault(_NAME, "dt_limit", number, rank, allow="infinite"):
            return fault
    if not 0 <= limit[0] <= limit[1]:
        return ValueError(f"{_NAME}: dt_limit must be two numbers that rise from 0 or more, got {limit} (rank {rank})")
    return None


def _find_method_fault(
    rank: int, given: Mapping[str, Any], method: Any, chunk_size: Any, backend: Any
) -> Exception | None:
    if fault := find_choice_fault(_NAME, "method", method, rank, ("auto", *METHODS)):
        return fault
    if chunk_size is not None:
        if fault := find_integer_fault(_NAME, "chunk_size", chunk_size, rank):
            return fault
        if chunk_size < 1 or chunk_size & (chunk_size - 1):
            return ValueError(f"{_NAME}: chunk_size must be a power of two, got {chunk_size} (rank {rank})")
    if fault := find_choice_fault(_NAME, "backend", backend, rank, ("auto", *FORWARD)):
        return fault
    if backend == "triton":
        reason = find_triton_fault(given["B"], given["x"], {"dt": given["dt"]}, chunk_size or CHUNK_SIZE)
        if reason is not None:
            return ValueError(f"{_NAME}: backend 'triton' {reason} (rank {rank}); backend='torch' takes it")
    return None
