"""What takes the place of the functions that mixers of hybrid models call: convolutions and scans over all ranks.

transformers has no interface for them as it has for attention. A mixer finds its convolution and its scan as globals of
the module it is written in, and those are replaced, for the whole process: inside a mixer of an enabled model the call
comes here, everywhere else it goes on to what stood there before. Documents are those of the batch, whatever a
model tells its functions about them.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from weft.integrations.transformers.attention import Forward, refuse_unknown
from weft.ops.delta_rule import delta_rule
from weft.ops.linear_attention import linear_attention
from weft.ops.mamba2 import mamba2
from weft.ops.short_conv import short_conv


@dataclass(eq=False)
class MixerCall:
    """One call of a mixer under way: its name in the model, the forward it is part of, what it has called so far."""

    name: str
    forward: Forward
    calls: Counter[str] = field(default_factory=Counter)


@dataclass
class _Inside(threading.local):
    mixer: MixerCall | None = None


inside = _Inside()  # of this thread; mixers hold no mixers


def convolve(
    mixer: MixerCall, x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None,
    **keywords: Any,
) -> Tensor:  # fmt: skip
    """``causal_conv1d_fn``: x ``[B, D, T]``, weight ``[D, k]``."""
    refuse_unknown(mixer.forward, 0.0, keywords)
    silu = "silu" if activation in ("silu", "swish") else None

    def operation(x: Tensor, sequence: Any) -> Tensor:
        return short_conv(x, weight, bias, silu, sequence=sequence)[0]

    y = _by_row(mixer.forward, operation, x.transpose(1, 2)).transpose(1, 2)
    if activation is None or silu is not None:
        return y
    from transformers.activations import ACT2FN

    return ACT2FN[activation](y)


def apply_delta_rule(
    mixer: MixerCall, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor,
    chunk_size: int | None = None, use_qk_l2norm_in_kernel: bool = False, **keywords: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """``chunk_gated_delta_rule`` and ``chunk_kda``: q, k ``[B, T, H, K]``, v ``[B, T, HV, V]``, g with or without K.

    ``chunk_size`` is that of another kernel and changes no result.
    """
    refuse_unknown(mixer.forward, 0.0, keywords)
    if use_qk_l2norm_in_kernel:
        query, key = _normalised(query), _normalised(key)

    def operation(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, sequence: Any) -> Tensor:
        return delta_rule(q, k, v, beta, g, sequence=sequence)[0]

    return _by_row(mixer.forward, operation, query, key, value, g, beta), None


def _normalised(x: Tensor) -> Tensor:
    """x / |x|, computed in fp32 at least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


def scan_states(
    mixer: MixerCall, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int | None = None,
    D: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf), **keywords: Any,
) -> Tensor:  # fmt: skip
    """``mamba_chunk_scan_combined``: x ``[B, T, H, P]``, dt ``[B, T, H]``, B, C ``[B, T, G, N]``, the rest per head."""
    refuse_unknown(mixer.forward, 0.0, keywords)
    options: dict[str, Any] = {"D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": tuple(dt_limit)}

    def operation(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, sequence: Any) -> Tensor:
        return mamba2(x, dt, A, B, C, **options, sequence=sequence)[0]

    return _by_row(mixer.forward, operation, x, dt, B, C)


def attend_linearly(
    mixer: MixerCall, module: Any, hidden_states: Tensor, position_embeddings: Any = None,
    attention_mask: None = None, past_key_values: None = None, **keywords: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """MiniMax's lightning attention, whose scan is written within its forward: one constant decay per head."""
    refuse_unknown(mixer.forward, 0.0, keywords)
    heads = module.act_fn(module.qkv_proj(hidden_states)).unflatten(-1, (module.num_attention_heads, -1))
    decay = -module.slope_rate.flatten()

    def operation(q: Tensor, k: Tensor, v: Tensor, sequence: Any) -> Tensor:
        return linear_attention(q, k, v, decay, scale=1.0, sequence=sequence)[0]

    out = module.norm(_by_row(mixer.forward, operation, *heads.chunk(3, dim=-1)).flatten(2))
    return module.out_proj(torch.sigmoid(module.output_gate(hidden_states)) * out), None


def skip_fused(mixer: MixerCall, *_: Any, **__: Any) -> None:
    """A fused function of convolution and scan, which mixers try first in training: None is "there is none"."""


def _by_row(forward: Forward, operation: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """All rows at once; with packed documents each row by itself."""
    sequences, rows = forward.sequences, len(tensors[0])
    if sequences[0].bounds is None or rows == 1:
        return operation(*tensors, sequence=sequences[0])
    if len(sequences) == 1:
        sequences = sequences * rows
    parts = [
        operation(*(x[row : row + 1] for x in tensors), sequence=sequence) for row, sequence in enumerate(sequences)
    ]
    return torch.cat(parts)
