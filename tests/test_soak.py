"""Long runs, started by `make soak`."""

from __future__ import annotations

import random
from datetime import timedelta

import pytest
import torch
from serial import KINDS
from test_linear_attention import DECAYS, cases
from test_linear_attention import check as check_linear_attention
from test_scan_gloo import scan_on
from test_schedules import check as check_scan

import weft
from weft.ops.scan import METHODS
from weft.ops.sequence.layout import LAYOUTS
from weft.world.launch import ProcessWorld

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("decay", ["one", "slow", "fast", "zero"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_schedule_size_and_decay(kind: str, decay: str) -> None:
    for method in METHODS:
        for size in range(1, 34):
            for reverse in (False, True):
                check_scan(kind, size, (2, 3, 2), decay, method, reverse)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_linear_attention_at_every_world_size(layout: str) -> None:
    for size in range(1, 17):
        for case in cases(size).values():
            for decay in DECAYS:
                check_linear_attention(decay, case, layout, "auto")


def many_calls(axis: weft.Axis, count: int) -> float:
    """Random calls one after the other on real processes; lanes and the main line take turns."""
    draw, worst = random.Random(0), 0.0
    for call in range(count):
        kind, method, reverse = draw.choice(KINDS), draw.choice(list(METHODS)), draw.random() < 0.5
        worst = max(worst, scan_on(None, kind, method, reverse, seed=call))
        layout, total = draw.choice(LAYOUTS), draw.randrange(1, 40)
        q = weft.shard(torch.ones(1, total, 1, 2), 1, layout=layout)
        o, _ = weft.linear_attention(q, q, q, scale=1.0, layout=layout, method=method)
        wanted = weft.shard(torch.arange(1.0, total + 1).view(1, -1, 1, 1) * 2, 1, layout=layout)
        worst = max(worst, (o - wanted).abs().max().item() if o.numel() else 0.0)
    return worst


@pytest.mark.processes
def test_a_thousand_random_calls_on_gloo() -> None:
    with ProcessWorld(5, timeout=timedelta(seconds=60)) as world:
        assert max(world.run(many_calls, 1000)) < 1e-4
