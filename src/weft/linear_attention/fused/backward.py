"""The Triton kernels of the backward: all within chunks, and what comes from the gradients of the states."""

from __future__ import annotations

import triton
import triton.language as tl

from weft.linear_attention.fused.decay import (
    after,
    chunk_scores,
    cumulate_logs,
    decay_over,
    load_logs,
    load_state,
    load_tile,
    over_middle,
    store_tile,
    to_gate,
    up_to,
    within_half,
)


@triton.jit
def level_grads(q, k, logs, grad, row, LEVELS: tl.constexpr, DOT: tl.constexpr, LOGS: tl.constexpr):
    """Gradients of q, k and the logs [BC, BK] from that of the scores [BC, BC]: one decay per key dimension.

    What a pair over the middle of a block gives to the logs goes to those between the middle and either token.
    """
    diagonal = tl.sum(tl.where(row[:, None] == row[None, :], grad, 0.0), 1)[:, None]
    dq, dk = diagonal * k, diagonal * q
    dlog = tl.zeros_like(q)
    for level in range(LEVELS):
        decay = decay_over(within_half(row, level), logs, LOGS)
        block = tl.where(over_middle(row, level), grad, 0.0)
        dq_level = decay * tl.dot(block, k * decay, input_precision=DOT)
        dk_level = decay * tl.dot(tl.trans(block), q * decay, input_precision=DOT)
        given = q * dq_level + k * dk_level  # either is zero: a token is in one half of its block
        between = tl.trans(within_half(row, level).to(tl.float32))
        dlog = tl.dot(between, given, dlog, input_precision=DOT)
        dq += dq_level
        dk += dk_level
    return dq, dk, dlog


@triton.jit
def intra_backward(
    q, k, v, g, do, start, length, chunk_piece, states, since, arriving, dq, dk, dv, dg, scale,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, do_b, do_t, do_h,
    tokens_all, batch, value_heads, group, gate_group,
    K: tl.constexpr, V: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, LEVELS: tl.constexpr,
    GATE: tl.constexpr, DOT: tl.constexpr, LOGS: tl.constexpr,
):  # fmt: skip
    """One chunk and value head: dq, and the within-chunk part of dk, dv and dg, in fp32 but for dq.

    Results are [B, T, HV, K or V]; dg is [B, T, HV] or [B, T, HV, K].
    """
    chunk, cell = tl.program_id(0), tl.program_id(1)
    b, head = (cell // value_heads).to(tl.int64), cell % value_heads
    row = tl.arange(0, BC)
    token, tokens = tl.load(start + chunk).to(tl.int64), tl.load(length + chunk)
    q += b * q_b + token * q_t + (head // group) * q_h
    k += b * k_b + token * k_t + (head // group) * k_h
    v += b * v_b + token * v_t + head * v_h
    do += b * do_b + token * do_t + head * do_h
    g = to_gate(g, b, token, head // gate_group, g_b, g_t, g_h, GATE)
    place = (b * tokens_all + token) * value_heads + head
    state = (chunk.to(tl.int64) * batch + b) * value_heads + head
    piece = (tl.load(chunk_piece + chunk).to(tl.int64) * batch + b) * value_heads + head

    scores, decay = chunk_scores(q, k, g, row, q_t, k_t, g_t, tokens, K, BC, BK, LEVELS, GATE, DOT, LOGS)
    grad = tl.zeros([BC, BC], dtype=tl.float32)
    for block in range((V + BV - 1) // BV):
        value = block * BV + tl.arange(0, BV)
        vs = load_tile(v, row, value, v_t, tokens, V)
        dos = load_tile(do, row, value, do_t, tokens, V)
        grad = tl.dot(dos, tl.trans(vs), grad, input_precision=DOT)
        dvs = scale * tl.dot(tl.trans(scores), dos, input_precision=DOT)
        store_tile(dv + place * V, dvs, row, value, value_heads * V, tokens, V)
    grad = tl.where(row[:, None] >= row[None, :], scale * grad, 0.0)

    if GATE == "constant" or GATE == "scalar":
        # A pair (i, j) gives to the logs of the tokens t with j < t <= i; the diagonal does not decay.
        weight = tl.where(row[:, None] > row[None, :], scores * grad, 0.0)
        later = tl.dot(tl.trans(up_to(row).to(tl.float32)), weight, input_precision=DOT)
        dlog = tl.sum(tl.where(row[:, None] > row[None, :], later, 0.0), 1)
        cumulated, _ = cumulate_logs(g, row, tokens, g_t, GATE)
        from_start = tl.exp(cumulated.to(tl.float32))
        received = tl.zeros([BC], dtype=tl.float32)
        grad = grad * decay

    for block in range((K + BK - 1) // BK):
        key = block * BK + tl.arange(0, BK)
        inter = tl.zeros([BC, BK], dtype=tl.float32)
        for value_block in range((V + BV - 1) // BV):
            value = value_block * BV + tl.arange(0, BV)
            dos = load_tile(do, row, value, do_t, tokens, V)
            entering = load_state(states, arriving, since, state, piece, key, value, K, V, GATE)
            inter = tl.dot(dos, tl.trans(entering), inter, input_precision=DOT)
        inter = scale * inter
        qs = load_tile(q, row, key, q_t, tokens, K)
        ks = load_tile(k, row, key, k_t, tokens, K)
        if GATE == "vector":
            logs = load_logs(g, row, key, g_t, tokens, K)
            inter = inter * decay_over(up_to(row), logs, LOGS)
            dqs, dks, dlogs = level_grads(qs, ks, logs, grad, row, LEVELS, DOT, LOGS)
            dlogs = tl.dot(tl.trans(up_to(row).to(tl.float32)), inter * qs, dlogs, input_precision=DOT)
            store_tile(dg + place * K, dlogs, row, key, value_heads * K, tokens, K)
            dqs += inter
        else:
            if GATE != "none":
                inter = inter * from_start[:, None]
                received += tl.sum(inter * qs, 1)
            dqs = tl.dot(grad, ks, inter, input_precision=DOT)
            dks = tl.dot(tl.trans(grad), qs, input_precision=DOT)
        store_tile(dq + place * K, dqs, row, key, value_heads * K, tokens, K)
        store_tile(dk + place * K, dks, row, key, value_heads * K, tokens, K)

    if GATE == "constant" or GATE == "scalar":
        dlog += tl.sum(tl.where(row[None, :] >= row[:, None], received[None, :], 0.0), 1)
        tl.store(dg + place + row * value_heads, dlog, mask=row < tokens)


@triton.jit
def inter_backward(
    k, v, g, start, length, chunk_piece, states, since, arriving, grad_states, until, grad_arriving,
    dk_inner, dv_inner, dg_inner, dk, dv, dg,
    k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, tokens_all, batch, value_heads, group, gate_group,
    K: tl.constexpr, V: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    GATE: tl.constexpr, DOT: tl.constexpr, LOGS: tl.constexpr,
):  # fmt: skip
    """One chunk and value head: dk, dv and dg, from their within-chunk parts and the gradient of the leaving state."""
    chunk, cell = tl.program_id(0), tl.program_id(1)
    b, head = (cell // value_heads).to(tl.int64), cell % value_heads
    row = tl.arange(0, BC)
    token, tokens = tl.load(start + chunk).to(tl.int64), tl.load(length + chunk)
    k += b * k_b + token * k_t + (head // group) * k_h
    v += b * v_b + token * v_t + head * v_h
    g = to_gate(g, b, token, head // gate_group, g_b, g_t, g_h, GATE)
    place = (b * tokens_all + token) * value_heads + head
    state = (chunk.to(tl.int64) * batch + b) * value_heads + head
    piece = (tl.load(chunk_piece + chunk).to(tl.int64) * batch + b) * value_heads + head
    if GATE == "constant" or GATE == "scalar":
        cumulated, total = cumulate_logs(g, row, tokens, g_t, GATE)
        to_end = tl.exp(tl.minimum((total - cumulated).to(tl.float32), 0.0))
        given = tl.zeros([BC], dtype=tl.float32)
        whole = tl.zeros([BK], dtype=tl.float32)

    for block in range((K + BK - 1) // BK):
        key = block * BK + tl.arange(0, BK)
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
            logs = load_logs(g, row, key, g_t, tokens, K)
            dks = dks * decay_over(after(row), logs, LOGS)
            ks = load_tile(k, row, key, k_t, tokens, K)
            # What token j gives to the state counts for all logs after its own; the rest of the state for all logs.
            dlogs = tl.dot((row[None, :] < row[:, None]).to(tl.float32), ks * dks, input_precision=DOT)
            dlogs += (through * tl.exp(tl.sum(logs, 0)))[None, :]
            dlogs += load_tile(dg_inner + place * K, row, key, value_heads * K, tokens, K)
            store_tile(dg + place * K, dlogs, row, key, value_heads * K, tokens, K)
        elif GATE != "none":
            dks = dks * to_end[:, None]
            given += tl.sum(dks * load_tile(k, row, key, k_t, tokens, K), 1)
            whole += through
        dks += load_tile(dk_inner + place * K, row, key, value_heads * K, tokens, K)
        store_tile(dk + place * K, dks, row, key, value_heads * K, tokens, K)

    for block in range((V + BV - 1) // BV):
        value = block * BV + tl.arange(0, BV)
        dvs = load_tile(dv_inner + place * V, row, value, value_heads * V, tokens, V)
        for key_block in range((K + BK - 1) // BK):
            key = key_block * BK + tl.arange(0, BK)
            ks = load_tile(k, row, key, k_t, tokens, K)
            if GATE == "vector":
                ks = ks * decay_over(after(row), load_logs(g, row, key, g_t, tokens, K), LOGS)
            elif GATE != "none":
                ks = ks * to_end[:, None]
            leaving = load_state(grad_states, grad_arriving, until, state, piece, key, value, K, V, GATE)
            dvs = tl.dot(ks, leaving, dvs, input_precision=DOT)
        store_tile(dv + place * V, dvs, row, value, value_heads * V, tokens, V)

    if GATE == "constant" or GATE == "scalar":
        dlog = tl.sum(tl.where(row[None, :] < row[:, None], given[None, :], 0.0), 1)
        dlog += tl.sum(whole, 0) * tl.exp(total.to(tl.float32))
        dlog += tl.load(dg_inner + place + row * value_heads, mask=row < tokens, other=0.0)
        tl.store(dg + place + row * value_heads, dlog, mask=row < tokens)
