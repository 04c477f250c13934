"""Virtual worlds for tests of operations. Such a test runs on an ideal network and with NCCL's rules."""

from __future__ import annotations

import os

import pytest

import weft
from weft.world import simulated

RULES = ("ideal", "nccl")
_current = ["ideal"]


def use_rules(rules: str) -> None:
    """What `virtual_world` makes from now on: see the fixture ``network``."""
    _current[0] = rules


def virtual_world(size: int) -> weft.world.VirtualWorld:
    return weft.world.VirtualWorld(size, rules=_current[0])


def every(values):
    """All of ``values`` on an ideal network; under NCCL's rules, where a program runs twice, a seventh of them.

    `make soak` takes all of them there too.
    """
    values = list(values)
    return values if _current[0] == "ideal" or "WEFT_SOAK" in os.environ else values[1::7] or values


def install_simulated_device() -> None:
    """``torch.device("sim")``. Where it cannot be had, what uses it is skipped, with a line that says why."""
    if (reason := simulated.misfit()) is not None:
        pytest.skip(reason)
    simulated.install()
