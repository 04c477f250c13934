"""Triton kernels of the first phase: the states between chunks, and their recurrence over pieces of segments."""

from __future__ import annotations

import triton
import triton.language as tl

from weft.ops.linear_attention.fused.decay import (
    block_logs,
    load_logs,
    load_tile,
    since_block,
    state_offsets,
    to_gate,
    total_log,
    until_block,
)


@triton.jit
def chunk_states(
    x, y, g, start, length, piece_first, piece_last, states, since, sums, sum_logs, scale,
    x_b, x_t, x_h, y_b, y_t, y_h, g_b, g_t, g_h, batch, value_heads, group, gate_group,
    K: tl.constexpr, V: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    GATE: tl.constexpr, REVERSE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """The state at each chunk of one piece, from zero where the piece begins: a program per piece, head and block.

    Forward (x = k, y = v) the states entering the chunks; with REVERSE (x = q, y = do) the gradients of those leaving
    them, last chunk first. Writes ``states`` [M, B, HV, K, V], ``since`` [M, B, HV, K or 1], the log decay between the
    piece's border and the chunk's, and the same two for the whole piece: ``sums`` and ``sum_logs``.
    """
    piece, part, cell = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, head = (cell // value_heads).to(tl.int64), (cell % value_heads).to(tl.int64)
    blocks: tl.constexpr = (V + BV - 1) // BV
    key = (part // blocks) * BK + tl.arange(0, BK)
    value = (part % blocks) * BV + tl.arange(0, BV)
    x += b * x_b + (head // group) * x_h
    y += b * y_b + head * y_h
    g = to_gate(g, b, 0, head // gate_group, g_b, g_t, g_h, GATE)
    inside = (key[:, None] < K) & (value[None, :] < V)
    offsets = state_offsets(key, value, V)
    writes_logs = part % blocks == 0 if GATE == "vector" else part == 0
    state = tl.zeros([BK, BV], dtype=tl.float32)
    if GATE == "vector":
        log = tl.zeros([BK], dtype=tl.float64)
    else:
        log = tl.zeros([1], dtype=tl.float64)
    first, last = tl.load(piece_first + piece), tl.load(piece_last + piece)
    for step in range(first, last):
        chunk = first + last - 1 - step if REVERSE else step
        index = (chunk.to(tl.int64) * batch + b) * value_heads + head
        tl.store(states + index * (K * V) + offsets, state, mask=inside)
        if GATE == "vector":
            if writes_logs:
                tl.store(since + index * K + key, log.to(tl.float32), mask=key < K)
        elif GATE != "none" and writes_logs:
            tl.store(since + index + tl.arange(0, 1), log.to(tl.float32))
        token, tokens = tl.load(start + chunk).to(tl.int64), tl.load(length + chunk)
        for turn in range(BC // BR):
            block = BC // BR - 1 - turn if REVERSE else turn
            row = block * BR + tl.arange(0, BR)
            xs = load_tile(x + token * x_t, row, key, x_t, tokens, K)
            ys = load_tile(y + token * y_t, row, value, y_t, tokens, V)
            gates = g + token * g_t
            if GATE == "vector":
                if REVERSE:
                    inner = since_block(gates, row, key, g_t, tokens, K)
                else:
                    inner = until_block(gates, row, (block + 1) * BR, key, g_t, tokens, K)
                xs = xs * tl.exp(inner)
                total = tl.sum(load_logs(gates, row, key, g_t, tokens, K), 0)
                state = state * tl.exp(total)[:, None]
                log += total.to(tl.float64)
            elif GATE != "none":
                total = total_log(gates, block * BR, tokens, g_t, GATE, BR)
                inner = block_logs(gates, block * BR, tokens, g_t, GATE, BR)
                if not REVERSE:
                    inner = total - inner
                xs = xs * tl.exp(tl.minimum(inner.to(tl.float32), 0.0))[:, None]
                state = state * tl.exp(total.to(tl.float32))
                log += total
            state += scale * tl.dot(tl.trans(xs), ys, input_precision=DOT)
    index = (piece.to(tl.int64) * batch + b) * value_heads + head
    tl.store(sums + index * (K * V) + offsets, state, mask=inside)
    if GATE == "vector":
        if writes_logs:
            tl.store(sum_logs + index * K + key, log.to(tl.float32), mask=key < K)
    elif GATE != "none" and writes_logs:
        tl.store(sum_logs + index + tl.arange(0, 1), log.to(tl.float32))


@triton.jit
def scan_pieces(
    sums, sum_logs, boundary, segment_first, segment_last, arriving, final, final_log, batch, value_heads, segments,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GATE: tl.constexpr, REVERSE: tl.constexpr,
    HAS_BOUNDARY: tl.constexpr,
):  # fmt: skip
    """The recurrence over the pieces of one segment, for one head and block of the state.

    Reads ``sums`` [P, B, HV, K, V], ``sum_logs`` [P, B, HV, K or 1] and what is at the segment's border, ``boundary``
    [B*N, HV, K, V] (zero without). Writes what arrives at each piece, ``arriving`` [P, B, HV, K, V], and what comes out
    at the other border: ``final`` [B*N, HV, K, V] and ``final_log`` [B*N, HV, K or 1], the log decay of the segment.
    """
    segment, part, cell = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, head = (cell // value_heads).to(tl.int64), (cell % value_heads).to(tl.int64)
    blocks: tl.constexpr = (V + BV - 1) // BV
    key = (part // blocks) * BK + tl.arange(0, BK)
    value = (part % blocks) * BV + tl.arange(0, BV)
    inside = (key[:, None] < K) & (value[None, :] < V)
    offsets = state_offsets(key, value, V)
    outer = (b * segments + segment) * value_heads + head
    state = tl.zeros([BK, BV], dtype=tl.float32)
    if HAS_BOUNDARY:
        state = tl.load(boundary + outer * (K * V) + offsets, mask=inside, other=0.0)
    if GATE == "vector":
        log = tl.zeros([BK], dtype=tl.float64)
    else:
        log = tl.zeros([1], dtype=tl.float64)
    first, last = tl.load(segment_first + segment), tl.load(segment_last + segment)
    for step in range(first, last):
        piece = first + last - 1 - step if REVERSE else step
        index = (piece.to(tl.int64) * batch + b) * value_heads + head
        tl.store(arriving + index * (K * V) + offsets, state, mask=inside)
        total = tl.load(sums + index * (K * V) + offsets, mask=inside, other=0.0)
        if GATE == "vector":
            through = tl.load(sum_logs + index * K + key, mask=key < K, other=0.0)
            state = state * tl.exp(through)[:, None]
            log += through.to(tl.float64)
        elif GATE != "none":
            through = tl.load(sum_logs + index + tl.arange(0, 1))
            state = state * tl.exp(through)[:, None]
            log += through.to(tl.float64)
        state += total
    tl.store(final + outer * (K * V) + offsets, state, mask=inside)
    writes_logs = part % blocks == 0 if GATE == "vector" else part == 0
    if GATE == "vector":
        if writes_logs:
            tl.store(final_log + outer * K + key, log.to(tl.float32), mask=key < K)
    elif GATE != "none" and writes_logs:
        tl.store(final_log + outer + tl.arange(0, 1), log.to(tl.float32))
