"""What a plan makes of a mask: blocks of plain plans as they were, and what travels."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from dense_masks import Known, known_masks
from test_attention_reference import DIM

import weft
from weft.ops.attention import attention, plan
from weft.ops.sequence.layout import ANY_LENGTHS, lay_out, shard_runs

# Blocks of plain plans, (queries, [(keys at, length, kind), ...]): what kernels compute must not change with masks.
PLAIN = {
    "causal": ({"causal": True}, [((0, 4), [(0, 4, "causal")]), ((4, 4), [(0, 4, "full"), (4, 4, "causal")])]),
    "documents": (
        {"causal": True, "bounds": (0, 6, 16)},
        [((0, 4), [(0, 4, "causal")]), ((4, 4), [(4, 4, "causal")])],
    ),
    "full": ({"causal": False}, [((0, 4), [(0, 8, "full")]), ((4, 4), [(0, 8, "full")])]),
    "window": (
        {"causal": True, "window": (2, 0)},
        [((0, 4), [(0, 4, "band")]), ((4, 4), [(4, 4, "band")])],
    ),
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_plans_have_the_blocks_they_had(name: str) -> None:
    """Rank 0 of two in zigzag, 4 and 4 of 16 tokens, against its own keys; and so has a mask that says the same."""
    arguments, wanted = PLAIN[name]
    causal, window, bounds = arguments["causal"], arguments.get("window", (-1, -1)), arguments.get("bounds")
    runs, mask = lay_out((8, 8), "zigzag"), weft.Mask.documents(bounds or (0, 16), causal=bool(causal))
    for plain in (
        plan.plan_attention(runs, (8, 8), bounds, causal, window),
        plan.plan_attention(runs, (8, 8), None, False, window, mask),
    ):
        own = tuple(plain.place(0, ((0, 8),)))
        found = [
            ((tile.start, tile.length), [(block.at, block.length, block.kind) for block in blocks])
            for tile, blocks in plain.blocks(0, own)
        ]
        assert found == wanted and all(tile.first for tile, _ in plain.blocks(0, own))


@pytest.mark.parametrize(
    ("lengths", "layout"), [*product([(6, 6, 6, 6), (9, 0, 4, 10)], ANY_LENGTHS), ((61, 61, 60, 60), "balanced")]
)
def test_only_keys_that_are_seen_travel(lengths: tuple[int, ...], layout: str) -> None:
    """By the ledger: to each rank the tokens of the others that any of its queries sees, and no more."""
    total, size = sum(lengths), len(lengths)
    for known in known_masks(total):
        mask = known.mask if layout not in ANY_LENGTHS else None
        runs = lay_out(lengths, layout) if mask is None else shard_runs(total, layout, size, mask=mask)
        held = [
            torch.cat([torch.arange(run.offset, run.offset + run.length) for run in runs if run.rank == rank])
            for rank in range(size)
        ]

        def program(axis: weft.Axis, known: Known = known, mask: weft.Mask | None = mask) -> tuple[int, int]:
            length = None if mask is not None else lengths[axis.rank]
            whole = None if mask is None else known.mask.total
            sequence = weft.sequence(length, total=whole, layout=layout, mask=mask, group=axis)
            q, k, v = (torch.randn(1, sequence.length, 2, DIM, requires_grad=True) for _ in range(3))
            with weft.record() as ledger:
                out = attention(q, k, v, mask=known.mask, method="gather", sequence=sequence)
            forward = ledger.bytes_received
            with weft.record() as ledger:
                out.sum().backward()
            return forward, ledger.bytes_received

        needed = [
            [int(known.seen[mine][:, theirs].any(0).sum()) if mine is not theirs else 0 for theirs in held]
            for mine in held
        ]
        token = 2 * 2 * DIM * 4  # bytes of its keys and values
        wanted = [
            (token * sum(needed[rank]), token * (sum(needed[rank]) + sum(row[rank] for row in needed)))
            for rank in range(size)
        ]
        assert weft.world.VirtualWorld(size).run(program).results == wanted, known.name
