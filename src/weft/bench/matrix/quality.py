"""`weft bench matrix --quality`: how well AdamW and the matrix optimizers train, and how well conditioned they are.

Every method has its own grid of rates and every rate some seeds; a method is judged by its best rate. Matrices between
hidden layers are stepped by the method. For matrix optimizers the rest (embeddings, head, norms, biases) is stepped by
AdamW at one fixed rate, inside the same optimizer. Betas (0.9, 0.95) and weight decay 0.01 everywhere.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from weft.bench.matrix.methods import OPTIMIZERS, begins_so
from weft.bench.matrix.tasks import TASKS
from weft.bench.ranks import RankPool
from weft.bench.report import Column, Layout, Report
from weft.bench.timing import use_threads
from weft.comm import Axis

METHODS = ("AdamW", *OPTIMIZERS)
OTHERS_RATE = 0.003  # of what is no matrix between hidden layers, where a matrix optimizer steps those
RATES: dict[tuple[str, str], tuple[float, ...]] = {
    **dict.fromkeys((("teacher-student", method) for method in METHODS), (0.005, 0.01, 0.02, 0.04, 0.08)),
    ("language model", "AdamW"): (0.001, 0.002, 0.004, 0.008),
    **dict.fromkeys((("language model", name) for name in ("Muon", "NorMuon")), (0.003, 0.006, 0.012, 0.024)),
    ("language model", "SOAP"): (0.001, 0.003, 0.006, 0.012),
    ("language model", "exact"): (0.001, 0.0025, 0.006, 0.015),
    **dict.fromkeys(
        (("language model", name) for name in ("stable, every step", "stable")), (0.006, 0.012, 0.02, 0.03)
    ),
}
SHAPE, PERTURBED_STEPS, PERTURBATION = (64, 128), 20, 1e-6

COLUMNS = (
    Column("case", "task"),
    Column("method", "matrices by"),
    Column("rate", "best rate", "{:g}"),
    Column("loss", "loss, median", "{:.4f}"),
    Column("lowest", "lowest", "{:.4f}"),
    Column("highest", "highest", "{:.4f}"),
    Column("to_adamw", "- AdamW", "{:+.4f}"),
    Column("cpu_milliseconds", "CPU ms a step", "{:.1f}"),
    Column("run_seconds", "CPU s a run", "{:.1f}"),
    Column("cpu_to_adamw", "x AdamW", "{:.2f}"),
    Column("losses", None),
)
GRIDS = (Column("case", "task"), Column("method", "matrices by"), Column("shown", "medians by rate"))
CONDITIONING = (
    Column("method", "method"),
    Column("even", "iid", "{:.0e}"),
    Column("low_rank", "rank 4 + 1 % noise", "{:.0e}"),
    Column("partly_zero", "half the rows, a quarter of the columns zero", "{:.0e}"),
)


class Job(NamedTuple):
    """One training run."""

    task: str
    method: str
    rate: float
    seed: int
    steps: int


class Outcome(NamedTuple):
    """Validation loss (inf if it diverged) and CPU seconds of a step."""

    loss: float
    cpu: float


def run(pool: RankPool, report: Report, seeds: int, steps: int, methods: tuple[str, ...]) -> None:
    """Train, as many runs at a time as there are ranks, adding a row when a method is done with a task."""
    title = f"validation loss after {steps} steps, {seeds} seeds, each method at its best rate"
    report.tables["quality"], report.tables["grids"] = (
        Layout(title, COLUMNS),
        Layout("the rates that were tried", GRIDS),
    )
    title = (
        f"gradients of {SHAPE[0]} x {SHAPE[1]} changed by {PERTURBATION:g}: change of the weights over their "
        f"movement after {PERTURBED_STEPS} steps"
    )
    report.tables["conditioning"] = Layout(title, CONDITIONING)
    chosen = begins_so(METHODS, methods)
    grids = {key: rates for key, rates in RATES.items() if key[1] in chosen}
    total = seeds * sum(len(rates) for rates in grids.values())
    with report.progress(total, "matrix quality") as advance:
        for row in pool.run(perturb, chosen)[0]:
            report.add("conditioning", row)
        of_adamw: dict[str, dict[str, Any]] = {}
        for (task, method), rates in grids.items():
            jobs = [Job(task, method, rate, seed, steps) for rate in rates for seed in range(seeds)]
            done: dict[float, list[Outcome]] = defaultdict(list)
            try:
                for start in range(0, len(jobs), pool.size):
                    some = jobs[start : start + pool.size]
                    for job, outcome in zip(some, pool.run(train, some), strict=False):
                        done[job.rate].append(outcome)
                        advance()
            finally:  # Ctrl-C keeps the rates that are done
                whole = {rate: outcomes for rate, outcomes in done.items() if len(outcomes) == seeds}
                if whole:
                    row = _row(task, method, steps, whole, of_adamw.get(task))
                    if method == "AdamW":
                        of_adamw[task] = row
                    shown = row.pop("shown")
                    report.add("quality", row)
                    report.add("grids", {"case": task, "method": method, "shown": shown})


def _row(
    task: str, method: str, steps: int, done: dict[float, list[Outcome]], adamw: dict[str, Any] | None
) -> dict[str, Any]:
    medians = {rate: statistics.median(outcome.loss for outcome in outcomes) for rate, outcomes in done.items()}
    rate = min(medians, key=medians.__getitem__)
    losses = [outcome.loss for outcome in done[rate]]
    cpu = 1e3 * statistics.median(one.cpu for outcomes in done.values() for one in outcomes)
    return {
        "case": task,
        "method": method,
        "rate": rate,
        "loss": medians[rate],
        "lowest": min(losses),
        "highest": max(losses),
        "to_adamw": None if adamw is None else medians[rate] - adamw["loss"],
        "cpu_milliseconds": cpu,
        "run_seconds": cpu * steps / 1e3,
        "cpu_to_adamw": None if adamw is None else cpu / adamw["cpu_milliseconds"],
        "shown": ", ".join(f"{at:g}: {median:.4f}" for at, median in medians.items()),
        "losses": {str(at): [outcome.loss for outcome in outcomes] for at, outcomes in done.items()},
    }


def train(axis: Axis, jobs: Sequence[Job]) -> Outcome | None:
    """This rank's run, if there is one for it. Nothing crosses ranks."""
    if axis.rank >= len(jobs):
        return None
    job = jobs[axis.rank]
    with use_threads(1):
        task = TASKS[job.task](job.seed)
        optimizer = make_optimizer(axis, job.method, job.rate, task.matrices, task.others)
        start = time.process_time()
        for _ in range(job.steps):
            optimizer.zero_grad()
            task.loss().backward()
            optimizer.step()
        cpu = (time.process_time() - start) / job.steps
        with torch.no_grad():
            loss = float(task.validation())
        return Outcome(loss if math.isfinite(loss) else math.inf, cpu)


def make_optimizer(
    axis: Axis, method: str, rate: float, matrices: list[nn.Parameter], others: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """The optimizer of one method on one rank."""
    if method == "AdamW":
        return torch.optim.AdamW([*matrices, *others], rate, betas=(0.9, 0.95), weight_decay=0.01)
    groups: list[dict[str, Any]] = [{"params": matrices}]
    if others:
        groups.append({"params": others, "algorithm": "adamw", "lr": OTHERS_RATE})
    return OPTIMIZERS[method](groups, lr=rate, group=axis.subset([axis.rank]), on_nonfinite="skip")


def perturb(axis: Axis, methods: Sequence[str]) -> list[dict[str, Any]]:
    """How far weights are from where they would be, over how far they moved, when gradients change by very little."""
    with use_threads(1):
        return [
            {"method": method, **{name: _deviation(axis, method, make) for name, make in _GRADIENTS.items()}}
            for method in methods
        ]


def _deviation(axis: Axis, method: str, gradient: Callable[[torch.Generator], Tensor]) -> float:
    weights = [nn.Parameter(torch.zeros(SHAPE)) for _ in range(2)]
    optimizers = [make_optimizer(axis, method, 0.01, [weight], []) for weight in weights]
    make = torch.Generator().manual_seed(0)
    for _ in range(PERTURBED_STEPS):
        grad = gradient(make)
        noise = PERTURBATION * grad.square().mean().sqrt() * torch.randn(SHAPE, generator=make)
        for weight, optimizer, one in zip(weights, optimizers, (grad, grad + noise), strict=True):
            weight.grad = one
            optimizer.step()
    one, other = (weight.detach() for weight in weights)
    return float((one - other).norm() / one.norm())


def _normal(make: torch.Generator, rows: int = SHAPE[0], columns: int = SHAPE[1]) -> Tensor:
    return torch.randn(rows, columns, generator=make)


def _partly_zero(make: torch.Generator) -> Tensor:
    grad = _normal(make)
    grad[: SHAPE[0] // 2] = 0
    grad[:, : SHAPE[1] // 4] = 0
    return grad


_GRADIENTS: dict[str, Callable[[torch.Generator], Tensor]] = {
    "even": _normal,
    "low_rank": lambda make: _normal(make, columns=4) @ _normal(make, rows=4) / 2 + 0.01 * _normal(make),
    "partly_zero": _partly_zero,
}
