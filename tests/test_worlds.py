"""The rules of virtual worlds in tests: see `worlds.virtual_world`."""

from __future__ import annotations

import pytest
from worlds import current_rules, use_rules


@pytest.mark.parametrize("left", ["nccl", "sim", "nccl again"])
def test_a_test_that_asks_for_no_network_has_an_ideal_one(left: str) -> None:
    """Whatever the one before it left behind. Two of these three run in one process."""
    assert current_rules() == "ideal"
    use_rules(left)


def test_a_network_is_that_of_the_test(network: str) -> None:
    assert current_rules() == network


def test_every_network_is_that_of_the_test(every_network: str) -> None:
    assert current_rules() == every_network
