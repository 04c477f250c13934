"""The launches of the Triton kernels: strides, blocks and grids. This module imports Triton.

Where a kernel's class of decay does not touch a tensor, another one stands in its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.ops.linear_attention.fused import backward, backward_finish, outputs, states
from weft.ops.linear_attention.fused.tiling import Tiling, gate_kind, precision, tile


@dataclass(frozen=True)
class Launch:
    """A kernel with all it needs: what `run` starts, and what is compiled ahead of time."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    warps: int
    stages: int = 2
    registers: int = 255  # of a thread: left alone, the compiler spills a few to fit one more program

    def run(self) -> None:
        """Start it on the device of its first argument: Triton takes the current one."""
        device = self.arguments[0].device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self.kernel[self.grid](*self.arguments, **self.constants, **self.options)

    @property
    def options(self) -> dict[str, int]:
        """What the compiler is told."""
        return {"num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.registers}


def _strides(*tensors: Tensor) -> list[int]:
    """Of batch, token and head; the last dimension lies together. A gate without tokens has none."""
    return [stride for x in tensors for stride in ([0, 0, 0] if x.dim() == 1 else x.stride()[:3])]


def _groups(value_heads: int, x: Tensor, g: Tensor | None) -> list[int]:
    """Value heads that share a head of x, and of g."""
    return [value_heads // x.shape[2], 1 if g is None else value_heads // g.shape[0 if g.dim() == 1 else 2]]


def _blocks(dim: int, block: int) -> int:
    return -(-dim // block)


def _common(kernel: str, chunk: int, x: Tensor, y: Tensor, g: Tensor | None) -> tuple[Tiling, dict[str, Any]]:
    """The blocks, and the constants all kernels on tokens share."""
    gate = gate_kind(g)
    tiling = tile(kernel, chunk, x.shape[-1], y.shape[-1], gate, x.dtype)
    return tiling, {
        "K": x.shape[-1], "V": y.shape[-1], "BC": tiling.chunk, "BK": tiling.keys, "BV": tiling.values, "GATE": gate,
        "DOT": precision(x.dtype),
    }  # fmt: skip


def _pairs(tiling: Tiling, chunk: int, g: Tensor | None) -> dict[str, Any]:
    """The constants of kernels on pairs of token blocks: halvings of a block, and how logs are summed for them."""
    logs = "fp32" if g is not None and g.dtype == torch.float32 else "half"
    return {"BR": tiling.rows, "LEVELS": min(chunk, tiling.rows).bit_length() - 1, "LOGS": logs}


def _rows(tables: Sequence[Tensor], tiling: Tiling) -> int:
    """Token blocks of all chunks."""
    return tables[0].shape[0] * (tiling.chunk // tiling.rows)


def chunk_states(
    x: Tensor, y: Tensor, g: Tensor | None, tables: Sequence[Tensor], chunk_states: Tensor, since: Tensor | None,
    sums: Tensor, sum_logs: Tensor | None, scale: float, chunk: int, reverse: bool,
) -> Launch:  # fmt: skip
    """See `states.chunk_states`; ``tables`` are start, length, first and last."""
    tiling, common = _common("chunk_states", chunk, x, y, g)
    batch, _, value_heads, _ = y.shape
    parts = _blocks(x.shape[-1], tiling.keys) * _blocks(y.shape[-1], tiling.values)
    gates = x if g is None else g
    logs = (sums, sums) if since is None or sum_logs is None else (since, sum_logs)
    arguments = (
        x, y, gates, *tables, chunk_states, logs[0], sums, logs[1], scale, *_strides(x, y, gates), batch, value_heads,
        *_groups(value_heads, x, g),
    )  # fmt: skip
    grid = tables[2].shape[0], parts, batch * value_heads
    return Launch(states.chunk_states, grid, arguments, common | {"BR": tiling.rows, "REVERSE": reverse}, tiling.warps)


def scan_pieces(
    sums: Tensor, sum_logs: Tensor | None, boundary: Tensor | None, tables: Sequence[Tensor], arriving: Tensor,
    final: Tensor, final_log: Tensor | None, reverse: bool,
) -> Launch:  # fmt: skip
    """See `states.scan_pieces`; ``tables`` are segment_first and segment_last."""
    _, batch, value_heads, keys, values = sums.shape
    gate = "none" if sum_logs is None else "vector" if sum_logs.dim() == 4 else "scalar"
    tiling = tile("scan_pieces", 1, keys, values, gate, sums.dtype)
    segments = tables[0].shape[0]
    logs = (sums, sums) if sum_logs is None or final_log is None else (sum_logs, final_log)
    arguments = (
        sums, logs[0], sums if boundary is None else boundary, *tables, arriving, final, logs[1], batch, value_heads,
        segments,
    )  # fmt: skip
    constants = {
        "K": keys, "V": values, "BK": tiling.keys, "BV": tiling.values, "GATE": gate, "REVERSE": reverse,
        "HAS_BOUNDARY": boundary is not None,
    }  # fmt: skip
    grid = segments, _blocks(keys, tiling.keys) * _blocks(values, tiling.values), batch * value_heads
    return Launch(states.scan_pieces, grid, arguments, constants, tiling.warps)


def output_intra(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, tables: Sequence[Tensor], partial: Tensor, scale: float,
    chunk: int,
) -> Launch:  # fmt: skip
    """See `outputs.output_intra`; ``tables`` are start and length."""
    tiling, common = _common("output_intra", chunk, q, v, g)
    batch, tokens, value_heads, _ = v.shape
    gates = q if g is None else g
    arguments = (
        q, k, v, gates, *tables, partial, scale, *_strides(q, k, v, gates), tokens, value_heads,
        *_groups(value_heads, q, g),
    )  # fmt: skip
    grid = _rows(tables, tiling), _blocks(v.shape[-1], tiling.values), batch * value_heads
    return Launch(outputs.output_intra, grid, arguments, common | _pairs(tiling, chunk, g), tiling.warps)


def output_inter(
    q: Tensor, g: Tensor | None, tables: Sequence[Tensor], chunk_states: Tensor, since: Tensor | None, arriving: Tensor,
    partial: Tensor, o: Tensor, scale: float, chunk: int,
) -> Launch:  # fmt: skip
    """See `outputs.output_inter`; ``tables`` are start, length and piece."""
    tiling, common = _common("output_inter", chunk, q, o, g)
    batch, tokens, value_heads, _ = o.shape
    gates = q if g is None else g
    arguments = (
        q, gates, *tables, chunk_states, partial if since is None else since, arriving, partial, o, scale,
        *_strides(q, gates), tokens, batch, value_heads, *_groups(value_heads, q, g),
    )  # fmt: skip
    grid = tables[0].shape[0], _blocks(o.shape[-1], tiling.values), batch * value_heads
    return Launch(outputs.output_inter, grid, arguments, common, tiling.warps)


def query_grads(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, do: Tensor, tables: Sequence[Tensor], chunk_states: Tensor,
    since: Tensor | None, arriving: Tensor, dq: Tensor, row_gate: Tensor | None, scale: float, chunk: int,
) -> Launch:  # fmt: skip
    """See `backward.query_grads`; ``tables`` are start, length and piece."""
    tiling, common = _common("query_grads", chunk, q, v, g)
    batch, tokens, value_heads, _ = v.shape
    gates = q if g is None else g
    arguments = (
        q, k, v, gates, do, *tables, chunk_states, dq if since is None else since, arriving, dq,
        dq if row_gate is None else row_gate, scale, *_strides(q, k, v, gates, do), tokens, batch, value_heads,
        *_groups(value_heads, q, g),
    )  # fmt: skip
    grid = _rows(tables, tiling), _blocks(q.shape[-1], tiling.keys), batch * value_heads
    return Launch(backward.query_grads, grid, arguments, common | _pairs(tiling, chunk, g), tiling.warps)


def key_grads(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, do: Tensor, tables: Sequence[Tensor], dk: Tensor,
    col_gate: Tensor | None, scale: float, chunk: int,
) -> Launch:  # fmt: skip
    """See `backward.key_grads`; ``tables`` are start and length."""
    tiling, common = _common("key_grads", chunk, q, v, g)
    batch, tokens, value_heads, _ = v.shape
    gates = q if g is None else g
    arguments = (
        q, k, v, gates, do, *tables, dk, dk if col_gate is None else col_gate, scale, *_strides(q, k, v, gates, do),
        tokens, batch, value_heads, *_groups(value_heads, q, g),
    )  # fmt: skip
    grid = _rows(tables, tiling), _blocks(q.shape[-1], tiling.keys), batch * value_heads
    return Launch(backward.key_grads, grid, arguments, common | _pairs(tiling, chunk, g), tiling.warps)


def value_grads(
    q: Tensor, k: Tensor, g: Tensor | None, do: Tensor, tables: Sequence[Tensor], dv: Tensor, scale: float, chunk: int
) -> Launch:
    """See `backward.value_grads`; ``tables`` are start and length."""
    tiling, common = _common("value_grads", chunk, q, do, g)
    batch, tokens, value_heads, _ = do.shape
    gates = q if g is None else g
    arguments = (
        q, k, gates, do, *tables, dv, scale, *_strides(q, k, gates, do), tokens, value_heads,
        *_groups(value_heads, q, g),
    )  # fmt: skip
    grid = _rows(tables, tiling), _blocks(do.shape[-1], tiling.values), batch * value_heads
    return Launch(backward.value_grads, grid, arguments, common | _pairs(tiling, chunk, g), tiling.warps)


def key_finish(
    k: Tensor, v: Tensor, g: Tensor | None, tables: Sequence[Tensor], chunk_states: Tensor | None, since: Tensor | None,
    arriving: Tensor | None, grad_states: Tensor, until: Tensor | None, grad_arriving: Tensor, dk_inner: Tensor,
    row_gate: Tensor | None, col_gate: Tensor | None, dk: Tensor, dg: Tensor | None, chunk: int,
) -> Launch:  # fmt: skip
    """See `backward_finish.key_finish`; ``tables`` are start, length and piece."""
    tiling, common = _common("key_finish", chunk, k, v, g)
    batch, tokens, value_heads, _ = v.shape
    gates = k if g is None else g
    given = (
        chunk_states, since, arriving, grad_states, until, grad_arriving, dk_inner, row_gate, col_gate, dk, dg,
    )  # fmt: skip
    arguments = (
        k, v, gates, *tables, *(grad_states if x is None else x for x in given), *_strides(k, v, gates), tokens, batch,
        value_heads, *_groups(value_heads, k, g),
    )  # fmt: skip
    one_gate = g is not None and g.dim() < 4
    constants = common | {"PARTS": row_gate.shape[0] if one_gate and row_gate is not None else 1}
    grid = tables[0].shape[0], 1 if one_gate else _blocks(k.shape[-1], tiling.keys), batch * value_heads
    return Launch(backward_finish.key_finish, grid, arguments, constants, tiling.warps)


def value_finish(
    k: Tensor, g: Tensor | None, tables: Sequence[Tensor], grad_states: Tensor, until: Tensor | None,
    grad_arriving: Tensor, dv_inner: Tensor, dv: Tensor, chunk: int,
) -> Launch:  # fmt: skip
    """See `backward_finish.value_finish`; ``tables`` are start, length and piece."""
    tiling, common = _common("value_finish", chunk, k, dv, g)
    batch, tokens, value_heads, _ = dv.shape
    gates = k if g is None else g
    arguments = (
        k, gates, *tables, grad_states, grad_states if until is None else until, grad_arriving, dv_inner, dv,
        *_strides(k, gates), tokens, batch, value_heads, *_groups(value_heads, k, g),
    )  # fmt: skip
    grid = tables[0].shape[0], _blocks(dv.shape[-1], tiling.values), batch * value_heads
    return Launch(backward_finish.value_finish, grid, arguments, common, tiling.warps)
