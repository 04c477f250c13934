"""How well the variants train, by the tasks of `weft bench matrix --quality`; the acceptance is in `make soak`."""

from __future__ import annotations

import statistics

import pytest

import weft
from weft.bench.matrix.quality import Job, train
from weft.world.launch import ProcessWorld

# The best of the benchmark's grids.
RATES = {
    "teacher-student": {"AdamW": 0.02, "exact": 0.02, "stable": 0.04},
    "language model": {"AdamW": 0.002, "exact": 0.006, "stable": 0.012},
}


@pytest.mark.slow
def test_stable_learns_better_than_exact_from_a_teacher() -> None:
    for seed in range(2):
        jobs = {variant: Job("teacher-student", variant, RATES["teacher-student"][variant], seed, 300)
                for variant in ("exact", "stable")}  # fmt: skip
        losses = {variant: train(weft.Axis.of(None), [job]).loss for variant, job in jobs.items()}
        assert losses["stable"] < losses["exact"] < 0.03


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(900)
def test_every_acceptance_of_quality() -> None:
    """Five seeds, 300 steps: the language model at least 0.15 below AdamW's and below exact's; the teacher no worse."""
    medians: dict[str, dict[str, float]] = {}
    with ProcessWorld(2) as world:
        for task, rates in RATES.items():
            medians[task] = {}
            for method, rate in rates.items():
                losses = []
                for pair in ((0, 1), (2, 3), (4,)):
                    jobs = [Job(task, method, rate, seed, 300) for seed in pair]
                    losses += [outcome.loss for outcome in world.run(train, jobs) if outcome is not None]
                medians[task][method] = statistics.median(losses)
    model, teacher = medians["language model"], medians["teacher-student"]
    assert model["stable"] < model["AdamW"] - 0.15 and model["stable"] < model["exact"]
    assert teacher["stable"] <= teacher["exact"]
