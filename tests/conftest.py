from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
from hypothesis import settings

from weft.world.launch import ProcessWorld

torch.set_num_threads(1)
settings.register_profile("weft", deadline=None, max_examples=60, derandomize="CI" in os.environ)
settings.load_profile("weft")


@pytest.fixture(scope="session")
def pool() -> Iterator[ProcessWorld]:
    """Seven real Gloo processes, started once; tests use subgroups of them."""
    with ProcessWorld(7, timeout=timedelta(seconds=60)) as world:
        yield world
