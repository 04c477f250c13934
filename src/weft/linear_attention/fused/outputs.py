"""The Triton kernels of o: the within-chunk part, and the part that needs the entering state."""

from __future__ import annotations

import triton
import triton.language as tl

from weft.linear_attention.fused.decay import (
    chunk_scores,
    cumulate_logs,
    decay_over,
    load_logs,
    load_state,
    load_tile,
    store_tile,
    to_gate,
    up_to,
)


@triton.jit
def output_intra(
    q, k, v, g, start, length, partial, scale,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, tokens_all, value_heads, group, gate_group,
    K: tl.constexpr, V: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, LEVELS: tl.constexpr,
    GATE: tl.constexpr, DOT: tl.constexpr, LOGS: tl.constexpr,
):  # fmt: skip
    """The part of o that stays within one chunk, one value head: scores times v, to ``partial`` [B, T, HV, V] in fp32."""
    chunk, cell = tl.program_id(0), tl.program_id(1)
    b, head = (cell // value_heads).to(tl.int64), cell % value_heads
    row = tl.arange(0, BC)
    token, tokens = tl.load(start + chunk).to(tl.int64), tl.load(length + chunk)
    q += b * q_b + token * q_t + (head // group) * q_h
    k += b * k_b + token * k_t + (head // group) * k_h
    v += b * v_b + token * v_t + head * v_h
    g = to_gate(g, b, token, head // gate_group, g_b, g_t, g_h, GATE)
    scores, _ = chunk_scores(q, k, g, row, q_t, k_t, g_t, tokens, K, BC, BK, LEVELS, GATE, DOT, LOGS)
    partial += ((b * tokens_all + token) * value_heads + head) * V
    for block in range((V + BV - 1) // BV):
        value = block * BV + tl.arange(0, BV)
        vs = load_tile(v, row, value, v_t, tokens, V)
        inner = scale * tl.dot(scores, vs, input_precision=DOT)
        store_tile(partial, inner, row, value, value_heads * V, tokens, V)


@triton.jit
def output_inter(
    q, g, start, length, chunk_piece, states, since, arriving, partial, o, scale,
    q_b, q_t, q_h, g_b, g_t, g_h, tokens_all, batch, value_heads, group, gate_group,
    K: tl.constexpr, V: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    GATE: tl.constexpr, DOT: tl.constexpr, LOGS: tl.constexpr,
):  # fmt: skip
    """o of one chunk and value head: ``partial`` plus q, decayed from the chunk's start, times the entering state."""
    chunk, cell = tl.program_id(0), tl.program_id(1)
    b, head = (cell // value_heads).to(tl.int64), cell % value_heads
    row = tl.arange(0, BC)
    token, tokens = tl.load(start + chunk).to(tl.int64), tl.load(length + chunk)
    q += b * q_b + token * q_t + (head // group) * q_h
    g = to_gate(g, b, token, head // gate_group, g_b, g_t, g_h, GATE)
    place = ((b * tokens_all + token) * value_heads + head) * V
    state = (chunk.to(tl.int64) * batch + b) * value_heads + head
    piece = (tl.load(chunk_piece + chunk).to(tl.int64) * batch + b) * value_heads + head
    if GATE == "constant" or GATE == "scalar":
        cumulated, _ = cumulate_logs(g, row, tokens, g_t, GATE)
        from_start = tl.exp(cumulated.to(tl.float32))
    for block in range((V + BV - 1) // BV):
        value = block * BV + tl.arange(0, BV)
        acc = tl.zeros([BC, BV], dtype=tl.float32)
        for key_block in range((K + BK - 1) // BK):
            key = key_block * BK + tl.arange(0, BK)
            qs = load_tile(q, row, key, q_t, tokens, K)
            if GATE == "vector":
                qs = qs * decay_over(up_to(row), load_logs(g, row, key, g_t, tokens, K), LOGS)
            elif GATE != "none":
                qs = qs * from_start[:, None]
            entering = load_state(states, arriving, since, state, piece, key, value, K, V, GATE)
            acc = tl.dot(qs, entering, acc, input_precision=DOT)
        acc = scale * acc + load_tile(partial + place, row, value, value_heads * V, tokens, V)
        store_tile(o + place, acc, row, value, value_heads * V, tokens, V)
