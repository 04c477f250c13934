"""The Triton kernels of the states between chunks and of o, and in the other direction of their gradients and dv."""

from __future__ import annotations

import triton
import triton.language as tl

from weft.ops.fused.blocks import (
    block_logs,
    load_logs,
    load_state,
    load_tile,
    pair_scores,
    since_block,
    state_offsets,
    store_tile,
    to_gate,
    total_log,
    until_block,
)


@triton.jit
def chunk_states(
    x, y, g, start, length, piece_first, piece_last, states, since, sums, sum_logs, scale,
    x_b, x_t, x_h, y_b, y_t, y_h, g_b, g_t, g_h, batch, value_heads, group, gate_group,
    K: tl.constexpr, V: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    GATE: tl.constexpr, REVERSE: tl.constexpr, KEEP: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """The state at each chunk of one piece, from zero where the piece begins: a program per piece, head and block.

    Forward (x = k, y = v) the states entering the chunks; with REVERSE (x = q, y = do) the gradients of those leaving
    them, last chunk first. Writes ``states`` [M, B, HV, K, V], ``since`` [M, B, HV, K or 1], the log decay between the
    piece's border and the chunk's, and the same two for the whole piece: ``sums`` and ``sum_logs``. Without KEEP only
    ``sums``.
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
    writes_logs = KEEP and (part % blocks == 0 if GATE == "vector" else part == 0)
    state = tl.zeros([BK, BV], dtype=tl.float32)
    if GATE == "vector":
        log = tl.zeros([BK], dtype=tl.float64)
    else:
        log = tl.zeros([1], dtype=tl.float64)
    first, last = tl.load(piece_first + piece), tl.load(piece_last + piece)
    for step in range(first, last):
        chunk = first + last - 1 - step if REVERSE else step
        index = (chunk.to(tl.int64) * batch + b) * value_heads + head
        if KEEP:
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


@triton.jit
def output_intra(
    q, k, y, g, start, length, partial, scale,
    q_b, q_t, q_h, k_b, k_t, k_h, y_b, y_t, y_h, g_b, g_t, g_h, tokens_all, value_heads, group, gate_group,
    K: tl.constexpr, V: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    LEVELS: tl.constexpr, GATE: tl.constexpr, REVERSE: tl.constexpr, DOT: tl.constexpr, LOGS: tl.constexpr,
):  # fmt: skip
    """The part of o that stays within a chunk, for a block of its tokens, in fp32: scores times y = v.

    With REVERSE that of dv: scores, transposed, times y = do. ``partial`` is [B, T, HV, V]; a program per block of
    tokens, block of V and value head.
    """
    chunk, mine, cell = tl.program_id(0) // (BC // BR), tl.program_id(0) % (BC // BR), tl.program_id(2)
    b, head = (cell // value_heads).to(tl.int64), (cell % value_heads).to(tl.int64)
    token, tokens = tl.load(start + chunk).to(tl.int64), tl.load(length + chunk)
    value = tl.program_id(1) * BV + tl.arange(0, BV)
    row = tl.arange(0, BR)
    q += b * q_b + token * q_t + (head // group) * q_h
    k += b * k_b + token * k_t + (head // group) * k_h
    y += b * y_b + token * y_t + head * y_h
    g = to_gate(g, b, token, head // gate_group, g_b, g_t, g_h, GATE)
    acc = tl.zeros([BR, BV], dtype=tl.float32)
    apart: tl.constexpr = 1 if GATE == "vector" else 0  # the block on the diagonal
    if apart:
        scores = pair_scores(q, k, g, mine, mine, q_t, k_t, g_t, tokens, K, BC, BR, BK, LEVELS, GATE, True, DOT, LOGS)
        ys = load_tile(y, mine * BR + row, value, y_t, tokens, V)
        acc = tl.dot(tl.trans(scores) if REVERSE else scores, ys, acc, input_precision=DOT)
    first = mine + apart if REVERSE else 0
    last = tl.cdiv(tokens, BR) if REVERSE else mine + 1 - apart
    for other in range(first, last):
        i = other if REVERSE else mine
        j = mine if REVERSE else other
        scores = pair_scores(q, k, g, i, j, q_t, k_t, g_t, tokens, K, BC, BR, BK, LEVELS, GATE, False, DOT, LOGS)
        ys = load_tile(y, other * BR + row, value, y_t, tokens, V)
        acc = tl.dot(tl.trans(scores) if REVERSE else scores, ys, acc, input_precision=DOT)
    partial += ((b * tokens_all + token) * value_heads + head) * V
    store_tile(partial, scale * acc, mine * BR + row, value, value_heads * V, tokens, V)


@triton.jit
def output_inter(
    x, g, start, length, chunk_piece, states, since, arriving, partial, out, scale,
    x_b, x_t, x_h, g_b, g_t, g_h, tokens_all, batch, value_heads, group, gate_group,
    K: tl.constexpr, V: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    GATE: tl.constexpr, REVERSE: tl.constexpr, PIECES: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """o of a chunk: ``partial`` plus x = q, decayed from the chunk's start, times the state that enters it.

    With REVERSE dv: ``partial`` plus x = k, decayed to the chunk's end, times the gradient of the state that leaves it.
    A program per chunk, block of V and value head.
    """
    chunk, cell = tl.program_id(0), tl.program_id(2)
    b, head = (cell // value_heads).to(tl.int64), (cell % value_heads).to(tl.int64)
    token, tokens = tl.load(start + chunk).to(tl.int64), tl.load(length + chunk)
    value = tl.program_id(1) * BV + tl.arange(0, BV)
    row = tl.arange(0, BC)
    x += b * x_b + token * x_t + (head // group) * x_h
    g = to_gate(g, b, token, head // gate_group, g_b, g_t, g_h, GATE)
    place = ((b * tokens_all + token) * value_heads + head) * V
    state = (chunk.to(tl.int64) * batch + b) * value_heads + head
    piece = (tl.load(chunk_piece + chunk).to(tl.int64) * batch + b) * value_heads + head
    acc = tl.zeros([BC, BV], dtype=tl.float32)
    for block in range((K + BK - 1) // BK):
        key = block * BK + tl.arange(0, BK)
        xs = load_tile(x, row, key, x_t, tokens, K)
        if GATE == "vector":
            if REVERSE:
                xs = xs * tl.exp(until_block(g, row, BC, key, g_t, tokens, K))
            else:
                xs = xs * tl.exp(since_block(g, row, key, g_t, tokens, K))
        there = load_state(states, arriving, since, state, piece, key, value, K, V, GATE, PIECES)
        acc = tl.dot(xs, there, acc, input_precision=DOT)
    if GATE == "constant" or GATE == "scalar":
        inner = block_logs(g, 0, tokens, g_t, GATE, BC)
        if REVERSE:
            inner = total_log(g, 0, tokens, g_t, GATE, BC) - inner
        inner = inner.to(tl.float32)
        acc = acc * tl.exp(tl.minimum(inner, 0.0) if REVERSE else inner)[:, None]
    acc = scale * acc + load_tile(partial + place, row, value, value_heads * V, tokens, V)
    store_tile(out + place, acc, row, value, value_heads * V, tokens, V)
