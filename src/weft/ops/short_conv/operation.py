"""`short_conv`: the public operation and its checks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.comm import Axis
from weft.comm.arguments import find_choice_fault, find_flag_fault, find_tensor_fault, the_choice
from weft.comm.compiled import Shape, traceable
from weft.ops.scan.arguments import with_state
from weft.ops.sequence.layout import DTYPES, Bounds, Sequence, count_documents, read_on_axis, read_sequence
from weft.ops.short_conv.distributed import Options, ShortConv

_KINDS = "a floating tensor"


def _shapes(
    x: Tensor, weight: Tensor, *rest: Any, output_final_state: bool = False, cu_seqlens: Any = None,
    sequence: Sequence | None = None, **others: Any,
) -> list[Shape]:  # fmt: skip
    """Of y and the final states, for the compiler."""
    y = x.shape, x.dtype
    if output_final_state is not True or x.ndim != 3 or weight.ndim != 2:
        return [y]
    return [y, ((count_documents(x.shape[0], cu_seqlens, sequence), x.shape[2], weight.shape[1] - 1), x.dtype)]


@traceable(_shapes, with_state)
def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    layout: str | None = None,
    sequence: Sequence | None = None,
    group: Any = None,
) -> tuple[Tensor, Tensor | None]:
    """A causal convolution of each channel over a sequence on the ranks of ``group``: (y, final state or None).

    y_t = activation(sum_i weight[:, i] x_{t-k+1+i} + bias), exactly as on one device; x before a document is zero, or
    its initial state.

    | tensor          | shape                               | on this rank                            |
    |-----------------|-------------------------------------|-----------------------------------------|
    | x, y            | ``[B, T, D]``                       | its T tokens; T may differ and may be 0 |
    | weight, bias    | ``[D, k]``, ``[D]``                 | the whole, on every rank                |
    | `initial_state` | ``[B, D, k-1]``, packed ``[N, D, k-1]`` | the whole, on every rank            |
    | final state     | as `initial_state`, in x's dtype    | the whole, on every rank                |
    | `cu_seqlens`    | ``[N+1]``, of the whole sequence, B = 1 | the whole, on every rank            |

    What crosses ranks: the k-1 tokens before each run, from the ranks that hold them, where their document goes on; in
    the backward their gradients, back. With ``sequence`` that is under the local part, without it after. Gradients of x
    are this rank's; weight, bias and `initial_state` get this rank's part (they add up to the whole); gradients of the
    final state add up over the ranks that use it.

    ``activation`` is None or "silu". ``layout``, ``sequence`` and the rest as in `weft.delta_rule`.

    >>> y, state = short_conv(torch.randn(1, 10, 6), torch.randn(6, 4), activation="silu", output_final_state=True)
    >>> y.shape, state.shape
    (torch.Size([1, 10, 6]), torch.Size([1, 6, 3]))
    """

    def read_options(axis: Axis) -> Options | Exception:
        """What the ranks must have in common; or the first thing wrong with this rank's arguments."""
        name, rank = "short_conv", axis.rank
        if fault := find_tensor_fault(name, "x", x, rank, DTYPES, _KINDS):
            return fault
        length = x.shape[1] if x.ndim == 3 else None
        where = read_sequence(name, rank, length, layout, cu_seqlens, group, sequence)
        if isinstance(where, Exception):
            return where
        fault = (
            _find_shape_fault(rank, x, weight, bias, initial_state, where[1])
            or (None if activation is None else find_choice_fault(name, "activation", activation, rank, ("silu",)))
            or find_flag_fault(name, "output_final_state", output_final_state, rank)
        )
        return fault or Options(
            x=(x.shape[0], x.shape[2]),
            weight=tuple(weight.shape),
            bias=bias is not None,
            activation=None if activation is None else the_choice(activation, ("silu",)),
            dtype=x.dtype,
            device=x.device.type,
            initial_state=None if initial_state is None else tuple(initial_state.shape),
            output_final_state=output_final_state,
            cu_seqlens=where[1],
            layout=where[0],
            lengths=None if sequence is None else sequence.compared,
            gradients=tuple(
                torch.is_grad_enabled() and t is not None and t.requires_grad for t in (x, weight, bias, initial_state)
            ),
        )

    axis, options = read_on_axis("short_conv", group, sequence, read_options)
    y, final = ShortConv.apply(x, weight, bias, initial_state, options, axis, sequence)
    return y, final


def _find_shape_fault(
    rank: int, x: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor | None, bounds: Bounds | None
) -> Exception | None:
    name, where = "short_conv", f"(rank {rank})"
    for label, tensor in (("weight", weight), ("bias", bias), ("initial_state", initial_state)):
        if tensor is None and label != "weight":
            continue
        if fault := find_tensor_fault(name, label, tensor, rank, DTYPES, _KINDS):
            return fault
        assert tensor is not None
        if tensor.device != x.device:
            return ValueError(f"{name}: {label} is on {tensor.device}, x on {x.device} {where}")
    if x.ndim != 3:
        return ValueError(f"{name}: x must be [B, T, D], got {list(x.shape)} {where}")
    batch, _, dim = x.shape
    if min(batch, dim) < 1:
        return ValueError(f"{name}: only T may be zero, got x {list(x.shape)} {where}")
    if weight.ndim != 2 or weight.shape[0] != dim or weight.shape[1] < 1:
        return ValueError(f"{name}: weight must be [D, k] with D = {dim}, got {list(weight.shape)} {where}")
    if bias is not None and tuple(bias.shape) != (dim,):
        return ValueError(f"{name}: bias must be [{dim}], got {list(bias.shape)} {where}")
    if bounds is not None and batch != 1:
        return ValueError(f"{name}: packed sequences (cu_seqlens) need a batch of 1, got {batch} {where}")
    wanted = (batch if bounds is None else len(bounds) - 1, dim, weight.shape[1] - 1)
    if initial_state is not None and tuple(initial_state.shape) != wanted:
        return ValueError(f"{name}: initial_state must be {list(wanted)}, got {list(initial_state.shape)} {where}")
    return None
