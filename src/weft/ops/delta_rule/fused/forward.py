"""The Triton kernels of what the delta rule adds to linear attention: N, what tokens write to the state of a chunk.

A = tril(beta k k^T, -1), W = (I + A)^-1 beta (k e^G), U = (I + A)^-1 beta v, N = U - W S. With N in place of v the rest
is linear attention, and its kernels. Matrices of a chunk are kept by its tokens, [B, T, HV, BC]; all buffers are fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.ops.fused.blocks import (
    block_logs,
    load_logs,
    load_tile,
    pair_scores,
    since_block,
    state_offsets,
    store_tile,
    to_gate,
    total_log,
    until_block,
)


@triton.jit
def key_pairs(
    k, g, start, length, pairs, k_b, k_t, k_h, g_b, g_t, g_h, tokens_all, value_heads, group, gate_group,
    K: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, LEVELS: tl.constexpr, GATE: tl.constexpr,
    DOT: tl.constexpr, LOGS: tl.constexpr,
):  # fmt: skip
    """k_r k_s^T decayed from s to r, for s <= r and a block of tokens r: a program per block and value head.

    What is above the diagonal of the blocks is not written.
    """
    chunk, i, cell = tl.program_id(0) // (BC // BR), tl.program_id(0) % (BC // BR), tl.program_id(2)
    b, head = (cell // value_heads).to(tl.int64), (cell % value_heads).to(tl.int64)
    token, tokens = tl.load(start + chunk).to(tl.int64), tl.load(length + chunk)
    k += b * k_b + token * k_t + (head // group) * k_h
    g = to_gate(g, b, token, head // gate_group, g_b, g_t, g_h, GATE)
    pairs += ((b * tokens_all + token) * value_heads + head) * BC
    row = i * BR + tl.arange(0, BR)
    apart: tl.constexpr = 1 if GATE == "vector" else 0  # the block on the diagonal
    if apart:
        scores = pair_scores(k, k, g, i, i, k_t, k_t, g_t, tokens, K, BC, BR, BK, LEVELS, GATE, True, DOT, LOGS)
        store_tile(pairs, scores, row, row, value_heads * BC, tokens, BC)
    for j in range(i + 1 - apart):
        scores = pair_scores(k, k, g, i, j, k_t, k_t, g_t, tokens, K, BC, BR, BK, LEVELS, GATE, False, DOT, LOGS)
        store_tile(pairs, scores, row, j * BR + tl.arange(0, BR), value_heads * BC, tokens, BC)


@triton.jit
def invert_pairs(
    pairs, beta, start, length, inverse, beta_b, beta_t, beta_h, tokens_all, value_heads, BC: tl.constexpr,
):  # fmt: skip
    """(I + A)^-1 of a chunk, a program per chunk and value head; what is above the diagonal is zero.

    Blocks of 16 tokens on the diagonal by substitution, all at once; then neighbours are joined to one block.
    """
    chunk, cell = tl.program_id(0), tl.program_id(2)
    b, head = (cell // value_heads).to(tl.int64), (cell % value_heads).to(tl.int64)
    token, tokens = tl.load(start + chunk).to(tl.int64), tl.load(length + chunk)
    place = ((b * tokens_all + token) * value_heads + head) * BC
    pairs += place
    beta += b * beta_b + token * beta_t + head * beta_h
    stride = value_heads * BC
    inner = load_blocks(pairs, beta, 0, stride, beta_t, tokens, 16, 16, BC)
    step = tl.arange(0, 16)
    inner = tl.where(step[:, None] > step[None, :], inner, 0.0)
    inverted = tl.where(step[:, None] == step[None, :], 1.0, 0.0)[None, :, :] + tl.zeros_like(inner)
    for i in range(1, 16):
        mine = step[None, :, None] == i
        factors = tl.sum(tl.where(mine, inner, 0.0), 1)
        inverted -= tl.where(mine, tl.sum(factors[:, :, None] * inverted, 1)[:, None, :], 0.0)
    if BC > 16:
        inverted = join_blocks(inverted, pairs, beta, stride, beta_t, tokens, 16, BC)
    if BC > 32:
        inverted = join_blocks(inverted, pairs, beta, stride, beta_t, tokens, 32, BC)
    row = tl.arange(0, BC)
    store_tile(inverse + place, tl.reshape(inverted, [BC, BC]), row, row, stride, tokens, BC)


@triton.jit
def load_blocks(pairs, beta, below, stride, beta_t, tokens, SIZE: tl.constexpr, EVERY: tl.constexpr, BC: tl.constexpr):
    """Blocks of A with SIZE tokens, ``below`` the diagonal by so many, one for EVERY so many tokens."""
    number, step = tl.arange(0, BC // EVERY)[:, None, None] * EVERY, tl.arange(0, SIZE)
    row, col = number + below + step[None, :, None], number + step[None, None, :]
    block = tl.load(pairs + row * stride + col, mask=(row < tokens) & (col <= row), other=0.0)
    return block * tl.load(beta + row * beta_t, mask=row < tokens, other=0.0).to(tl.float32)


@triton.jit
def join_blocks(inverted, pairs, beta, stride, beta_t, tokens, SIZE: tl.constexpr, BC: tl.constexpr):
    """Two neighbours P^-1 and R^-1 [.., SIZE, SIZE], with the block Q below P, become one: -R^-1 Q P^-1 is below P^-1.

    In three products of heads and remainders, whatever the inputs are.
    """
    count: tl.constexpr = BC // (2 * SIZE)
    upper, lower = tl.split(tl.permute(tl.reshape(inverted, [count, 2, SIZE, SIZE]), [0, 2, 3, 1]))
    between = load_blocks(pairs, beta, SIZE, stride, beta_t, tokens, SIZE, 2 * SIZE, BC)
    between = tl.dot(lower, tl.dot(between, upper, input_precision="tf32x3"), input_precision="tf32x3")
    first = tl.permute(tl.join(upper, tl.zeros_like(upper)), [0, 1, 3, 2])
    second = tl.permute(tl.join(-between, lower), [0, 1, 3, 2])
    both = tl.join(tl.reshape(first, [count, SIZE, 2 * SIZE]), tl.reshape(second, [count, SIZE, 2 * SIZE]))
    return tl.reshape(tl.permute(both, [0, 3, 1, 2]), [count, 2 * SIZE, 2 * SIZE])


@triton.jit
def load_rates(beta, row, stride_t, length):
    """beta of tokens in fp32, zero beyond the chunk's length."""
    return tl.load(beta + row * stride_t, mask=row < length, other=0.0).to(tl.float32)


@triton.jit
def apply_inverse(
    inverse, x, beta, g, start, length, out, weighted,
    x_b, x_t, x_h, beta_b, beta_t, beta_h, g_b, g_t, g_h, tokens_all, value_heads, group, gate_group,
    V: tl.constexpr, BC: tl.constexpr, BV: tl.constexpr, GATE: tl.constexpr, REVERSE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """(I + A)^-1 beta x, x decayed from the chunk's start (W of k; with g left out U of v), [B, T, HV, V].

    With REVERSE (I + A)^-T x, and beta times that: of dN. A program per chunk, block of columns and value head.
    """
    chunk, cell = tl.program_id(0), tl.program_id(2)
    b, head = (cell // value_heads).to(tl.int64), (cell % value_heads).to(tl.int64)
    token, tokens = tl.load(start + chunk).to(tl.int64), tl.load(length + chunk)
    value = tl.program_id(1) * BV + tl.arange(0, BV)
    row = tl.arange(0, BC)
    x += b * x_b + token * x_t + (head // group) * x_h
    g = to_gate(g, b, token, head // gate_group, g_b, g_t, g_h, GATE)
    place = (b * tokens_all + token) * value_heads + head
    rates = load_rates(beta + b * beta_b + token * beta_t + head * beta_h, row, beta_t, tokens)[:, None]
    matrix = load_tile(inverse + place * BC, row, row, value_heads * BC, tokens, BC)
    xs = load_tile(x, row, value, x_t, tokens, V)
    if REVERSE:
        result = tl.dot(tl.trans(matrix), xs, input_precision=DOT)
        store_tile(weighted + place * V, rates * result, row, value, value_heads * V, tokens, V)
    else:
        if GATE == "vector":
            xs = xs * tl.exp(since_block(g, row, value, g_t, tokens, V))
        elif GATE != "none":
            rates = rates * tl.exp(block_logs(g, 0, tokens, g_t, GATE, BC).to(tl.float32))[:, None]
        result = tl.dot(matrix, rates * xs, input_precision=DOT)
    store_tile(out + place * V, result, row, value, value_heads * V, tokens, V)


@triton.jit
def decay_keys(
    k, g, start, length, ended, whole, k_b, k_t, k_h, g_b, g_t, g_h, tokens_all, batch, value_heads, group, gate_group,
    K: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """k decayed to its chunk's end, ``ended`` [B, T, HV, K], and the decay over the chunk, ``whole`` [M, B, HV, (K)].

    Only where there is a decay: the recurrence then knows nothing of gates. A program per chunk, block of K and head.
    """
    chunk, part, cell = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, head = (cell // value_heads).to(tl.int64), (cell % value_heads).to(tl.int64)
    token, tokens = tl.load(start + chunk).to(tl.int64), tl.load(length + chunk)
    key = part * BK + tl.arange(0, BK)
    row = tl.arange(0, BC)
    k += b * k_b + token * k_t + (head // group) * k_h
    g = to_gate(g, b, token, head // gate_group, g_b, g_t, g_h, GATE)
    index = (chunk.to(tl.int64) * batch + b) * value_heads + head
    ks = load_tile(k, row, key, k_t, tokens, K)
    if GATE == "vector":
        ks = ks * tl.exp(until_block(g, row, BC, key, g_t, tokens, K))
        total = tl.sum(load_logs(g, row, key, g_t, tokens, K), 0)
        tl.store(whole + index * K + key, tl.exp(total), mask=key < K)
    else:
        total = total_log(g, 0, tokens, g_t, GATE, BC)
        inner = total - block_logs(g, 0, tokens, g_t, GATE, BC)
        ks = ks * tl.exp(tl.minimum(inner.to(tl.float32), 0.0))[:, None]
        if part == 0:
            tl.store(whole + index, tl.exp(total.to(tl.float32)))
    ended += ((b * tokens_all + token) * value_heads + head) * K
    store_tile(ended, ks, row, key, value_heads * K, tokens, K)


@triton.jit
def load_whole(whole, index, key, K: tl.constexpr, GATE: tl.constexpr):
    """The decay over a chunk, [BK, 1] or one number."""
    if GATE == "vector":
        decay = tl.load(whole + index * K + key, mask=key < K, other=0.0)[:, None]
    elif GATE == "scalar":
        decay = tl.load(whole + index)
    else:
        decay = 1.0
    return decay


@triton.jit
def read_state(xs, state, BR: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """[BR, BK] times [BK, BV]; where K is long in parts that the warps share, so that operands fit into registers."""
    if BK > 64:
        size: tl.constexpr = 64 if BK == 128 else 32
        split = tl.permute(tl.reshape(xs, [BR, BK // size, size]), [1, 0, 2])
        product = tl.sum(tl.dot(split, tl.reshape(state, [BK // size, size, BV]), input_precision="tf32x3"), 0)
    else:
        product = tl.dot(xs, state, input_precision="tf32x3")
    return product


@triton.jit
def delta_states(
    k, whole, w, u, boundary, start, length, segment_first, segment_last, states, values, final, map_states, map_values,
    map_final, k_b, k_t, k_h, tokens_all, batch, value_heads, segments, group,
    K: tl.constexpr, V: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    GATE: tl.constexpr, HAS_BOUNDARY: tl.constexpr, HAS_MAP: tl.constexpr,
):  # fmt: skip
    """The recurrence over the chunks of a segment, S' = e^{G_C} S + (k e^{G_C - G})^T N, for one block of columns.

    ``k`` and ``whole`` are what `decay_keys` gives, or without a decay the keys. Starts from ``boundary``
    [B*N, HV, K, V] (zero without). Writes the states that enter the chunks, ``states`` [M, B, HV, K, V], N in
    ``values`` [B, T, HV, V], and the state that leaves, ``final`` [B*N, HV, K, V]. Programs for columns beyond V carry
    the map of the segment: they start from the identity, without U, and write the same three with K columns. A program
    per segment, block of columns and value head; it holds all of K. In three products of heads and remainders, whatever
    the inputs are: the error of a state goes through all chunks after it.
    """
    segment, part, cell = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, head = (cell // value_heads).to(tl.int64), (cell % value_heads).to(tl.int64)
    blocks: tl.constexpr = (V + BV - 1) // BV
    if HAS_MAP:
        is_map = part >= blocks
        width, read = tl.where(is_map, K, V), tl.where(is_map, 0, V)  # columns there are, and of them in U
        column = tl.where(is_map, part - blocks, part) * BV + tl.arange(0, BV)
        if is_map:
            states, values, final = map_states, map_values, map_final
    else:
        width, read = V, V
        column = part * BV + tl.arange(0, BV)
    key = tl.arange(0, BK)
    k += b * k_b + (head // group) * k_h
    inside = (key[:, None] < K) & (column[None, :] < width)
    offsets = state_offsets(key, column, width)
    outer = (b * segments + segment) * value_heads + head
    state = tl.zeros([BK, BV], dtype=tl.float32)
    if HAS_BOUNDARY:
        state = tl.load(boundary + outer * (K * V) + offsets, mask=inside & (column[None, :] < read), other=0.0)
    if HAS_MAP:
        state += tl.where(is_map & (key[:, None] == column[None, :]), 1.0, 0.0)
    first, last = tl.load(segment_first + segment), tl.load(segment_last + segment)
    for chunk in range(first, last):
        index = (tl.cast(chunk, tl.int64) * batch + b) * value_heads + head
        tl.store(states + index * (K * width) + offsets, state, mask=inside)
        token, tokens = tl.load(start + chunk).to(tl.int64), tl.load(length + chunk)
        place = (b * tokens_all + token) * value_heads + head
        after = state * load_whole(whole, index, key, K, GATE)
        for block in range(tl.cdiv(tokens, BR)):
            row = block * BR + tl.arange(0, BR)
            ws = load_tile(w + place * K, row, key, value_heads * K, tokens, K)
            mask = (row[:, None] < tokens) & (column[None, :] < width)
            at = row[:, None] * (value_heads * width) + column[None, :]
            ys = tl.load(u + place * V + at, mask=mask & (column[None, :] < read), other=0.0)
            ys -= read_state(ws, state, BR, BK, BV)
            tl.store(values + place * width + at, ys, mask=mask)
            ks = load_tile(k + token * k_t, row, key, k_t, tokens, K)
            after = tl.dot(tl.trans(ks), ys, after, input_precision="tf32x3")
        state = after
    tl.store(final + outer * (K * width) + offsets, state, mask=inside)


@triton.jit
def add_entering(
    left, entering, partial, start, length, out, tokens_all, value_heads,
    K: tl.constexpr, V: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """o = ``partial`` + ``left`` times the state that entered [B, HV, K, V], for a chunk, block of V and value head."""
    chunk, cell = tl.program_id(0), tl.program_id(2)
    b, head = (cell // value_heads).to(tl.int64), (cell % value_heads).to(tl.int64)
    token, tokens = tl.load(start + chunk).to(tl.int64), tl.load(length + chunk)
    value = tl.program_id(1) * BV + tl.arange(0, BV)
    row = tl.arange(0, BC)
    place = (b * tokens_all + token) * value_heads + head
    acc = load_tile(partial + place * V, row, value, value_heads * V, tokens, V)
    for block in range((K + BK - 1) // BK):
        key = block * BK + tl.arange(0, BK)
        lefts = load_tile(left + place * K, row, key, value_heads * K, tokens, K)
        states = load_tile(entering + cell.to(tl.int64) * (K * V), key, value, V, K, V)
        acc = tl.dot(lefts, states, acc, input_precision=DOT)
    store_tile(out + place * V, acc, row, value, value_heads * V, tokens, V)
