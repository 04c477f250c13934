"""The Triton kernels of the backward that need no gradient of the leaving states: dq, and within chunks dk and dv.

A program works on one block of BR tokens of a chunk, one block of K (or V) and one value head. Results are
[B, T, HV, K or V]. ``row`` and ``col`` hold what a token's q and k give to the gates, the diagonal of the scores left
out: [B, T, HV, K], or [parts, B, T, HV] with a part for each block of K.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.ops.linear_attention.fused.decay import (
    cumulate_logs,
    decay_to_middle,
    load_logs,
    load_state,
    load_tile,
    over_middle,
    since_block,
    store_tile,
    sum_blocks,
    to_gate,
)
from weft.ops.linear_attention.fused.scores import diagonal_grads, pair_decay, pair_grads, pair_scores, reach


@triton.jit
def store_gate_part(
    table, given, place, key, part, batch, tokens_all, value_heads, row, tokens, K: tl.constexpr,
    GATE: tl.constexpr,
):  # fmt: skip
    """Keep what tokens give to the gates, [BR, BK]: as it is, or summed over the keys where one gate is for all."""
    if GATE == "vector":
        store_tile(table + place * K, given, row, key, value_heads * K, tokens, K)
    elif GATE != "none":
        table += part.to(tl.int64) * batch * tokens_all * value_heads + place
        tl.store(table + row * value_heads, tl.sum(given, 1), mask=row < tokens)


@triton.jit
def query_grads(
    q, k, v, g, do, start, length, chunk_piece, states, since, arriving, dq, row_gate, scale,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, do_b, do_t, do_h,
    tokens_all, batch, value_heads, group, gate_group,
    K: tl.constexpr, V: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    LEVELS: tl.constexpr, GATE: tl.constexpr, DOT: tl.constexpr, LOGS: tl.constexpr,
):  # fmt: skip
    """dq, all of it: from the keys of the chunk and from the state that enters it."""
    chunk, i = tl.program_id(0) // (BC // BR), tl.program_id(0) % (BC // BR)
    part, cell = tl.program_id(1), tl.program_id(2)
    b, head = (cell // value_heads).to(tl.int64), (cell % value_heads).to(tl.int64)
    token, tokens = tl.load(start + chunk).to(tl.int64), tl.load(length + chunk)
    key = part * BK + tl.arange(0, BK)
    row = i * BR + tl.arange(0, BR)
    q += b * q_b + token * q_t + (head // group) * q_h
    k += b * k_b + token * k_t + (head // group) * k_h
    v += b * v_b + token * v_t + head * v_h
    do += b * do_b + token * do_t + head * do_h
    g = to_gate(g, b, token, head // gate_group, g_b, g_t, g_h, GATE)
    place = (b * tokens_all + token) * value_heads + head
    state = (chunk.to(tl.int64) * batch + b) * value_heads + head
    piece = (tl.load(chunk_piece + chunk).to(tl.int64) * batch + b) * value_heads + head

    dqs = tl.zeros([BR, BK], dtype=tl.float32)  # from the state that enters the chunk
    for block in range((V + BV - 1) // BV):
        value = block * BV + tl.arange(0, BV)
        dos = load_tile(do, row, value, do_t, tokens, V)
        entering = load_state(states, arriving, since, state, piece, key, value, K, V, GATE)
        dqs = tl.dot(dos, tl.trans(entering), dqs, input_precision=DOT)
    dqs = scale * dqs
    if GATE == "vector":
        dqs = dqs * tl.exp(sum_blocks(g, 0, i, key, g_t, tokens, K, BR, BK))[None, :]
    elif GATE != "none":
        dqs = dqs * tl.exp(cumulate_logs(g, i * BR, tokens, g_t, GATE, BC, BR).to(tl.float32))[:, None]

    for j in range(i if GATE == "vector" else i + 1):
        row_j = j * BR + tl.arange(0, BR)
        grad = pair_grads(do, v, i, j, do_t, v_t, tokens, scale, V, BR, BV, DOT)
        ks = load_tile(k, row_j, key, k_t, tokens, K)
        if GATE == "vector":
            ks = ks * tl.exp(reach(g, i, j, row_j, key, g_t, tokens, K, BR, BK))
        elif GATE != "none":
            grad = grad * pair_decay(g, i, j, g_t, tokens, GATE, BC, BR)
        dqs = tl.dot(grad, ks, dqs, input_precision=DOT)

    ks = load_tile(k, row, key, k_t, tokens, K)
    if GATE == "vector":
        logs = load_logs(g, row, key, g_t, tokens, K)
        dqs = dqs * tl.exp(since_block(g, row, key, g_t, tokens, K))
        grad = pair_grads(do, v, i, i, do_t, v_t, tokens, scale, V, BR, BV, DOT)
        for level in range(LEVELS):
            decay = decay_to_middle(logs, row, level, LOGS)
            block_grad = tl.where(over_middle(row, level), grad, 0.0)
            dqs += decay * tl.dot(block_grad, ks * decay, input_precision=DOT)
    if GATE != "none":
        given = dqs * load_tile(q, row, key, q_t, tokens, K)
        store_gate_part(row_gate, given, place, key, part, batch, tokens_all, value_heads, row, tokens, K, GATE)
    dqs += diagonal_grads(do, v, row, do_t, v_t, tokens, scale, V, BR, BV)[:, None] * ks
    store_tile(dq + place * K, dqs, row, key, value_heads * K, tokens, K)


@triton.jit
def key_grads(
    q, k, v, g, do, start, length, dk, col_gate, scale,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, do_b, do_t, do_h,
    tokens_all, batch, value_heads, group, gate_group,
    K: tl.constexpr, V: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    LEVELS: tl.constexpr, GATE: tl.constexpr, DOT: tl.constexpr, LOGS: tl.constexpr,
):  # fmt: skip
    """The within-chunk part of dk, in fp32."""
    chunk, j = tl.program_id(0) // (BC // BR), tl.program_id(0) % (BC // BR)
    part, cell = tl.program_id(1), tl.program_id(2)
    b, head = (cell // value_heads).to(tl.int64), (cell % value_heads).to(tl.int64)
    token, tokens = tl.load(start + chunk).to(tl.int64), tl.load(length + chunk)
    key = part * BK + tl.arange(0, BK)
    row = j * BR + tl.arange(0, BR)
    q += b * q_b + token * q_t + (head // group) * q_h
    k += b * k_b + token * k_t + (head // group) * k_h
    v += b * v_b + token * v_t + head * v_h
    do += b * do_b + token * do_t + head * do_h
    g = to_gate(g, b, token, head // gate_group, g_b, g_t, g_h, GATE)
    place = (b * tokens_all + token) * value_heads + head

    dks = tl.zeros([BR, BK], dtype=tl.float32)
    for i in range(j + 1 if GATE == "vector" else j, tl.cdiv(tokens, BR)):
        row_i = i * BR + tl.arange(0, BR)
        grad = pair_grads(do, v, i, j, do_t, v_t, tokens, scale, V, BR, BV, DOT)
        qs = load_tile(q, row_i, key, q_t, tokens, K)
        if GATE == "vector":
            qs = qs * tl.exp(since_block(g, row_i, key, g_t, tokens, K))
            inner = tl.dot(tl.trans(grad), qs, input_precision=DOT)
            dks += inner * tl.exp(reach(g, i, j, row, key, g_t, tokens, K, BR, BK))
        else:
            if GATE != "none":
                grad = grad * pair_decay(g, i, j, g_t, tokens, GATE, BC, BR)
            dks = tl.dot(tl.trans(grad), qs, dks, input_precision=DOT)

    qs = load_tile(q, row, key, q_t, tokens, K)
    if GATE == "vector":
        logs = load_logs(g, row, key, g_t, tokens, K)
        grad = pair_grads(do, v, j, j, do_t, v_t, tokens, scale, V, BR, BV, DOT)
        for level in range(LEVELS):
            decay = decay_to_middle(logs, row, level, LOGS)
            block_grad = tl.where(over_middle(row, level), grad, 0.0)
            dks += decay * tl.dot(tl.trans(block_grad), qs * decay, input_precision=DOT)
    if GATE != "none":
        given = dks * load_tile(k, row, key, k_t, tokens, K)
        store_gate_part(col_gate, given, place, key, part, batch, tokens_all, value_heads, row, tokens, K, GATE)
    dks += diagonal_grads(do, v, row, do_t, v_t, tokens, scale, V, BR, BV)[:, None] * qs
    store_tile(dk + place * K, dks, row, key, value_heads * K, tokens, K)


@triton.jit
def value_grads(
    q, k, g, do, start, length, dv, scale,
    q_b, q_t, q_h, k_b, k_t, k_h, g_b, g_t, g_h, do_b, do_t, do_h, tokens_all, value_heads, group, gate_group,
    K: tl.constexpr, V: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    LEVELS: tl.constexpr, GATE: tl.constexpr, DOT: tl.constexpr, LOGS: tl.constexpr,
):  # fmt: skip
    """The within-chunk part of dv, in fp32: scores, transposed, times do."""
    chunk, j, cell = tl.program_id(0) // (BC // BR), tl.program_id(0) % (BC // BR), tl.program_id(2)
    b, head = (cell // value_heads).to(tl.int64), (cell % value_heads).to(tl.int64)
    token, tokens = tl.load(start + chunk).to(tl.int64), tl.load(length + chunk)
    value = tl.program_id(1) * BV + tl.arange(0, BV)
    row = tl.arange(0, BR)
    q += b * q_b + token * q_t + (head // group) * q_h
    k += b * k_b + token * k_t + (head // group) * k_h
    do += b * do_b + token * do_t + head * do_h
    g = to_gate(g, b, token, head // gate_group, g_b, g_t, g_h, GATE)
    dvs = tl.zeros([BR, BV], dtype=tl.float32)
    if GATE == "vector":
        scores = pair_scores(q, k, g, j, j, q_t, k_t, g_t, tokens, K, BC, BR, BK, LEVELS, GATE, True, DOT, LOGS)
        dos = load_tile(do, j * BR + row, value, do_t, tokens, V)
        dvs = tl.dot(tl.trans(scores), dos, dvs, input_precision=DOT)
    for i in range(j + 1 if GATE == "vector" else j, tl.cdiv(tokens, BR)):
        scores = pair_scores(q, k, g, i, j, q_t, k_t, g_t, tokens, K, BC, BR, BK, LEVELS, GATE, False, DOT, LOGS)
        dos = load_tile(do, i * BR + row, value, do_t, tokens, V)
        dvs = tl.dot(tl.trans(scores), dos, dvs, input_precision=DOT)
    dv += ((b * tokens_all + token) * value_heads + head) * V
    store_tile(dv, scale * dvs, j * BR + row, value, value_heads * V, tokens, V)
