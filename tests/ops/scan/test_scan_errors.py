from __future__ import annotations

import pytest
import torch

import weft

S = torch.ones(2, 3, 4)


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"state": torch.ones(3)}, ValueError, r"state must be \[..., K, V\], got \[3\]"),
        ({"state": [1, 2]}, TypeError, "state must be a floating tensor, got list"),
        ({"state": torch.ones(2, 2, dtype=torch.int64)}, TypeError, "state must be a floating tensor, got torch.int64"),
        ({"state": S, "log_decay": torch.zeros(3)}, ValueError, r"log_decay \[3\] fits neither a scalar \[2\]"),
        ({"state": S, "transition": torch.zeros(2, 4, 4)}, ValueError, r"transition must be \[2, 3, 3\]"),
        ({"state": S, "log_decay": torch.zeros(2), "transition": torch.zeros(2, 3, 3)}, ValueError, "not both"),
        ({"state": S, "method": "rung"}, ValueError, "method 'rung' is not one of ring, gather"),
        ({"state": S, "blocks": 2}, ValueError, "blocks=2 is for method 'pipeline' only"),
        ({"state": S, "blocks": 0, "method": "pipeline"}, ValueError, "blocks must be at least 1"),
        ({"state": S, "log_decay": torch.zeros(2, device="meta")}, ValueError, "log_decay is on meta"),
        ({"state": S, "group": "world"}, TypeError, "group must be a ProcessGroup, a 1-D DeviceMesh"),
    ],
)
def test_wrong_arguments_are_told(arguments, kind, words) -> None:
    state = arguments.pop("state")
    with pytest.raises(kind, match=words):
        weft.exclusive_scan(state, **arguments)


@pytest.mark.parametrize("ranks", [[0, 0], [1], [0, 7]])
def test_a_subset_must_be_of_the_axis_and_hold_this_rank(ranks: list[int]) -> None:
    with pytest.raises(ValueError, match=r"Axis.subset: .* with rank 0 among them"):
        weft.world.VirtualWorld(2).run(lambda axis: axis.subset(ranks) if axis.rank == 0 else None)
