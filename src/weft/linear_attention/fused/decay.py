"""Decays inside the Triton kernels: what `gate.py` and `gate_vector.py` are to the torch kernels.

Every log that is exponentiated is a sum of logs between two tokens or a difference bounded by zero: no exp of a
positive number. One decay per head: the cumulated logs of a chunk are fp64, and a difference is taken of their fp32
head and remainder. One decay per key dimension: sums of logs are products with matrices of zeros and ones, so that
only numbers of one sign are added up and nothing cancels.
"""

from __future__ import annotations

import triton
import triton.language as tl

FLOOR = tl.constexpr(-1000.0)  # gate.py says why; exact in every dtype of g


@triton.jit
def load_tile(base, row, col, stride_t, length, DIM: tl.constexpr):
    """Tokens ``row`` [BC], columns ``col`` [BD] of a chunk in fp32, zero beyond its length or DIM."""
    mask = (row[:, None] < length) & (col[None, :] < DIM)
    return tl.load(base + row[:, None] * stride_t + col[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_tile(base, value, row, col, stride_t, length, DIM: tl.constexpr):
    """The inverse of `load_tile`, in the dtype of the pointer."""
    mask = (row[:, None] < length) & (col[None, :] < DIM)
    tl.store(base + row[:, None] * stride_t + col[None, :], value.to(base.dtype.element_ty), mask=mask)


@triton.jit
def state_offsets(key, value, V: tl.constexpr):
    """Offsets [BK, BV] into one state [K, V]."""
    return key[:, None] * V + value[None, :]


@triton.jit
def load_state(local, entering, log, state, piece, key, value, K: tl.constexpr, V: tl.constexpr, GATE: tl.constexpr):
    """The state of chunk ``state``: what its piece made of it, plus the decayed state that entered the piece, [BK, BV].

    ``state`` and ``piece`` are indices with the head in them; ``log`` holds the decay between the piece's border and
    the chunk's, one or K numbers for each chunk.
    """
    mask = (key[:, None] < K) & (value[None, :] < V)
    offsets = state_offsets(key, value, V)
    mine = tl.load(local + state * (K * V) + offsets, mask=mask, other=0.0)
    came = tl.load(entering + piece * (K * V) + offsets, mask=mask, other=0.0)
    if GATE == "vector":
        came = came * tl.exp(tl.load(log + state * K + key, mask=key < K, other=0.0))[:, None]
    elif GATE != "none":
        came = came * tl.exp(tl.load(log + state))
    return mine + came


@triton.jit
def to_gate(g, b, token, head, g_b, g_t, g_h, GATE: tl.constexpr):
    """The pointer to the gate of a token and head."""
    if GATE == "constant":
        g += head
    elif GATE != "none":
        g += b * g_b + token * g_t + head * g_h
    return g


@triton.jit
def cumulate_logs(g, row, length, stride_t, GATE: tl.constexpr):
    """Sum of the logs of a chunk up to and with each token [BC], and of all of it, in fp64: one decay per head."""
    if GATE == "constant":
        step = tl.maximum(tl.load(g).to(tl.float32), FLOOR).to(tl.float64)
        cumulated = tl.minimum(row + 1, length).to(tl.float64) * step
        total = length.to(tl.float64) * step
    else:
        step = tl.load(g + row * stride_t, mask=row < length, other=0.0).to(tl.float32)
        steps = tl.maximum(step, FLOOR).to(tl.float64)
        cumulated = tl.cumsum(steps, 0)
        total = tl.sum(steps, 0)
    return cumulated, total


@triton.jit
def decay_between(cumulated, row):
    """Decay from token j to token i with zeros above the diagonal, [BC, BC].

    After a strong gate the cumulated logs are large and their differences small: the difference of the fp32 heads is
    exact there, and that of the remainders brings back what the heads have lost.
    """
    head = cumulated.to(tl.float32)
    rest = (cumulated - head.to(tl.float64)).to(tl.float32)
    log = (head[:, None] - head[None, :]) + (rest[:, None] - rest[None, :])
    return tl.where(row[:, None] >= row[None, :], tl.exp(tl.minimum(log, 0.0)), 0.0)


@triton.jit
def load_logs(g, row, col, stride_t, length, K: tl.constexpr):
    """Logs of a chunk, bounded below, [BC, BK]: one decay per key dimension."""
    return tl.maximum(load_tile(g, row, col, stride_t, length, K), FLOOR)


@triton.jit
def decay_over(pairs, logs, LOGS: tl.constexpr):
    """exp of the sum of the logs [BC, BK] of the tokens that ``pairs`` [BC, BC] selects for each token.

    A zero or one is exact in tf32, and so is a log of half precision; logs in fp32 take three products.
    """
    return tl.exp(tl.minimum(tl.dot(pairs.to(tl.float32), logs, input_precision=LOGS), 0.0))


@triton.jit
def up_to(row):
    """Pairs (i, t) with t up to and with i: from the start of the chunk to i."""
    return row[None, :] <= row[:, None]


@triton.jit
def after(row):
    """Pairs (i, t) with t after i: from i to the end of the chunk."""
    return row[None, :] > row[:, None]


@triton.jit
def within_half(row, level):
    """Pairs (i, t) between i and the middle of its block of 2 * 2**level tokens.

    In the second half those from the middle up to and with i, in the first half those after i.
    """
    half = row >> level
    is_second = (half & 1) == 1
    return (half[:, None] == half[None, :]) & (is_second[:, None] == (row[None, :] <= row[:, None]))


@triton.jit
def over_middle(row, level):
    """Pairs (i, j) with i in the second half and j in the first half of one block of 2 * 2**level tokens."""
    half = row >> level
    return ((half[:, None] & 1) == 1) & (half[:, None] == half[None, :] + 1)


@triton.jit
def score_block(q, k, logs, row, LEVELS: tl.constexpr, DOT: tl.constexpr, LOGS: tl.constexpr):
    """q_i k_j^T decayed from j to i over some key dimensions, lower triangle, [BC, BC]: one decay per key dimension.

    Each pair is over the middle of one block: there its decay is a factor on q_i times one on k_j, neither above one.
    """
    scores = tl.where(row[:, None] == row[None, :], tl.sum(q * k, 1)[:, None], 0.0)
    for level in range(LEVELS):
        decay = decay_over(within_half(row, level), logs, LOGS)
        product = tl.dot(q * decay, tl.trans(k * decay), input_precision=DOT)
        scores += tl.where(over_middle(row, level), product, 0.0)
    return scores


@triton.jit
def chunk_scores(
    q, k, g, row, q_t, k_t, g_t, tokens, K: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, LEVELS: tl.constexpr,
    GATE: tl.constexpr, DOT: tl.constexpr, LOGS: tl.constexpr,
):  # fmt: skip
    """q_i k_j^T decayed from j to i, lower triangle, and the decays where they are one number, both [BC, BC]."""
    scores = tl.zeros([BC, BC], dtype=tl.float32)
    for block in range((K + BK - 1) // BK):
        key = block * BK + tl.arange(0, BK)
        qs = load_tile(q, row, key, q_t, tokens, K)
        ks = load_tile(k, row, key, k_t, tokens, K)
        if GATE == "vector":
            scores += score_block(qs, ks, load_logs(g, row, key, g_t, tokens, K), row, LEVELS, DOT, LOGS)
        else:
            scores = tl.dot(qs, tl.trans(ks), scores, input_precision=DOT)
    decay = scores
    if GATE == "none":
        scores = tl.where(row[:, None] >= row[None, :], scores, 0.0)
    elif GATE != "vector":
        cumulated, _ = cumulate_logs(g, row, tokens, g_t, GATE)
        decay = decay_between(cumulated, row)
        scores = scores * decay
    return scores, decay
