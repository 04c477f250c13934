"""What travels, from the ledger; and how much of it is in the open, in virtual time."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from layouts import runs_of

import weft
from weft.ops.attention import attention
from weft.ops.attention.distributed import Attention
from weft.ops.attention.gather import order_keys
from weft.ops.attention.kv_exchange import KVExchange
from weft.ops.attention.plan import KeySpan, Options, plan_attention
from weft.ops.attention.ulysses import HeadExchange
from weft.ops.sequence.layout import ANY_LENGTHS, LAYOUTS, lay_out
from weft.ops.sequence.runs import lengths_of

HEADS, DIM, TOKENS = 4, 8, 16
TOKEN = 2 * HEADS * DIM * 4  # bytes of k and v of one token


def received(size: int, *, gradient: bool = False, tokens: int = TOKENS, **options: object) -> list[int]:
    """Bytes of keys and values (or with their gradients) that each rank got, without the table of lengths."""

    def program(axis: weft.Axis) -> int:
        q, k, v = (torch.randn(1, tokens, HEADS, DIM, requires_grad=gradient) for _ in range(3))
        with weft.record() as ledger:
            out = attention(q, k, v, group=axis, **{"causal": False, **options})
        before = ledger.bytes_received - 24 * (size - 1)
        if not gradient:
            return before
        with weft.record() as ledger:
            out.sum().backward()
        return ledger.bytes_received

    return weft.world.VirtualWorld(size).run(program).results


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_gather_moves_only_what_causal_queries_see(size: int) -> None:
    whole = size * TOKENS * TOKEN
    contiguous = received(size, causal=True, method="gather")
    assert sum(contiguous) / size <= (size - 1) / (2 * size) * whole
    assert contiguous == [rank * TOKENS * TOKEN for rank in range(size)]
    zigzag = received(size, causal=True, method="gather", layout="zigzag")
    assert sum(zigzag) / size <= 3 * (size - 1) / (4 * size) * whole
    assert received(size, method="gather") == [(size - 1) * TOKENS * TOKEN] * size


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", ["gather", "ring"])
def test_the_backward_moves_keys_again_and_gradients_back(method: str, layout: str) -> None:
    size = 4
    forward = received(size, causal=True, method="gather", layout=layout)
    lent = plan_attention(runs_of((TOKENS,) * size, layout), (TOKENS,) * size, None, True, (-1, -1)).visible_to
    home = [sum(n for b in range(size) for _, n in lent(rank, b)) * TOKEN for rank in range(size)]
    backward = received(size, causal=True, method=method, layout=layout, gradient=True)
    if method == "gather":
        assert backward == [a + b for a, b in zip(forward, home, strict=True)]
    else:  # on a ring keys may pass a rank that does not need them; gradients go straight home
        assert all(got >= a + b for got, a, b in zip(backward, forward, home, strict=True))
    assert sum(home) == sum(forward)


@pytest.mark.parametrize("method", ["gather", "ring"])
def test_a_window_moves_only_what_it_shows(method: str) -> None:
    got = received(8, causal=True, window=(3, 0), method=method)
    assert got == [0] + [3 * TOKEN] * 7
    got = received(8, window=(3, 2), method="gather")
    assert got == [2 * TOKEN] + [5 * TOKEN] * 6 + [3 * TOKEN]


@pytest.mark.parametrize("method", ["gather", "ring"])
def test_documents_move_only_where_they_are_cut(method: str) -> None:
    aligned = torch.arange(5) * TOKENS
    assert received(4, cu_seqlens=aligned, method=method) == [0] * 4
    cut = torch.tensor([0, TOKENS + 3, 2 * TOKENS, 4 * TOKENS])  # 3 tokens stick out; ranks 2 and 3 share one
    got = received(4, cu_seqlens=cut, causal=True, method=method)
    assert got == [0, TOKENS * TOKEN, 0, TOKENS * TOKEN]


def test_ring_stops_blocks_that_nobody_needs() -> None:
    got = received(8, causal=True, method="ring")
    assert got == [rank * TOKENS * TOKEN for rank in range(8)]


def test_a_ring_can_follow_a_gather() -> None:
    common = {"causal": True, "layout": "zigzag", "gradient": True}
    gather, ring = (received(4, method=method, **common) for method in ("gather", "ring"))
    assert received(4, method="gather", backward="ring", **common) == ring != gather


@pytest.mark.parametrize(("method", "rest"), [("gather", 1.0), ("ring", 1.0), ("ulysses", 0.25)])
def test_half_precision_gradients_halve_their_bytes(method: str, rest: float) -> None:
    """``rest``: what travels beside dK and dV, in local keys and values a peer (ulysses: a half of dq and of out)."""
    full = received(4, method=method, gradient=True)
    half = received(4, method=method, gradient=True, grad_dtype=torch.bfloat16)
    other = int(3 * rest * TOKENS * TOKEN)
    assert [a - other for a in full] == [2 * (b - other) for b in half]


def test_one_message_a_peer_and_step() -> None:
    def program(axis: weft.Axis) -> list[int]:
        q, k, v = (torch.randn(1, TOKENS, HEADS, DIM) for _ in range(3))
        with weft.record() as ledger:
            attention(q, k, v, causal=True, layout="zigzag", method="gather", strides=(1, 2, 1), group=axis)
        return [len(event.receives) for event in ledger.events[1:]]

    for messages in weft.world.VirtualWorld(4).run(program).results:
        assert messages == [3, 3, 3]


def test_zigzag_balances_causal_work() -> None:
    contiguous, zigzag = (
        plan_attention(lay_out((64,) * 8, layout), (64,) * 8, None, True, (-1, -1)) for layout in ANY_LENGTHS
    )
    pairs = [zigzag.pairs(rank) for rank in range(8)]
    assert max(pairs) == min(pairs)
    assert max(contiguous.pairs(rank) for rank in range(8)) > 1.8 * sum(pairs) / 8
    assert sum(pairs) == sum(contiguous.pairs(rank) for rank in range(8)) == 512 * 512 // 2


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("causal", "window"), [(False, (-1, -1)), (True, (-1, -1)), (True, (5, 0)), (False, (70, 3))])
@pytest.mark.parametrize("bounds", [None, (0, 9, 9, 250, 260)])
def test_every_visible_pair_is_computed_once(layout: str, causal: bool, window: tuple[int, int], bounds) -> None:
    lengths = (100, 0, 93, 67)
    runs = runs_of(lengths, layout, bounds)
    lengths = lengths_of(runs, 4)
    plan = plan_attention(runs, lengths, bounds, causal, window)
    offsets = {(run.rank, run.start + i): run.offset + i for run in runs for i in range(run.length)}
    documents = bounds or (0, 260)
    for rank in range(4):
        seen: set[tuple[int, int]] = set()
        for owner in range(4):
            ranges = ((0, lengths[owner]),) if owner == rank else plan.visible_to(owner, rank)
            spans = tuple(plan.place(owner, ranges))
            tokens = [offsets[owner, start + i] for start, length in ranges for i in range(length)]
            for tile, blocks in plan.blocks(rank, spans):
                for block in blocks:
                    for i in range(tile.length):
                        for j in range(block.length):
                            query, key = tile.seen.q_start + i, tokens[block.at + j]
                            shown = block.kind == "full" or (block.kind == "causal" and j <= i)
                            if block.kind == "band":
                                shown = -block.left <= block.shift + j - i <= block.right
                            if shown:
                                assert (query, key) not in seen
                                seen.add((query, key))
        left, right = (math.inf if side < 0 else side for side in window)
        for start, end in itertools.pairwise(documents):
            for query in range(start, end):
                if query not in {offsets[rank, i] for i in range(lengths[rank])}:
                    continue
                low, high = max(start, query - left), min(end - 1, query if causal else query + right)
                wanted = {(query, key) for key in range(int(low), int(high) + 1)}
                assert {pair for pair in seen if pair[0] == query} == wanted


def step(size: int, machine: weft.world.Machine, *, backward: bool, **changes: object) -> weft.world.WorldRun[None]:
    """A layer of 8 bf16 heads over 1024 tokens a rank, zigzag and causal, on meta tensors."""

    def program(axis: weft.Axis) -> None:
        q, k, v = (torch.empty(1, 1024, 8, 64, device="meta", dtype=torch.bfloat16, requires_grad=True) for _ in "qkv")
        options = Options(
            q=(1, 8, 64), kv_heads=8, dtype=torch.bfloat16, device="meta", causal=True, scale=1.0, window=(-1, -1),
            cu_seqlens=None, layout="zigzag", lengths=None, method="gather", strides=None, backward_strides=None,
            backward=None, grad_dtype=None, return_lse=False, gradients=(True,) * 3,
        )  # fmt: skip
        out, _ = Attention.apply(q, k, v, replace(options, **changes), axis, None)
        if backward:
            out.backward(torch.empty_like(out))

    return weft.world.VirtualWorld(size, machine).run(program)


FREE = weft.world.Machine(latency=0.0, bandwidth=math.inf, flops=1e12)


def exposed(size: int, **options: object) -> float:
    """Elapsed over elapsed with free messages, where gathering a head takes half the time of computing it."""
    forward = step(size, FREE, backward=False)
    sent = max(ledger.bytes_sent for ledger in forward.ledgers)
    slow = weft.world.Machine(latency=1e-6, bandwidth=2 * sent / forward.elapsed, flops=1e12)
    free = step(size, FREE, **options).elapsed
    return (step(size, slow, **options).elapsed - free) / free


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("backward", [False, True])
def test_messages_run_under_the_computation(size: int, backward: bool) -> None:
    assert exposed(size, backward=backward) < 0.02
    uniform = {"strides": (4, 4), "backward_strides": (4, 4), "local_first": False}
    assert exposed(size, backward=backward, **uniform) > 0.10


def test_a_ring_runs_under_the_computation() -> None:
    assert exposed(8, backward=True, method="ring") < 0.02


def test_ulysses_has_two_parts_on_their_way_in_and_two_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wait ends the oldest messages of its direction, so that no more buffers are held, however many the parts."""
    order: dict[str, list[str]] = {"to_heads": [], "to_tokens": []}

    def watch(name: str) -> None:
        start = getattr(HeadExchange, name)

        def started(heads: HeadExchange, *args: object) -> weft.comm.Pending:
            pending, number = start(heads, *args), sum(word.startswith("start") for word in order[name])
            if heads.inner.rank:
                return pending
            order[name].append(f"start {number}")
            return weft.comm.Pending(lambda: (order[name].append(f"wait {number}"), pending.wait())[1])

        monkeypatch.setattr(HeadExchange, name, started)

    for name in order:
        watch(name)
    q, k, v = (torch.randn(1, 4, 16, DIM) for _ in range(3))  # 8 heads for each of 2 ranks: parts of 1, 2, 2, 2, 1
    weft.world.VirtualWorld(2).run(lambda axis: attention(q, k, v, method="ulysses", causal=True, group=axis))
    for words in order.values():
        assert all(words.index(f"wait {number}") < words.index(f"start {number + 2}") for number in range(3))
        assert [word for word in words if word.startswith("wait")] == [f"wait {number}" for number in range(5)]


def test_keys_in_the_order_of_the_sequence_need_fewer_blocks() -> None:
    """Long documents on several ranks, in turns; where it changes nothing, keys stay as they arrived."""
    bounds = (0, 700, 720, 1500, 1600)
    for layout in LAYOUTS:
        runs = runs_of((400,) * 4, layout, bounds)
        plan = plan_attention(runs, lengths_of(runs, 4), bounds, True, (-1, -1))
        moved = 0
        for rank in range(4):
            arrived: list[KeySpan] = []
            for owner in set(range(4)) - {rank}:
                at = sum(span.length for span in arrived)
                arrived += plan.place(owner, plan.visible_to(owner, rank), at)
            spans = order_keys(plan, rank, tuple(arrived))
            if spans == tuple(arrived):
                continue
            moved += 1
            assert [span.offset for span in spans] == sorted(span.offset for span in arrived)
            assert [span.at for span in spans] == [0, *itertools.accumulate(span.length for span in spans)][:-1]
            fewer, before = (sum(len(found) for _, found in plan.blocks(rank, one)) for one in (spans, tuple(arrived)))
            assert fewer < before
        assert bool(moved) == (layout == "balanced")


def test_buffers_are_pooled() -> None:
    """However many steps there are, keys and gradients travel through the same few pieces of memory."""
    buffers: dict[tuple[int, ...], list[int]] = {}

    def program(axis: weft.Axis, strides: tuple[int, ...]) -> None:
        q, k, v = (torch.randn(1, TOKENS, HEADS, DIM, requires_grad=True) for _ in range(3))
        attention(
            q, k, v, causal=False, method="gather", strides=strides, backward_strides=strides, group=axis
        ).sum().backward()

    original = KVExchange.buffer
    try:
        for strides in ((2, 2), (2, 1, 1), (1, 1, 2), (1, 2, 1)):
            sizes = buffers.setdefault(strides, [])

            def buffer(self: KVExchange, tokens: int, heads: int, dtype: torch.dtype | None = None) -> torch.Tensor:
                sizes.append(tokens * heads)  # noqa: B023
                return original(self, tokens, heads, dtype)

            KVExchange.buffer = buffer
            weft.world.VirtualWorld(2).run(lambda axis: program(axis, strides))  # noqa: B023
    finally:
        KVExchange.buffer = original
    assert len({tuple(sizes) for sizes in buffers.values()}) == 1
    # forward: two in, two out; backward: the same, two sums of gradients and one to receive; on either rank
    assert len(buffers[2, 2]) == 2 * (4 + 4 + 3) and set(buffers[2, 2]) == {TOKENS * 2}
