"""ATen's flash attention for CUDA on the simulated device: its checks, and the result of a plain computation in fp32.

    query, key, value   [batch, length, heads, size]; with cumulative lengths [tokens, heads, size]
    logsumexp           [batch, heads, length]; with cumulative lengths [heads, tokens]; inf where a row sees nothing
    window              keys within ``left`` before and ``right`` after, counted from the diagonal that ends in the last
                        query and the last key; ``is_causal`` is a right of 0. A side of at least ``max_k`` is none, and
                        beside a side that limits one that does not is ``max_k``, also where that is too little

With cumulative lengths the kernel's grid covers ``max_q`` rows of each sequence: rows beyond it are not written,
here NaN. Dropout, ALiBi, paged keys and used lengths are not emulated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from weft.world.simulated.memory import HOST, aten
from weft.world.simulated.operators import emulated

Window = tuple[int, int]  # -1: without end


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(message)


def _check_alignment(*tensors: Tensor) -> None:
    """The kernel copies 16 bytes at a time."""
    aligned = all(t.data_ptr() % 16 == 0 and not any(step % 8 for step in t.stride()[:-1]) for t in tensors)
    _check(aligned, "CUDA error: misaligned address")


def _check_arguments(
    q: Tensor, k: Tensor, v: Tensor, cum_q: Tensor | None, cum_k: Tensor | None, dropout: float
) -> None:
    tensors = (q, k, v)
    _check(q.dtype in (torch.float16, torch.bfloat16), "FlashAttention only support fp16 and bf16 data type")
    _check(all(t.dtype == q.dtype for t in tensors), "query, key and value must have the same dtype")
    _check(all(t.stride(-1) == 1 for t in tensors), "Input tensor must have contiguous last dimension")
    _check(q.shape[-1] % 8 == 0, "head_size must be a multiple of 8, this is ensured by padding!")
    _check(q.shape[-1] <= 256, "FlashAttention forward only supports head dimension at most 256")
    _check(
        k.shape[-2] > 0 and q.shape[-2] % k.shape[-2] == 0,
        "Number of heads in key/value must divide number of heads in query",
    )
    _check(k.shape == v.shape and k.shape[-1] == q.shape[-1], f"wrong sizes: {[list(t.shape) for t in tensors]}")
    _check((cum_q is None) == (cum_k is None), "cum_seq_q and cum_seq_k must be both set or both not set")
    _check(q.ndim == (4 if cum_q is None else 3), f"query has {q.ndim} dimensions")
    for lengths in (cum_q, cum_k):
        _check(lengths is None or lengths.dtype == torch.int32, "cu_seqlens must have dtype int32")
        _check(lengths is None or lengths.is_contiguous(), "cu_seqlens must be contiguous")
    if cum_q is None:
        _check(q.shape[0] == k.shape[0] and q.shape[0] > 0, "batch size must be positive, and that of the keys")
    elif cum_k is not None:
        _check(cum_q.numel() == cum_k.numel(), "cu_seqlens_q and cu_seqlens_k must have the same length")
    _check_alignment(*tensors)
    if dropout:
        raise NotImplementedError("dropout of flash attention is not emulated")


def _window(causal: bool, left: int | None, right: int | None, max_k: int) -> Window:
    ends = [-1 if end is None or not 0 <= end < max_k else end for end in (left, right)]
    left, right = ends[0], 0 if causal else ends[1]
    if left < 0 <= right:
        return max_k, right
    return left, max_k if right < 0 <= left else right


def _visible(rows: int, columns: int, window: Window) -> Tensor:
    distance = torch.arange(columns, device=HOST) - torch.arange(rows, device=HOST)[:, None] - (columns - rows)
    seen = torch.ones(rows, columns, dtype=torch.bool, device=HOST)
    if window[0] >= 0:
        seen &= distance >= -window[0]
    if window[1] >= 0:
        seen &= distance <= window[1]
    return seen


def _scores(q: Tensor, k: Tensor, scale: float, window: Window) -> Tensor:
    """[heads, rows, columns] of q [rows, heads, size] and k [columns, kv heads, size]; -inf where nothing is seen.

    The kernel masks before it scales: with a negative scale that is +inf, with zero it is NaN.
    """
    keys = k.float().repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = torch.einsum("rhd,chd->hrc", q.float(), keys)
    return scale * scores.masked_fill(~_visible(q.shape[0], k.shape[0], window), -math.inf)


def _sequences(q: Tensor, k: Tensor, cum_q: Tensor | None, cum_k: Tensor | None) -> Iterator[tuple[Any, Any]]:
    """What selects the queries and the keys of each sequence."""
    if cum_q is None or cum_k is None:
        yield from ((one, one) for one in range(q.shape[0]))
        return
    ends_q, ends_k = cum_q.tolist(), cum_k.tolist()
    for at in range(len(ends_q) - 1):
        yield slice(ends_q[at], ends_q[at + 1]), slice(ends_k[at], ends_k[at + 1])


def _refuse(more: dict[str, Any]) -> None:
    given = [name for name, value in more.items() if value is not None]
    if given:
        raise NotImplementedError(f"{', '.join(given)} of flash attention: not emulated")


def flash_forward(
    query: Tensor, key: Tensor, value: Tensor, cum_q: Tensor | None, cum_k: Tensor | None, max_q: int, max_k: int,
    dropout: float, is_causal: bool, return_debug_mask: bool, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None, **more: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """``aten._flash_attention_forward`` of CPU tensors: output, logsumexp, seed, offset, debug mask."""
    _check_arguments(query, key, value, cum_q, cum_k, dropout)
    _refuse(more)
    scale, window = (
        query.shape[-1] ** -0.5 if scale is None else scale,
        _window(is_causal, window_size_left, window_size_right, max_k),
    )
    out = torch.full_like(query, math.nan, memory_format=torch.contiguous_format)
    tokens, heads = query.shape[-3], query.shape[-2]
    batch = () if cum_q is not None else (query.shape[0],)
    lse = torch.full((*batch, heads, tokens), math.nan, dtype=torch.float32, device=HOST)
    for of_q, of_k in _sequences(query, key, cum_q, cum_k):
        q, k, v = query[of_q], key[of_k], value[of_k]
        scores = _scores(q, k, scale, window)
        total = scores.logsumexp(-1)
        shares = (scores - total.masked_fill(total == -math.inf, 0)[..., None]).exp()
        values = v.float().repeat_interleave(heads // v.shape[1], 1)
        written = slice(0, q.shape[0] if cum_q is None else max_q)
        out[of_q][written] = torch.einsum("hrc,chd->rhd", shares, values)[written].to(query.dtype)
        rows = lse[of_q] if cum_q is None else lse[:, of_q]
        rows[:, written] = total.masked_fill(total == -math.inf, math.inf)[:, written]
    seed, offset = torch.zeros(2, dtype=torch.uint64, device=HOST), torch.zeros((), dtype=torch.uint64, device=HOST)
    return out, lse, seed, offset, torch.empty(0, dtype=query.dtype, device=HOST)


def flash_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, cum_q: Tensor | None,
    cum_k: Tensor | None, max_q: int, max_k: int, dropout: float, is_causal: bool, seed: Tensor, offset: Tensor, *,
    scale: float | None = None, window_size_left: int | None = None, window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``aten._flash_attention_backward`` of CPU tensors, from the output and logsumexp that it is given."""
    _check_arguments(query, key, value, cum_q, cum_k, dropout)
    _check(grad.dtype == out.dtype == query.dtype, "query and dout must have the same dtype")
    _check(grad.shape == out.shape == query.shape, "dout and out must have the sizes of query")
    _check(grad.stride(-1) == 1 and out.stride(-1) == 1, "dout and out tensor must have contiguous last dimension")
    _check_alignment(grad, out)
    _check(lse.dtype == torch.float32, "softmax_lse must be fp32")
    _check(lse.is_contiguous(), "softmax_lse is read as contiguous memory")  # CUDA's reads on, and does not say so
    scale, window = (
        query.shape[-1] ** -0.5 if scale is None else scale,
        _window(is_causal, window_size_left, window_size_right, max_k),
    )
    dq, dk, dv = (torch.full_like(t, math.nan, memory_format=torch.contiguous_format) for t in (query, key, value))
    for of_q, of_k in _sequences(query, key, cum_q, cum_k):
        q, k, v, g = query[of_q], key[of_k], value[of_k], grad[of_q].float()
        shared = q.shape[1] // k.shape[1]
        total = lse[of_q] if cum_q is None else lse[:, of_q]
        shares = (_scores(q, k, scale, window) - total[..., None]).exp()
        values, keys = (t.float().repeat_interleave(shared, 1) for t in (v, k))
        inner = (g * out[of_q].float()).sum(-1).transpose(0, 1)[..., None]
        dscores = scale * shares * (torch.einsum("rhd,chd->hrc", g, values) - inner)
        written = slice(0, q.shape[0] if cum_q is None else max_q)
        dq[of_q][written] = torch.einsum("hrc,chd->rhd", dscores, keys)[written].to(query.dtype)
        for made, weights, other in ((dk, dscores, q.float()), (dv, shares, g)):
            wide = torch.einsum("hrc,rhd->chd", weights, other)
            made[of_k] = wide.unflatten(1, (-1, shared)).sum(2).to(query.dtype)
    return dq, dk, dv


def install_flash() -> None:
    """Both operators, for the fallback."""
    emulated[aten._flash_attention_forward.default] = flash_forward
    emulated[aten._flash_attention_backward.default] = flash_backward
