"""What Triton kernels over chunks share: blocks of tokens, the decays between them, scores and the gradient of scores.

Every log that is exponentiated is a sum of logs between
two tokens or a difference bounded by zero: no exp of a positive number. One decay per head: the cumulated logs of a
chunk are fp64, and a difference is taken of their fp32 head and remainder. One decay per key dimension: only logs
between the two tokens are ever summed, so nothing cancels.

For scores a chunk is cut into blocks of BR tokens; (i, j) are two of them with j <= i, and ``row_i``, ``row_j`` their
tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

FLOOR = tl.constexpr(-1000.0)  # exp of it is zero, and unlike -inf it can be summed; exact in every dtype of g


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
def load_state(
    local, entering, log, state, piece, key, value, K: tl.constexpr, V: tl.constexpr, GATE: tl.constexpr,
    PIECES: tl.constexpr,
):  # fmt: skip
    """The state of chunk ``state``: what its piece made of it, plus the decayed state that entered the piece, [BK, BV].

    ``state`` and ``piece`` are indices with the head in them; ``log`` holds the decay between the piece's border and
    the chunk's, one or K numbers for each chunk. Without PIECES ``local`` is the state.
    """
    mask = (key[:, None] < K) & (value[None, :] < V)
    offsets = state_offsets(key, value, V)
    mine = tl.load(local + state * (K * V) + offsets, mask=mask, other=0.0)
    if PIECES:
        came = tl.load(entering + piece * (K * V) + offsets, mask=mask, other=0.0)
        if GATE == "vector":
            came = came * tl.exp(tl.load(log + state * K + key, mask=key < K, other=0.0))[:, None]
        elif GATE != "none":
            came = came * tl.exp(tl.load(log + state))
        mine += came
    return mine


@triton.jit
def to_gate(g, b, token, head, g_b, g_t, g_h, GATE: tl.constexpr):
    """The pointer to the gate of a token and head."""
    if GATE == "constant":
        g += head
    elif GATE != "none":
        g += b * g_b + token * g_t + head * g_h
    return g


@triton.jit
def cumulate_logs(g, first, length, stride_t, GATE: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr):
    """Sum of the logs from the start of a chunk up to and with each of the BR tokens from ``first`` on, in fp64."""
    before = total_log(g, 0, tl.minimum(first, length), stride_t, GATE, BC)
    return before + block_logs(g, first, length, stride_t, GATE, BR)


@triton.jit
def total_log(g, first, length, stride_t, GATE: tl.constexpr, BC: tl.constexpr):
    """Sum of the logs of the tokens from ``first`` up to ``length`` in fp64, BC of them at most: one decay per head."""
    if GATE == "constant":
        step = tl.maximum(tl.load(g).to(tl.float32), FLOOR).to(tl.float64)
        return tl.minimum(tl.maximum(length - first, 0), BC).to(tl.float64) * step
    return tl.sum(load_steps(g, first + tl.arange(0, BC), length, stride_t), 0)


@triton.jit
def block_logs(g, first, length, stride_t, GATE: tl.constexpr, BR: tl.constexpr):
    """Sum of the logs from ``first`` up to and with each of BR tokens in fp64: one decay per head."""
    if GATE == "constant":
        step = tl.maximum(tl.load(g).to(tl.float32), FLOOR).to(tl.float64)
        return tl.minimum(tl.arange(0, BR) + 1, tl.maximum(length - first, 0)).to(tl.float64) * step
    return tl.cumsum(load_steps(g, first + tl.arange(0, BR), length, stride_t), 0)


@triton.jit
def load_steps(g, row, length, stride_t):
    """Logs of tokens, bounded below, in fp64: one decay per head."""
    step = tl.load(g + row * stride_t, mask=row < length, other=0.0).to(tl.float32)
    return tl.maximum(step, FLOOR).to(tl.float64)


@triton.jit
def decay_between(cumulated_i, cumulated_j):
    """Decay from token j to token i >= j, [I, J]; where i < j it is one.

    After a strong gate the cumulated logs are large and their differences small: the difference of the fp32 heads is
    exact there, and that of the remainders brings back what the heads have lost.
    """
    head_i, head_j = cumulated_i.to(tl.float32), cumulated_j.to(tl.float32)
    rest_i = (cumulated_i - head_i.to(tl.float64)).to(tl.float32)
    rest_j = (cumulated_j - head_j.to(tl.float64)).to(tl.float32)
    log = (head_i[:, None] - head_j[None, :]) + (rest_i[:, None] - rest_j[None, :])
    return tl.exp(tl.minimum(log, 0.0))


@triton.jit
def load_logs(g, row, col, stride_t, length, K: tl.constexpr):
    """Logs of tokens, bounded below, [BR, BK]: one decay per key dimension."""
    return tl.maximum(load_tile(g, row, col, stride_t, length, K), FLOOR)


@triton.jit
def sum_blocks(g, first, last, key, stride_t, length, K: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr):
    """Sum of the logs of the blocks of BR tokens from ``first`` up to ``last``, [BK]: one decay per key dimension."""
    total = tl.zeros([BK], dtype=tl.float32)
    for block in range(first, last):
        total += tl.sum(load_logs(g, block * BR + tl.arange(0, BR), key, stride_t, length, K), 0)
    return total


@triton.jit
def since_block(g, row, key, stride_t, length, K: tl.constexpr):
    """Log decay from the start of a block of tokens up to and with each of them, [BR, BK]."""
    return tl.cumsum(load_logs(g, row, key, stride_t, length, K), 0)


@triton.jit
def until_block(g, row, end, key, stride_t, length, K: tl.constexpr):
    """Log decay after each token of a block to the block's ``end``, [BR, BK]."""
    return tl.cumsum(load_logs(g, row + 1, key, stride_t, tl.minimum(end, length), K), 0, reverse=True)


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
def decay_to_middle(logs, row, level, LOGS: tl.constexpr):
    """Decay between each token and the middle of its block of 2 * 2**level tokens, [BR, BK].

    The sums are a product with zeros and ones, exact in tf32; so are logs of half precision. LOGS = "fp32" are taken
    as two numbers that tf32 holds.
    """
    pairs = within_half(row, level).to(tl.float32)
    if LOGS == "fp32":
        head = (logs.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        total = tl.dot(pairs, logs - head, input_precision="tf32")
        total = tl.dot(pairs, head, total, input_precision="tf32")
    else:
        total = tl.dot(pairs, logs, input_precision="tf32")
    return tl.exp(tl.minimum(total, 0.0))


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
