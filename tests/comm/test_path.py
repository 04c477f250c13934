"""Schedules that advance together: one exchange for each round, one message for each peer, any number of paths."""

from __future__ import annotations

import pytest
import torch
from worlds import virtual_world

import weft
from weft.comm.rounds import Path, ScheduleExecutor
from weft.ops.scan import METHODS, Affine, Form, schedule

pytestmark = pytest.mark.usefixtures("every_network")

PATHS = (
    (0, 1, 2, 3, 4, 3, 2, 1, 0),  # there and back, as zigzag
    (4, 2, 0),
    (1, 4),
    (3, 3, 1, 1),  # neighbours on one rank
)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_many_paths_at_once(method: str, reverse: bool) -> None:
    """Each place of each path holds a map of its own; what enters a place is the fold of the maps before it."""
    maps = {
        (name, place): torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * name + place)).double()
        for name, ranks in enumerate(PATHS)
        for place in range(len(ranks))
    }

    def program(axis: weft.Axis) -> dict[tuple[int, int], torch.Tensor]:
        call = axis.begin("paths")
        mine = [(n, p) for n, ranks in enumerate(PATHS) for p, rank in enumerate(ranks) if rank == axis.rank]
        paths = [Path(PATHS[name], place, name) for name, place in mine]
        paths = [path.reversed() for path in paths] if reverse else paths
        form = Form("none", torch.Size((2, 3)), torch.float64, torch.device("cpu"))
        scan = ScheduleExecutor(call, [(path, schedule(method, path, form)) for path in paths])
        entering = scan.run(call, [Affine.of(maps[one]) for one in mine])
        zero = torch.zeros(2, 3, dtype=torch.float64)
        return {one: zero if state is None else state for one, state in zip(mine, entering, strict=True)}

    run = virtual_world(5).run(program)
    found = {one: state for result in run.results for one, state in result.items()}
    assert len(found) == len(maps)
    for (name, place), state in found.items():
        places = range(place + 1, len(PATHS[name])) if reverse else range(place)
        wanted = sum((maps[name, p] for p in places), start=torch.zeros(2, 3, dtype=torch.float64))
        assert torch.allclose(state, wanted, atol=1e-12), (name, place)
    for ledger in run.ledgers:
        for event in ledger.events:
            for messages in (event.sends, event.receives):
                peers = [peer for peer, _ in messages]
                assert len(set(peers)) == len(peers), "more than one message for a peer in one exchange"


def test_a_path_of_one_place_has_nothing_to_do() -> None:
    for method in METHODS:
        assert Path((0,), 0).size == 1
        run = virtual_world(1).run(lambda axis: weft.exclusive_scan(torch.ones(1, 1), method=method).item())  # noqa: B023
        assert run.results == [0.0]


def test_documents_and_runs_share_the_exchanges_of_a_round() -> None:
    """Several documents and runs cost no more exchanges than the longest path among them."""

    def exchanges(bounds: tuple[int, ...], layout: str) -> int:
        def program(axis: weft.Axis) -> int:
            length = 12
            sequence = weft.sequence(length, layout=layout, cu_seqlens=bounds, group=axis)
            q = torch.ones(1, length, 1, 2)
            with weft.record() as ledger:
                weft.linear_attention(q, q, q, sequence=sequence, method="doubling")
            return len([event for event in ledger.events if event.sends])

        return max(virtual_world(3).run(program).results)

    assert exchanges((0, 36), "contiguous") == 2  # a path of three places
    assert exchanges((0, 9, 14, 30, 36), "contiguous") == 1  # two of two places
    assert exchanges((0, 36), "zigzag") == 2  # one of five, whose last round stays on rank 0
    assert exchanges((0, 3, 8, 28, 33, 36), "zigzag") == 1  # of two and of three, whose last round stays on rank 1
