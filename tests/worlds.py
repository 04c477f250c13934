"""Virtual worlds for tests of operations. Such a test runs on an ideal network and with NCCL's rules."""

from __future__ import annotations

import importlib
import os

import pytest

import weft

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


def _why_not_simulated() -> str | None:
    """Why tests on the simulated device do not run; None if they do."""
    try:
        return importlib.import_module("weft.world.simulated").misfit()
    except (ImportError, AttributeError) as error:  # a torch whose private names are others
        return f"the simulated device does not fit this torch: {error}"


on_simulated_device = pytest.mark.skipif(_why_not_simulated() is not None, reason=str(_why_not_simulated()))
