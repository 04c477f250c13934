"""The Triton kernels that end the backward: what comes from the gradients of the states."""

from __future__ import annotations

import triton
import triton.language as tl

from weft.ops.linear_attention.fused.decay import (
    block_logs,
    load_logs,
    load_state,
    load_tile,
    store_tile,
    to_gate,
    total_log,
    until_block,
)


@triton.jit
def key_finish(
    k, v, g, start, length, chunk_piece, states, since, arriving, grad_states, until, grad_arriving,
    dk_inner, row_gate, col_gate, dk, dg,
    k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, tokens_all, batch, value_heads, group, gate_group,
    K: tl.constexpr, V: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PARTS: tl.constexpr,
    GATE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """dk and dg of a chunk, from their within-chunk parts and the gradient of the state that leaves it.

    A log of token t gets what later tokens' q and earlier tokens' k give: within the chunk the pairs i >= t > j, as the
    sum over i >= t of ``row_gate`` - ``col_gate``; of the state that leaves, what tokens j < t brought, and what was
    there before. A program per chunk and value head, and per block of K where that has gates of its own or none.
    """
    chunk, cell = tl.program_id(0), tl.program_id(2)
    b, head = (cell // value_heads).to(tl.int64), (cell % value_heads).to(tl.int64)
    row = tl.arange(0, BC)
    token, tokens = tl.load(start + chunk).to(tl.int64), tl.load(length + chunk)
    k += b * k_b + token * k_t + (head // group) * k_h
    v += b * v_b + token * v_t + head * v_h
    g = to_gate(g, b, token, head // gate_group, g_b, g_t, g_h, GATE)
    place = (b * tokens_all + token) * value_heads + head
    state = (chunk.to(tl.int64) * batch + b) * value_heads + head
    piece = (tl.load(chunk_piece + chunk).to(tl.int64) * batch + b) * value_heads + head
    one_gate: tl.constexpr = GATE == "constant" or GATE == "scalar"
    if one_gate:
        total = total_log(g, 0, tokens, g_t, GATE, BC)
        until_end = total - block_logs(g, 0, tokens, g_t, GATE, BC)
        to_end = tl.exp(tl.minimum(until_end.to(tl.float32), 0.0))
        given = tl.zeros([BC], dtype=tl.float32)
        whole = tl.zeros([BK], dtype=tl.float32)

    for turn in range((K + BK - 1) // BK if one_gate else 1):
        key = (turn + tl.program_id(1)) * BK + tl.arange(0, BK)
        dks = tl.zeros([BC, BK], dtype=tl.float32)
        through = tl.zeros([BK], dtype=tl.float32)
        for value_block in range((V + BV - 1) // BV):
            value = value_block * BV + tl.arange(0, BV)
            vs = load_tile(v, row, value, v_t, tokens, V)
            leaving = load_state(grad_states, grad_arriving, until, state, piece, key, value, K, V, GATE)
            dks = tl.dot(vs, tl.trans(leaving), dks, input_precision=DOT)
            if GATE != "none":
                entering = load_state(states, arriving, since, state, piece, key, value, K, V, GATE)
                through += tl.sum(entering * leaving, 1)
        if GATE == "vector":
            dks = dks * tl.exp(until_block(g, row, BC, key, g_t, tokens, K))
            brought = dks * load_tile(k, row, key, k_t, tokens, K)
            dlogs = tl.dot((row[None, :] < row[:, None]).to(tl.float32), brought, input_precision=DOT)
            total = tl.sum(load_logs(g, row, key, g_t, tokens, K), 0)
            dlogs += (through * tl.exp(total))[None, :]
            pairs = load_tile(row_gate + place * K, row, key, value_heads * K, tokens, K)
            pairs -= load_tile(col_gate + place * K, row, key, value_heads * K, tokens, K)
            dlogs += tl.cumsum(pairs, 0, reverse=True)
            store_tile(dg + place * K, dlogs, row, key, value_heads * K, tokens, K)
        elif GATE != "none":
            dks = dks * to_end[:, None]
            given += tl.sum(dks * load_tile(k, row, key, k_t, tokens, K), 1)
            whole += through
        dks += load_tile(dk_inner + place * K, row, key, value_heads * K, tokens, K)
        store_tile(dk + place * K, dks, row, key, value_heads * K, tokens, K)

    if one_gate:
        pairs = tl.zeros([BC], dtype=tl.float32)
        for part in range(PARTS):
            table = part * batch * tl.cast(tokens_all, tl.int64) * value_heads + place
            pairs += tl.load(row_gate + table + row * value_heads, mask=row < tokens, other=0.0)
            pairs -= tl.load(col_gate + table + row * value_heads, mask=row < tokens, other=0.0)
        dlog = tl.cumsum(pairs, 0, reverse=True) + tl.sum(whole, 0) * tl.exp(total.to(tl.float32))
        dlog += tl.sum(tl.where(row[None, :] < row[:, None], given[None, :], 0.0), 1)
        tl.store(dg + place + row * value_heads, dlog, mask=row < tokens)


@triton.jit
def value_finish(
    k, g, start, length, chunk_piece, grad_states, until, grad_arriving, dv_inner, dv,
    k_b, k_t, k_h, g_b, g_t, g_h, tokens_all, batch, value_heads, group, gate_group,
    K: tl.constexpr, V: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    GATE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """dv of a chunk, from its within-chunk part and the gradient of the state that leaves it.

    A program per chunk, block of V and value head.
    """
    chunk, cell = tl.program_id(0), tl.program_id(2)
    b, head = (cell // value_heads).to(tl.int64), (cell % value_heads).to(tl.int64)
    value = tl.program_id(1) * BV + tl.arange(0, BV)
    row = tl.arange(0, BC)
    token, tokens = tl.load(start + chunk).to(tl.int64), tl.load(length + chunk)
    k += b * k_b + token * k_t + (head // group) * k_h
    g = to_gate(g, b, token, head // gate_group, g_b, g_t, g_h, GATE)
    place = ((b * tokens_all + token) * value_heads + head) * V
    state = (chunk.to(tl.int64) * batch + b) * value_heads + head
    piece = (tl.load(chunk_piece + chunk).to(tl.int64) * batch + b) * value_heads + head
    dvs = tl.zeros([BC, BV], dtype=tl.float32)
    for block in range((K + BK - 1) // BK):
        key = block * BK + tl.arange(0, BK)
        ks = load_tile(k, row, key, k_t, tokens, K)
        if GATE == "vector":
            ks = ks * tl.exp(until_block(g, row, BC, key, g_t, tokens, K))
        leaving = load_state(grad_states, grad_arriving, until, state, piece, key, value, K, V, GATE)
        dvs = tl.dot(ks, leaving, dvs, input_precision=DOT)
    if GATE == "constant" or GATE == "scalar":
        until_end = total_log(g, 0, tokens, g_t, GATE, BC) - block_logs(g, 0, tokens, g_t, GATE, BC)
        dvs = dvs * tl.exp(tl.minimum(until_end.to(tl.float32), 0.0))[:, None]
    dvs += load_tile(dv_inner + place, row, value, value_heads * V, tokens, V)
    store_tile(dv + place, dvs, row, value, value_heads * V, tokens, V)
