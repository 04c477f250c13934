"""Short convolutions under fla's name."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from weft.comm.arguments import find_choice_fault, find_flag_fault
from weft.comm.function import eager
from weft.integrations.fla.keywords import find_refused, find_wrong_tensor, prepare, read_boundaries
from weft.ops.sequence import Sequence
from weft.ops.short_conv import short_conv

_ACTIVATIONS = ("silu", "swish")
_KERNELS = ("triton", "cuda", "mix")


@eager
def causal_conv1d(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, residual: Tensor | None = None,
    initial_state: Tensor | None = None, output_final_state: bool | None = False, activation: str | None = None,
    backend: str | None = "triton", cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None, cp_context: Any = None, *, group: Any = None, layout: str | None = None,
    sequence: Sequence | None = None, **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """A causal convolution of each channel, an activation, and then ``residual``: (y, final state or None).

    x, y and residual ``[B, T, D]`` (or ``[B, T, ...]`` with D entries a token), weight ``[D, W]``, bias ``[D]``. States
    are the last W inputs, ``[N, D, W]``, of which a convolution sees W-1. ``backend`` names fla's kernels; whichever it
    is, the result is the same.

    >>> import torch
    >>> y, state = causal_conv1d(torch.randn(1, 10, 6), torch.randn(6, 4), activation="swish", output_final_state=True)
    >>> y.shape, state.shape
    (torch.Size([1, 10, 6]), torch.Size([1, 6, 4]))
    """
    name = "causal_conv1d"
    final = False if output_final_state is None else output_final_state

    def preparing(rank: int) -> tuple[Any, ...] | Exception:
        bounds = read_boundaries(name, rank, cu_seqlens, cu_seqlens_cpu)
        if isinstance(bounds, Exception):
            return bounds
        refused = {"chunk_indices": chunk_indices, "cp_context": cp_context, **kwargs}
        fault = (
            find_refused(name, rank, refused)
            or find_wrong_tensor(name, rank, {"x": x, "weight": weight}, {"residual": residual})
            or find_flag_fault(name, "output_final_state", final, rank)
            or (None if activation is None else find_choice_fault(name, "activation", activation, rank, _ACTIVATIONS))
            or find_choice_fault(name, "backend", backend, rank, _KERNELS)
        )
        if fault is not None:
            return fault
        assert weight is not None
        if residual is not None and (residual.shape != x.shape or residual.device != x.device):
            words = f"residual {list(residual.shape)} on {residual.device} must be as x {list(x.shape)} on {x.device}"
            return ValueError(f"{name}: {words} (rank {rank})")
        # A tap of zero before the others makes a state of W-1 inputs one of W.
        taps = pad(weight, (1, 0)) if final or initial_state is not None else weight
        return x.flatten(2) if x.ndim > 3 else x, taps, bounds[0]

    flat, taps, bounds = prepare(name, "short_conv", group, sequence, preparing)
    y, state = short_conv(
        flat, taps, bias, None if activation is None else "silu", initial_state=initial_state,
        output_final_state=final, cu_seqlens=bounds, layout=layout, sequence=sequence, group=group,
    )  # fmt: skip
    y = y.view(x.shape)
    return y if residual is None else (y + residual).to(x.dtype), state
