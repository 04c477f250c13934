"""Pairs of token blocks of one chunk inside the Triton kernels: scores, and the gradient of the scores.

A chunk is cut into blocks of BR tokens; (i, j) are two of them with j <= i, and ``row_i``, ``row_j`` their tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.ops.linear_attention.fused.decay import (
    cumulate_logs,
    decay_between,
    decay_to_middle,
    load_logs,
    load_tile,
    over_middle,
    since_block,
    sum_blocks,
    until_block,
)


@triton.jit
def level_scores(qs, ks, logs, row, LEVELS: tl.constexpr, DOT: tl.constexpr, LOGS: tl.constexpr):
    """q_i k_j^T decayed from j to i within one block, over some key dimensions: one decay per key dimension.

    Each pair is over the middle of one block of 2, 4, 8, ... tokens: there its decay is a factor on q_i times one on
    k_j, neither above one.
    """
    scores = tl.where(row[:, None] == row[None, :], tl.sum(qs * ks, 1)[:, None], 0.0)
    for level in range(LEVELS):
        decay = decay_to_middle(logs, row, level, LOGS)
        product = tl.dot(qs * decay, tl.trans(ks * decay), input_precision=DOT)
        scores += tl.where(over_middle(row, level), product, 0.0)
    return scores


@triton.jit
def pair_scores(
    q, k, g, i, j, q_t, k_t, g_t, tokens, K: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
    LEVELS: tl.constexpr, GATE: tl.constexpr, DIAGONAL: tl.constexpr, DOT: tl.constexpr, LOGS: tl.constexpr,
):  # fmt: skip
    """q_i k_j^T decayed from j to i, zero where j > i, [BR, BR]. DIAGONAL: i and j are one block (vector gates)."""
    row_i, row_j = i * BR + tl.arange(0, BR), j * BR + tl.arange(0, BR)
    scores = tl.zeros([BR, BR], dtype=tl.float32)
    for block in range((K + BK - 1) // BK):
        key = block * BK + tl.arange(0, BK)
        qs = load_tile(q, row_i, key, q_t, tokens, K)
        ks = load_tile(k, row_j, key, k_t, tokens, K)
        if GATE == "vector" and DIAGONAL:
            scores += level_scores(qs, ks, load_logs(g, row_i, key, g_t, tokens, K), row_i, LEVELS, DOT, LOGS)
        else:
            if GATE == "vector":
                qs = qs * tl.exp(since_block(g, row_i, key, g_t, tokens, K))
                ks = ks * tl.exp(reach(g, i, j, row_j, key, g_t, tokens, K, BR, BK))
            scores = tl.dot(qs, tl.trans(ks), scores, input_precision=DOT)
    if GATE == "constant" or GATE == "scalar":
        scores = scores * pair_decay(g, i, j, g_t, tokens, GATE, BC, BR)
    return tl.where(row_i[:, None] >= row_j[None, :], scores, 0.0)


@triton.jit
def reach(g, i, j, row_j, key, g_t, tokens, K: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr):
    """Log decay after each token of block j to the start of block i > j, [BR, BK]: one decay per key dimension."""
    gap = sum_blocks(g, j + 1, i, key, g_t, tokens, K, BR, BK)
    return until_block(g, row_j, (j + 1) * BR, key, g_t, tokens, K) + gap[None, :]


@triton.jit
def pair_decay(g, i, j, g_t, tokens, GATE: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr):
    """Decay from the tokens of block j to those of block i, [BR, BR]: one decay per head."""
    cumulated_i = cumulate_logs(g, i * BR, tokens, g_t, GATE, BC, BR)
    cumulated_j = cumulate_logs(g, j * BR, tokens, g_t, GATE, BC, BR)
    return decay_between(cumulated_i, cumulated_j)


@triton.jit
def pair_grads(
    do, v, i, j, do_t, v_t, tokens, scale, V: tl.constexpr, BR: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr
):
    """The gradient of the scores, scale * do_i v_j^T where j < i, else zero, [BR, BR].

    Without the diagonal: no decay belongs to it, and in the gradient of strong gates it would drown everything.
    """
    row_i, row_j = i * BR + tl.arange(0, BR), j * BR + tl.arange(0, BR)
    grad = tl.zeros([BR, BR], dtype=tl.float32)
    for block in range((V + BV - 1) // BV):
        value = block * BV + tl.arange(0, BV)
        dos = load_tile(do, row_i, value, do_t, tokens, V)
        vs = load_tile(v, row_j, value, v_t, tokens, V)
        grad = tl.dot(dos, tl.trans(vs), grad, input_precision=DOT)
    return tl.where(row_i[:, None] > row_j[None, :], scale * grad, 0.0)


@triton.jit
def diagonal_grads(do, v, row, do_t, v_t, tokens, scale, V: tl.constexpr, BR: tl.constexpr, BV: tl.constexpr):
    """The diagonal that `pair_grads` leaves out, [BR]."""
    grad = tl.zeros([BR], dtype=tl.float32)
    for block in range((V + BV - 1) // BV):
        value = block * BV + tl.arange(0, BV)
        dos = load_tile(do, row, value, do_t, tokens, V)
        grad += tl.sum(dos * load_tile(v, row, value, v_t, tokens, V), 1)
    return scale * grad
