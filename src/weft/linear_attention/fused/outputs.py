"""The Triton kernel of o: the within-chunk part, the part that needs the entering state, or both."""

from __future__ import annotations

import triton
import triton.language as tl

from weft.linear_attention.fused.decay import (
    cumulate_logs,
    decay_between,
    decay_over,
    load_logs,
    load_state,
    load_tile,
    score_block,
    store_tile,
    up_to,
)


@triton.jit
def outputs(
    q, k, v, g, start, length, chunk_piece, states, since, arriving, partial, o, scale,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, tokens_all, batch, value_heads, group, gate_group,
    K: tl.constexpr, V: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, LEVELS: tl.constexpr,
    GATE: tl.constexpr, INTRA: tl.constexpr, DOT: tl.constexpr, LOGS: tl.constexpr,
):  # fmt: skip
    """o of one chunk and value head.

    With INTRA: scores times v, written to ``partial`` in fp32. Without: ``partial`` plus q, decayed from the start of
    the chunk, times the state that enters it, written to ``o``. Both are [B, T, HV, V].
    """
    chunk, cell = tl.program_id(0), tl.program_id(1)
    b, head = cell // value_heads, cell % value_heads
    row = tl.arange(0, BC)
    token, tokens = tl.load(start + chunk).to(tl.int64), tl.load(length + chunk)
    q += b.to(tl.int64) * q_b + token * q_t + (head // group) * q_h
    if GATE == "constant":
        g += head // gate_group
    elif GATE != "none":
        g += b.to(tl.int64) * g_b + token * g_t + (head // gate_group) * g_h
    out = ((b.to(tl.int64) * tokens_all + token) * value_heads + head) * V
    out_t = value_heads * V
    if INTRA:
        k += b.to(tl.int64) * k_b + token * k_t + (head // group) * k_h
        v += b.to(tl.int64) * v_b + token * v_t + head * v_h
        scores = tl.zeros([BC, BC], dtype=tl.float32)
        for block in range((K + BK - 1) // BK):
            key = block * BK + tl.arange(0, BK)
            qs = load_tile(q, row, key, q_t, tokens, K)
            ks = load_tile(k, row, key, k_t, tokens, K)
            if GATE == "vector":
                scores += score_block(qs, ks, load_logs(g, row, key, g_t, tokens, K), row, LEVELS, DOT, LOGS)
            else:
                scores = tl.dot(qs, tl.trans(ks), scores, input_precision=DOT)
        if GATE == "constant" or GATE == "scalar":
            cumulated, _ = cumulate_logs(g, row, tokens, g_t, GATE)
            scores = scores * decay_between(cumulated, row, BC)
        elif GATE == "none":
            scores = tl.where(row[:, None] >= row[None, :], scores, 0.0)
        for block in range((V + BV - 1) // BV):
            value = block * BV + tl.arange(0, BV)
            vs = load_tile(v, row, value, v_t, tokens, V)
            inner = scale * tl.dot(scores, vs, input_precision=DOT)
            store_tile(partial + out, inner, row, value, out_t, tokens, V)
    else:
        state = (chunk.to(tl.int64) * batch + b) * value_heads + head
        piece = (tl.load(chunk_piece + chunk).to(tl.int64) * batch + b) * value_heads + head
        if GATE == "constant" or GATE == "scalar":
            cumulated, _ = cumulate_logs(g, row, tokens, g_t, GATE)
            decay = tl.exp(cumulated.to(tl.float32))[:, None]
        for block in range((V + BV - 1) // BV):
            value = block * BV + tl.arange(0, BV)
            acc = tl.zeros([BC, BV], dtype=tl.float32)
            for key_block in range((K + BK - 1) // BK):
                key = key_block * BK + tl.arange(0, BK)
                qs = load_tile(q, row, key, q_t, tokens, K)
                if GATE == "vector":
                    qs = qs * decay_over(up_to(row), load_logs(g, row, key, g_t, tokens, K), LOGS)
                elif GATE != "none":
                    qs = qs * decay
                entering = load_state(states, arriving, since, state, piece, key, value, K, V, GATE)
                acc = tl.dot(qs, entering, acc, input_precision=DOT)
            acc = scale * acc + load_tile(partial + out, row, value, out_t, tokens, V)
            store_tile(o + out, acc, row, value, out_t, tokens, V)
