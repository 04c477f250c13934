from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest

from weft.world.launch import ProcessWorld


@pytest.fixture(scope="session")
def four() -> Iterator[ProcessWorld]:
    """Four Gloo processes: meshes and checkpoints want a WORLD of their own. Tests that use it are marked processes."""
    with ProcessWorld(4, timeout=timedelta(seconds=60)) as world:
        yield world


@pytest.fixture(scope="session")
def two() -> Iterator[ProcessWorld]:
    with ProcessWorld(2, timeout=timedelta(seconds=60)) as world:
        yield world
