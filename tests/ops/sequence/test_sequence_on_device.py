"""What `weft.sequence` gives to tensors of the simulated device."""

from __future__ import annotations

from typing import Any

import torch

import weft


def test_positions_come_to_the_device_without_the_host_waiting(sim: Any) -> None:
    positions = weft.sequence(5, cu_seqlens=[0, 2, 5]).positions("sim")
    assert positions.device.type == "sim" and not sim.host_syncs
    assert positions.cpu().tolist() == [0, 1, 0, 1, 2]


def test_boundaries_on_the_device_are_read_once(sim: Any) -> None:
    bounds = torch.tensor([0, 2, 5]).to("sim")
    sim.host_syncs.clear()
    assert weft.sequence(5, cu_seqlens=bounds).bounds == (0, 2, 5)
    assert sum(sim.host_syncs.values()) == 1, sim.places_of_syncs()
