"""The Triton kernels of o: the within-chunk part, and the part that needs the entering state."""

from __future__ import annotations

import triton
import triton.language as tl

from weft.ops.linear_attention.fused.decay import block_logs, load_state, load_tile, since_block, store_tile, to_gate
from weft.ops.linear_attention.fused.scores import pair_scores


@triton.jit
def output_intra(
    q, k, v, g, start, length, partial, scale,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, tokens_all, value_heads, group, gate_group,
    K: tl.constexpr, V: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    LEVELS: tl.constexpr, GATE: tl.constexpr, DOT: tl.constexpr, LOGS: tl.constexpr,
):  # fmt: skip
    """The part of o that stays within a chunk, for a block of its tokens: scores times v, in fp32.

    ``partial`` is [B, T, HV, V]; a program per block of tokens, block of V and value head.
    """
    chunk, i, cell = tl.program_id(0) // (BC // BR), tl.program_id(0) % (BC // BR), tl.program_id(2)
    b, head = (cell // value_heads).to(tl.int64), (cell % value_heads).to(tl.int64)
    token, tokens = tl.load(start + chunk).to(tl.int64), tl.load(length + chunk)
    value = tl.program_id(1) * BV + tl.arange(0, BV)
    row = tl.arange(0, BR)
    q += b * q_b + token * q_t + (head // group) * q_h
    k += b * k_b + token * k_t + (head // group) * k_h
    v += b * v_b + token * v_t + head * v_h
    g = to_gate(g, b, token, head // gate_group, g_b, g_t, g_h, GATE)
    o = tl.zeros([BR, BV], dtype=tl.float32)
    if GATE == "vector":
        scores = pair_scores(q, k, g, i, i, q_t, k_t, g_t, tokens, K, BC, BR, BK, LEVELS, GATE, True, DOT, LOGS)
        vs = load_tile(v, i * BR + row, value, v_t, tokens, V)
        o = tl.dot(scores, vs, o, input_precision=DOT)
    for j in range(i if GATE == "vector" else i + 1):
        scores = pair_scores(q, k, g, i, j, q_t, k_t, g_t, tokens, K, BC, BR, BK, LEVELS, GATE, False, DOT, LOGS)
        vs = load_tile(v, j * BR + row, value, v_t, tokens, V)
        o = tl.dot(scores, vs, o, input_precision=DOT)
    partial += ((b * tokens_all + token) * value_heads + head) * V
    store_tile(partial, scale * o, i * BR + row, value, value_heads * V, tokens, V)


@triton.jit
def output_inter(
    q, g, start, length, chunk_piece, states, since, arriving, partial, o, scale,
    q_b, q_t, q_h, g_b, g_t, g_h, tokens_all, batch, value_heads, group, gate_group,
    K: tl.constexpr, V: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    GATE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """o of a chunk: ``partial`` plus q, decayed from the chunk's start, times the state that enters it.

    A program per chunk, block of V and value head.
    """
    chunk, cell = tl.program_id(0), tl.program_id(2)
    b, head = (cell // value_heads).to(tl.int64), (cell % value_heads).to(tl.int64)
    token, tokens = tl.load(start + chunk).to(tl.int64), tl.load(length + chunk)
    value = tl.program_id(1) * BV + tl.arange(0, BV)
    row = tl.arange(0, BC)
    q += b * q_b + token * q_t + (head // group) * q_h
    g = to_gate(g, b, token, head // gate_group, g_b, g_t, g_h, GATE)
    place = ((b * tokens_all + token) * value_heads + head) * V
    state = (chunk.to(tl.int64) * batch + b) * value_heads + head
    piece = (tl.load(chunk_piece + chunk).to(tl.int64) * batch + b) * value_heads + head
    acc = tl.zeros([BC, BV], dtype=tl.float32)
    for block in range((K + BK - 1) // BK):
        key = block * BK + tl.arange(0, BK)
        qs = load_tile(q, row, key, q_t, tokens, K)
        if GATE == "vector":
            qs = qs * tl.exp(since_block(g, row, key, g_t, tokens, K))
        entering = load_state(states, arriving, since, state, piece, key, value, K, V, GATE)
        acc = tl.dot(qs, entering, acc, input_precision=DOT)
    if GATE == "constant" or GATE == "scalar":
        acc = acc * tl.exp(block_logs(g, 0, tokens, g_t, GATE, BC).to(tl.float32))[:, None]
    acc = scale * acc + load_tile(partial + place, row, value, value_heads * V, tokens, V)
    store_tile(o + place, acc, row, value, value_heads * V, tokens, V)
