"""The Triton kernels of dq, dk and dg: what needs no gradient of the leaving states (``*_grads``), and the rest.

A program of ``*_grads`` works on one block of BR tokens of a chunk, one block of K and one value head. Results
are [B, T, HV, K]. ``row`` and ``col`` hold what a token's q and k give to the gates, the diagonal of the scores
left out: [B, T, HV, K], or [parts, B, T, HV] with a part for each block of K. STRICT: a token's q does not meet its own
k, and nothing is given to the gates.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.ops.fused.blocks import (
    block_logs,
    cumulate_logs,
    decay_to_middle,
    diagonal_grads,
    load_logs,
    load_state,
    load_tile,
    over_middle,
    pair_decay,
    pair_grads,
    reach,
    since_block,
    store_tile,
    sum_blocks,
    to_gate,
    total_log,
    until_block,
)


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
    LEVELS: tl.constexpr, GATE: tl.constexpr, STRICT: tl.constexpr, PIECES: tl.constexpr, DOT: tl.constexpr,
    LOGS: tl.constexpr,
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
        entering = load_state(states, arriving, since, state, piece, key, value, K, V, GATE, PIECES)
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
    if GATE != "none" and not STRICT:
        given = dqs * load_tile(q, row, key, q_t, tokens, K)
        store_gate_part(row_gate, given, place, key, part, batch, tokens_all, value_heads, row, tokens, K, GATE)
    if not STRICT:
        dqs += diagonal_grads(do, v, row, do_t, v_t, tokens, scale, V, BR, BV)[:, None] * ks
    store_tile(dq + place * K, dqs, row, key, value_heads * K, tokens, K)


@triton.jit
def key_grads(
    q, k, v, g, do, start, length, dk, col_gate, scale,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, do_b, do_t, do_h,
    tokens_all, batch, value_heads, group, gate_group,
    K: tl.constexpr, V: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    LEVELS: tl.constexpr, GATE: tl.constexpr, STRICT: tl.constexpr, DOT: tl.constexpr, LOGS: tl.constexpr,
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
    if GATE != "none" and not STRICT:
        given = dks * load_tile(k, row, key, k_t, tokens, K)
        store_gate_part(col_gate, given, place, key, part, batch, tokens_all, value_heads, row, tokens, K, GATE)
    if not STRICT:
        dks += diagonal_grads(do, v, row, do_t, v_t, tokens, scale, V, BR, BV)[:, None] * qs
    store_tile(dk + place * K, dks, row, key, value_heads * K, tokens, K)


@triton.jit
def key_finish(
    k, v, g, start, length, chunk_piece, states, since, arriving, grad_states, until, grad_arriving,
    dk_inner, row_gate, col_gate, dk, dg,
    k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, tokens_all, batch, value_heads, group, gate_group,
    K: tl.constexpr, V: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PARTS: tl.constexpr,
    GATE: tl.constexpr, PIECES: tl.constexpr, DOT: tl.constexpr,
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
            leaving = load_state(grad_states, grad_arriving, until, state, piece, key, value, K, V, GATE, PIECES)
            dks = tl.dot(vs, tl.trans(leaving), dks, input_precision=DOT)
            if GATE != "none":
                entering = load_state(states, arriving, since, state, piece, key, value, K, V, GATE, PIECES)
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
