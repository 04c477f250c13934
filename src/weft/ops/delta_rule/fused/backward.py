"""The Triton kernels of the delta rule's backward, beside those of linear attention with N in place of v.

With dS' the gradient of what leaves a chunk, dN = scale tril(q k^T)^T do + (k e^{G_C - G}) dS' and
dS = e^{G_C} dS' + scale (q e^G)^T do - W^T dN. What N was read from is linear attention again, with the keys as
queries: Y = (I + A)^-T dN, and -beta Y is the gradient of what beta v is diminished by.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.ops.delta_rule.fused.forward import load_rates, load_whole, read_state
from weft.ops.fused.blocks import load_tile, state_offsets, store_tile


@triton.jit
def delta_state_grads(
    k, whole, w, sums, partial, boundary, start, length, segment_first, segment_last, grad_states, grad_values, final,
    k_b, k_t, k_h, tokens_all, batch, value_heads, segments, group,
    K: tl.constexpr, V: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    GATE: tl.constexpr, HAS_BOUNDARY: tl.constexpr,
):  # fmt: skip
    """The recurrence over the chunks of a segment from the last to the first, for one block of columns.

    ``k`` and ``whole`` are those of `delta_states`. Reads what do alone gives, ``sums`` [M, B, HV, K, V] to dS and
    ``partial`` [B, T, HV, V] to dN, and the gradient of the state that leaves the segment, ``boundary``
    [B*N, HV, K, V] (zero without). Writes dS' of each chunk, ``grad_states`` [M, B, HV, K, V], dN in ``grad_values``
    [B, T, HV, V], and ``final`` [B*N, HV, K, V], of the state that entered. A program per segment, block of V and head.
    """
    segment, cell = tl.program_id(0), tl.program_id(2)
    b, head = (cell // value_heads).to(tl.int64), (cell % value_heads).to(tl.int64)
    value = tl.program_id(1) * BV + tl.arange(0, BV)
    key = tl.arange(0, BK)
    k += b * k_b + (head // group) * k_h
    inside = (key[:, None] < K) & (value[None, :] < V)
    offsets = state_offsets(key, value, V)
    outer = ((b * segments + segment) * value_heads + head) * (K * V)
    grad = tl.zeros([BK, BV], dtype=tl.float32)
    if HAS_BOUNDARY:
        grad = tl.load(boundary + outer + offsets, mask=inside, other=0.0)
    first, last = tl.load(segment_first + segment), tl.load(segment_last + segment)
    for step in range(first, last):
        chunk = first + last - 1 - step
        index = (chunk.to(tl.int64) * batch + b) * value_heads + head
        tl.store(grad_states + index * (K * V) + offsets, grad, mask=inside)
        token, tokens = tl.load(start + chunk).to(tl.int64), tl.load(length + chunk)
        place = (b * tokens_all + token) * value_heads + head
        before = tl.load(sums + index * (K * V) + offsets, mask=inside, other=0.0)
        before += grad * load_whole(whole, index, key, K, GATE)
        for block in range(tl.cdiv(tokens, BR)):
            row = block * BR + tl.arange(0, BR)
            ks = load_tile(k + token * k_t, row, key, k_t, tokens, K)
            ys = load_tile(partial + place * V, row, value, value_heads * V, tokens, V)
            ys += read_state(ks, grad, BR, BK, BV)
            store_tile(grad_values + place * V, ys, row, value, value_heads * V, tokens, V)
            ws = load_tile(w + place * K, row, key, value_heads * K, tokens, K)
            before = tl.dot(tl.trans(ws), -ys, before, input_precision="tf32x3")
        grad = before
    tl.store(final + outer + offsets, grad, mask=inside)


@triton.jit
def join_key_grads(
    k, v, beta, y, dq, dk_pairs, start, length, dk, row_gate, col_gate, dbeta,
    k_b, k_t, k_h, v_b, v_t, v_h, beta_b, beta_t, beta_h, tokens_all, batch, value_heads, group,
    K: tl.constexpr, V: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PARTS: tl.constexpr,
    GATE: tl.constexpr,
):  # fmt: skip
    """dbeta, and what keys got as queries: beta ``dq`` and ``dk_pairs`` are added to ``dk``, all [B, T, HV, K] in fp32.

    dq is for -y: y v + dq k is what beta was multiplied by. What this gives to the gates is added to ``row_gate`` and
    ``col_gate`` (see `weft.ops.fused.backward`): in place, or as their last part. A program per chunk and value head.
    """
    chunk, cell = tl.program_id(0), tl.program_id(2)
    b, head = (cell // value_heads).to(tl.int64), (cell % value_heads).to(tl.int64)
    token, tokens = tl.load(start + chunk).to(tl.int64), tl.load(length + chunk)
    row = tl.arange(0, BC)
    k += b * k_b + token * k_t + (head // group) * k_h
    v += b * v_b + token * v_t + head * v_h
    rates = load_rates(beta + b * beta_b + token * beta_t + head * beta_h, row, beta_t, tokens)
    place = (b * tokens_all + token) * value_heads + head
    grad, given_col = tl.zeros([BC], dtype=tl.float32), tl.zeros([BC], dtype=tl.float32)
    for block in range((V + BV - 1) // BV):
        value = block * BV + tl.arange(0, BV)
        ys = load_tile(y + place * V, row, value, value_heads * V, tokens, V)
        grad += tl.sum(ys * load_tile(v, row, value, v_t, tokens, V), 1)
    read = tl.zeros([BC], dtype=tl.float32)
    for block in range((K + BK - 1) // BK):
        key = block * BK + tl.arange(0, BK)
        ks = load_tile(k, row, key, k_t, tokens, K)
        as_query = load_tile(dq + place * K, row, key, value_heads * K, tokens, K)
        as_key = load_tile(dk_pairs + place * K, row, key, value_heads * K, tokens, K)
        read += tl.sum(ks * as_query, 1)
        given_col += tl.sum(ks * as_key, 1)
        as_query = as_query * rates[:, None]
        if GATE == "vector":
            add_tile(row_gate + place * K, ks * as_query, row, key, value_heads * K, tokens, K)
            add_tile(col_gate + place * K, ks * as_key, row, key, value_heads * K, tokens, K)
        add_tile(dk + place * K, as_query + as_key, row, key, value_heads * K, tokens, K)
    tl.store(dbeta + place + row * value_heads, grad + read, mask=row < tokens)
    if GATE == "scalar":
        table = (PARTS - 1) * batch * tl.cast(tokens_all, tl.int64) * value_heads + place + row * value_heads
        tl.store(row_gate + table, rates * read, mask=row < tokens)
        tl.store(col_gate + table, given_col, mask=row < tokens)


@triton.jit
def add_tile(base, value, row, col, stride_t, length, DIM: tl.constexpr):
    """Add to tokens ``row``, columns ``col`` of a chunk, which one program does once."""
    store_tile(base, load_tile(base, row, col, stride_t, length, DIM) + value, row, col, stride_t, length, DIM)
