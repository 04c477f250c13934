"""The recurrence token by token, in operations autograd understands: the judge of the chunked kernels, and slow."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    scale: float,
    entering: Tensor | None,
    lengths: list[int],
) -> tuple[Tensor, Tensor]:
    """S_t = exp(g_t) S_{t-1} + k_t^T v_t, o_t = scale q_t S_t for every segment on its own.

    Shapes: q, k [B, T, H, K], v [B, T, HV, V], entering and the returned leaving states [B*N, HV, K, V],
    g None | [H or HV] | [B, T, H or HV] | [B, T, H or HV, K]. Returns o [B, T, HV, V] and the leaving states.
    """
    batch, tokens, heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    group = value_heads // heads
    q, k = (x.repeat_interleave(group, 2) for x in (q, k))
    decay = _decay(g, batch, tokens, value_heads, q)
    if entering is None:
        entering = q.new_zeros(batch * len(lengths), value_heads, key_dim, value_dim)
    states = entering.unflatten(0, (batch, len(lengths)))
    outputs, leaving, t = [], [], 0
    for s, length in enumerate(lengths):
        state = states[:, s]
        for _ in range(length):
            state = decay[:, t, :, :, None] * state + k[:, t, :, :, None] * v[:, t, :, None, :]
            outputs.append(scale * (q[:, t, :, :, None] * state).sum(2))
            t += 1
        leaving.append(state)
    o = torch.stack(outputs, 1) if outputs else v * 1
    return o, torch.stack(leaving, 1).flatten(0, 1)


def _decay(g: Tensor | None, batch: int, tokens: int, value_heads: int, like: Tensor) -> Tensor:
    """exp(g) as [B, T, HV, K or 1], with a gradient of zero where g is -inf."""
    if g is None:
        return like.new_ones(batch, tokens, value_heads, 1)
    head_dim = 0 if g.dim() == 1 else 2
    g = g.repeat_interleave(value_heads // g.shape[head_dim], head_dim)
    if g.dim() == 1:
        g = g.expand(batch, tokens, -1)
    return (g if g.dim() == 4 else g[..., None]).exp()
