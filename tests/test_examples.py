"""Examples of a sequence over ranks train as one process does; those of other families are run beside their tests."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

import weft
from weft.world.launch import ProcessWorld

EXAMPLES = Path(__file__).parents[1] / "examples"


def run_example(axis: weft.Axis, name: str) -> list[float]:
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["train"](axis, 10)


@pytest.mark.parametrize("name", ["attention", "delta_rule", "linear_attention"])
def test_the_loss_of_every_rank_is_that_of_one_process(pool: ProcessWorld, name: str) -> None:
    alone = run_example(weft.Axis.of(None), name)
    assert alone[-1] < 0.9 * alone[0]
    for losses in pool.run(run_example, name):
        assert losses == pytest.approx(alone, rel=1e-5)


def test_examples_are_short() -> None:
    adapters = {"transformers_context_parallel.py"}
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) < 60 or path.name in adapters, path.name
