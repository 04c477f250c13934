from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from hypothesis import settings
from interpreter import Interpreter
from worlds import RULES, on_simulated_device, simulated_device, use_rules

from weft.world.launch import ProcessWorld

torch.set_num_threads(1)
settings.register_profile("weft", deadline=None, max_examples=40, derandomize="CI" in os.environ)
settings.load_profile("weft")


@pytest.fixture(params=RULES, scope="module")
def network(request: pytest.FixtureRequest) -> str:
    """Every test of an operation on virtual ranks runs with each of these rules: see `worlds.virtual_world`."""
    return request.param


@pytest.fixture(params=[*RULES, pytest.param("sim", marks=on_simulated_device)], scope="module")
def every_network(request: pytest.FixtureRequest) -> str:
    """The same, and by NCCL's rules on a simulated device."""
    return request.param


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """The rules are those of the test that comes, for its fixtures too; who asks for no network has an ideal one."""
    use_rules(_network_of(item) or "ideal")


def _network_of(item: pytest.Item) -> str | None:
    given = item.callspec.params if hasattr(item, "callspec") else {}
    return given.get("network") or given.get("every_network")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The simulated device's own tests come first: where they fail, those that stand on it say nothing.

    With several workers: tests that use the pool stay on one of them, those with processes of their own on one.

    Of the tests by NCCL's rules, where programs run twice, `make test` takes every sixth, of those on the simulated
    device every twelfth, and `make soak` all.
    """
    items.sort(key=lambda item: "tests/world/simulated" not in item.nodeid)
    for item in items:
        share = {"nccl": 6, "sim": 12}.get(_network_of(item), 1)
        if "WEFT_SOAK" not in os.environ and zlib.crc32(item.nodeid.encode()) % share:
            item.add_marker(pytest.mark.slow)
        if "pool" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("pool"))
        elif item.get_closest_marker("processes"):
            item.add_marker(pytest.mark.xdist_group("processes"))


@pytest.fixture
def sim() -> Iterator[Any]:
    """A rank with the simulated device, in which the test runs; nothing of other tests is pending there."""
    simulated = simulated_device()
    with simulated.inside_rank(simulated.Rank()) as rank:
        yield rank


@pytest.fixture(scope="session")
def pool() -> Iterator[ProcessWorld]:
    """Seven real Gloo processes, started once; tests use subgroups of them."""
    with ProcessWorld(7, timeout=timedelta(seconds=60)) as world:
        yield world


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    """A process whose Triton kernels run in Triton's interpreter, started once."""
    with Interpreter() as process:
        yield process


@pytest.fixture(scope="session")
def four() -> Iterator[ProcessWorld]:
    """Four Gloo processes: meshes and checkpoints want a WORLD of their own. Tests that use it are marked processes."""
    with ProcessWorld(4, timeout=timedelta(seconds=60)) as world:
        yield world


@pytest.fixture(scope="session")
def two() -> Iterator[ProcessWorld]:
    with ProcessWorld(2, timeout=timedelta(seconds=60)) as world:
        yield world
