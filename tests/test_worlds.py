"""The rules of virtual worlds in tests: see `worlds.virtual_world`."""

from __future__ import annotations

from pathlib import Path

import pytest
from worlds import current_rules, use_rules

TESTS = Path(__file__).parent
# Files whose virtual ranks do not run on the simulated device, and why that is enough.
ON_THE_HOST = {
    "integrations/test_fla_refusals.py": "nothing is computed",
    "integrations/test_transformers_data.py": "tokens of a loader",
    "integrations/test_transformers_mixers.py": "hooks; the mixers are those of test_transformers_hybrids.py",
    "integrations/test_transformers_refusals.py": "what is refused; the models are those of test_transformers.py",
    "ops/attention/test_attention_costs.py": "bytes and virtual time",
    "ops/attention/test_attention_mask_plans.py": "plans and bytes",
    "ops/scan/test_scan_costs.py": "bytes, rounds and virtual time",
    "ops/scan/test_scan_errors.py": "nothing is computed",
    "ops/scan/test_scan_gloo.py": "the ledger of processes",
    "optim/test_matrix_replicated.py": "a baseline of a benchmark",
}


@pytest.mark.parametrize("left", ["nccl", "sim", "nccl again"])
def test_a_test_that_asks_for_no_network_has_an_ideal_one(left: str) -> None:
    """Whatever the one before it left behind. Two of these three run in one process."""
    assert current_rules() == "ideal"
    use_rules(left)


def test_a_network_is_that_of_the_test(network: str) -> None:
    assert current_rules() == network


def test_every_network_is_that_of_the_test(every_network: str) -> None:
    assert current_rules() == every_network


def test_the_simulated_devices_own_tests_come_first(request: pytest.FixtureRequest) -> None:
    """Where they fail, those that stand on it say nothing."""
    own = ["tests/world/simulated" in item.nodeid for item in request.session.items]
    assert own == sorted(own, reverse=True)


def test_virtual_ranks_of_operations_are_on_the_simulated_device_too() -> None:
    """By the fixture ``every_network``, or because the file is about the device."""
    files = [path for name in ("integrations", "ops", "optim") for path in (TESTS / name).rglob("test_*.py")]
    texts = {str(path.relative_to(TESTS)): path.read_text() for path in files}
    worlds = {name for name, text in texts.items() if "virtual_world(" in text or "VirtualWorld(" in text}
    without = {
        name for name in worlds if "every_network" not in texts[name] and "simulated_device()" not in texts[name]
    }
    assert len(worlds) > 40 and without == set(ON_THE_HOST)
