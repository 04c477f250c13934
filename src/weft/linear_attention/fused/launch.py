"""The launches of the Triton kernels: strides, blocks and grids. The only module that needs Triton to be there."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from weft.linear_attention.fused import backward, outputs, states
from weft.linear_attention.fused.tiling import Tiling, precision, tile


def gate_kind(g: Tensor | None) -> str:
    """The class of a decay by its shape."""
    return "none" if g is None else {1: "constant", 3: "scalar", 4: "vector"}[g.dim()]


def _levels(chunk: int) -> int:
    return chunk.bit_length() - 1


def _on(tensor: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def _strides(*tensors: Tensor | None) -> list[int]:
    """Of batch, token and head; the last dimension lies together. A gate that has no tokens is passed as it is."""
    found: list[int] = []
    for x in tensors:
        found += [0, 0, 0] if x is None or x.dim() == 1 else list(x.stride()[:3])
    return found


def _heads(value_heads: int, x: Tensor, g: Tensor | None) -> list[int]:
    """Value heads that share a head of x, and of g."""
    return [value_heads // x.shape[2], 1 if g is None else value_heads // g.shape[0 if g.dim() == 1 else 2]]


def _blocks(dim: int, block: int) -> int:
    return -(-dim // block)


def _common(kernel: str, chunk: int, x: Tensor, y: Tensor, g: Tensor | None) -> tuple[Tiling, dict[str, Any]]:
    """The blocks, and the arguments all kernels on tokens share."""
    gate = gate_kind(g)
    tiling = tile(kernel, chunk, x.shape[-1], y.shape[-1], gate)
    return tiling, {
        "K": x.shape[-1], "V": y.shape[-1], "BC": tiling.rows, "BK": tiling.keys, "BV": tiling.values, "GATE": gate,
        "DOT": precision(x.dtype), "LOGS": precision(*([] if g is None else [g.dtype])),
        "num_warps": tiling.warps, "num_stages": 2,
    }  # fmt: skip


def chunk_states(
    x: Tensor, y: Tensor, g: Tensor | None, tables: Sequence[Tensor], states_: Tensor, since: Tensor | None,
    sums: Tensor, sum_logs: Tensor | None, scale: float, chunk: int, reverse: bool,
) -> None:  # fmt: skip
    """See `states.chunk_states`; ``tables`` are start, length, first and last."""
    tiling, common = _common("chunk_states", chunk, x, y, g)
    batch, value_heads = y.shape[0], y.shape[2]
    parts = _blocks(x.shape[-1], tiling.keys) * _blocks(y.shape[-1], tiling.values)
    grid = parts, tables[2].shape[0], batch * value_heads
    with _on(x):
        states.chunk_states[grid](
            x, y, x if g is None else g, *tables, states_, sums if since is None else since, sums,
            sums if sum_logs is None else sum_logs, scale, *_strides(x, y, g), batch, value_heads,
            *_heads(value_heads, x, g), REVERSE=reverse, **common,
        )  # fmt: skip


def scan_pieces(
    sums: Tensor, sum_logs: Tensor | None, boundary: Tensor | None, tables: Sequence[Tensor], arriving: Tensor,
    final: Tensor, final_log: Tensor | None, reverse: bool,
) -> None:  # fmt: skip
    """See `states.scan_pieces`; ``tables`` are segment_first and segment_last."""
    _, batch, value_heads, keys, values = sums.shape
    gate = "none" if sum_logs is None else "vector" if sum_logs.dim() == 4 else "scalar"
    tiling = tile("scan_pieces", 1, keys, values, gate)
    segments = tables[0].shape[0]
    grid = _blocks(keys, tiling.keys) * _blocks(values, tiling.values), segments, batch * value_heads
    with _on(sums):
        states.scan_pieces[grid](
            sums, sums if sum_logs is None else sum_logs, sums if boundary is None else boundary, *tables, arriving,
            final, sums if final_log is None else final_log, batch, value_heads, segments, K=keys, V=values,
            BK=tiling.keys, BV=tiling.values, GATE=gate, REVERSE=reverse, HAS_BOUNDARY=boundary is not None,
            num_warps=tiling.warps, num_stages=2,
        )  # fmt: skip


def output_intra(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, tables: Sequence[Tensor], partial: Tensor, scale: float,
    chunk: int,
) -> None:  # fmt: skip
    """See `outputs.outputs`; ``tables`` are start, length and piece."""
    _, common = _common("output_intra", chunk, q, v, g)
    batch, tokens, value_heads, _ = v.shape
    with _on(q):
        outputs.outputs[tables[0].shape[0], batch * value_heads](
            q, k, v, q if g is None else g, *tables, partial, partial, partial, partial, partial, scale,
            *_strides(q, k, v, g), tokens, batch, value_heads, *_heads(value_heads, q, g), LEVELS=_levels(chunk),
            INTRA=True, **common,
        )  # fmt: skip


def output_inter(
    q: Tensor, g: Tensor | None, tables: Sequence[Tensor], states_: Tensor, since: Tensor | None, arriving: Tensor,
    partial: Tensor, o: Tensor, scale: float, chunk: int,
) -> None:  # fmt: skip
    """See `outputs.outputs`; ``tables`` are start, length and piece."""
    _, common = _common("output_inter", chunk, q, o, g)
    batch, tokens, value_heads, _ = o.shape
    with _on(q):
        outputs.outputs[tables[0].shape[0], batch * value_heads](
            q, q, q, q if g is None else g, *tables, states_, partial if since is None else since, arriving, partial,
            o, scale, *_strides(q, q, q, g), tokens, batch, value_heads, *_heads(value_heads, q, g),
            LEVELS=_levels(chunk), INTRA=False, **common,
        )  # fmt: skip


def intra_backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, do: Tensor, tables: Sequence[Tensor], states_: Tensor,
    since: Tensor | None, arriving: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, dg: Tensor | None, scale: float,
    chunk: int,
) -> None:  # fmt: skip
    """See `backward.intra_backward`; ``tables`` are start, length and piece."""
    _, common = _common("intra_backward", chunk, q, v, g)
    batch, tokens, value_heads, _ = v.shape
    with _on(q):
        backward.intra_backward[tables[0].shape[0], batch * value_heads](
            q, k, v, q if g is None else g, do, *tables, states_, dk if since is None else since, arriving, dq, dk, dv,
            dk if dg is None else dg, scale, *_strides(q, k, v, g, do), tokens, batch, value_heads,
            *_heads(value_heads, q, g), LEVELS=_levels(chunk), **common,
        )  # fmt: skip


def inter_backward(
    k: Tensor, v: Tensor, g: Tensor | None, tables: Sequence[Tensor], states_: Tensor | None, since: Tensor | None,
    arriving: Tensor | None, grad_states: Tensor, until: Tensor | None, grad_arriving: Tensor, dk_inner: Tensor,
    dv_inner: Tensor, dg_inner: Tensor | None, dk: Tensor, dv: Tensor, dg: Tensor | None, chunk: int,
) -> None:  # fmt: skip
    """See `backward.inter_backward`; ``tables`` are start, length and piece."""
    _, common = _common("inter_backward", chunk, k, v, g)
    batch, tokens, value_heads, _ = v.shape
    none = grad_states  # in place of what a kernel without decay does not touch
    with _on(k):
        backward.inter_backward[tables[0].shape[0], batch * value_heads](
            k, v, k if g is None else g, *tables, none if states_ is None else states_, none if since is None else since,
            none if arriving is None else arriving, grad_states, none if until is None else until, grad_arriving,
            dk_inner, dv_inner, none if dg_inner is None else dg_inner, dk, dv, none if dg is None else dg,
            *_strides(k, v, g), tokens, batch, value_heads, *_heads(value_heads, k, g), **common,
        )  # fmt: skip
