"""The options of a call, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.attention.geometry import Geometry, survey
from weft.comm import Axis
from weft.comm.layout import gather_lengths


@dataclass(frozen=True)
class Job:
    """What was asked for."""

    axis: Axis
    method: str
    layout: str
    causal: bool
    window: tuple[int, int]
    bounds: tuple[int, ...] | None  # of packed documents
    scale: float
    strides: tuple[int, ...] | None
    backward_strides: tuple[int, ...] | None
    backward: str | None
    grad_dtype: torch.dtype | None
    return_lse: bool
    local_first: bool = True  # see `Trip`

    def survey(self, call: Axis, q: Tensor) -> Geometry:
        """The ranks tell each other their lengths, one round of 8 bytes; the rest everybody works out alone."""
        lengths = tuple(gather_lengths(call, q.shape[1], q.device))
        if self.bounds is not None and sum(lengths) != self.bounds[-1]:
            raise ValueError(
                f"attention: cu_seqlens end at {self.bounds[-1]}, but the ranks hold {list(lengths)}, "
                f"{sum(lengths)} tokens in all (rank {call.rank})"
            )
        return survey(lengths, self.layout, self.bounds, self.causal, self.window)

    def facts(self, q: Tensor, k: Tensor, grads: tuple[bool, ...]) -> dict[str, object]:
        """What the ranks must agree on: everything but their lengths."""
        return {
            "q": (q.shape[0], *q.shape[2:]),
            "kv_heads": k.shape[2],
            "dtype": q.dtype,
            "causal": self.causal,
            "scale": self.scale,
            "window": self.window,
            "cu_seqlens": self.bounds,
            "layout": self.layout,
            "method": self.method,
            "strides": self.strides,
            "backward_strides": self.backward_strides,
            "backward": self.backward,
            "grad_dtype": self.grad_dtype,
            "return_lse": self.return_lse,
            "gradients": grads,
        }
