"""`weft check-device`: who takes part, the table, the verdict."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from weft.bench.report import Column, Layout, Report, describe_machine
from weft.check.case import TOLERANCES, Case
from weft.check.measure import Outcome, failed, measure, results_on_cpu
from weft.check.operations import (
    attention_cases,
    delta_rule_cases,
    linear_attention_cases,
    scan_cases,
    sequence_cases,
)
from weft.check.training import model_cases, optimizer_cases, row_cases
from weft.comm import Axis
from weft.parallel.rendezvous import device_of_rank, joined_world
from weft.world import VirtualWorld
from weft.world.launch import collect

PATIENCE = timedelta(seconds=60)  # with a rank that does not answer
MOST_RANKS = 8  # virtual ones
FAMILIES = ("scan", "linear-attention", "delta-rule", "attention", "sequence", "rows", "optimizers", "model")
_COLUMNS = (
    Column("operation", "operation"),
    Column("error", "max rel. error", "{:.1e}"),
    Column("syncs", "host syncs", "{:d}"),
    Column("decompositions", "in eigh", "{:d}"),
    Column("streams", "streams", "{:d}"),
    Column("milliseconds", "ms", "{:.2f}"),
    Column("alone", "ms alone", "{:.2f}"),
    Column("verdict", "verdict"),
)


@dataclass(frozen=True)
class Ranks:
    """``run(fn)`` is ``fn(axis)`` on every rank, in rank order, on every process; one of them ``reports``."""

    size: int
    device: torch.device
    reports: bool
    run: Callable[[Callable[[Axis], Outcome]], list[Outcome]]


def run_check(device: str, ranks: int | None, only: Sequence[str], json: Path | None) -> bool:
    """What `weft check-device` does; the flags are described there. Whether all is right."""
    for name in only:
        if name not in FAMILIES:
            raise ValueError(f"check-device: --only {name} is not one of {', '.join(FAMILIES)}")
    with _find_ranks(device, ranks) as pool:
        return check(pool, only, json)


def check(pool: Ranks, only: Sequence[str], json: Path | None) -> bool:
    """Check the families ``only`` (none: all) on these ranks, and say what is found. Whether all is right."""
    title = f"{pool.size} rank{'s' if pool.size > 1 else ''} on {pool.device.type} beside the CPU"
    facts = {"check": "device", "device": pool.device.type, "ranks": pool.size}
    report = Report({"check": Layout(title, _COLUMNS)}, json, pool.reports, describe_machine(**facts))
    cases = [case for case in list_cases(pool.device) if not only or case.family in only]
    shown = pool.reports and sys.stderr.isatty()
    for case in track(cases, "checking", disable=not shown, transient=True):
        report.add("check", _row(case, _outcomes(case, pool), pool.size))
    report.show()
    if pool.reports:
        _say_verdict(report.rows, title)
    return all(row["verdict"] == "right" for row in report.rows)


def list_cases(device: torch.device) -> list[Case]:
    """Every operation that ``device`` can do."""
    return [
        *scan_cases(), *linear_attention_cases(device), *delta_rule_cases(device), *attention_cases(),
        *sequence_cases(), *row_cases(), *optimizer_cases(), *model_cases(),
    ]  # fmt: skip


@contextmanager
def _find_ranks(device: str, ranks: int | None) -> Iterator[Ranks]:
    if device == "sim":
        yield _virtual_ranks(2 if ranks is None else ranks)
        return
    if ranks is not None:
        raise ValueError("check-device: --ranks is for --device sim; real devices are torchrun's: --nproc-per-node")
    if device_of_rank(device).type == "cpu":
        raise ValueError("no accelerator found; weft check-device --device sim runs on a simulated one")
    with joined_world(PATIENCE, device) as world:  # not run: no GPU where this was written
        axis = Axis.of(None) if world is None else world
        mine = device_of_rank(device)
        yield Ranks(axis.size, mine, axis.rank == 0, lambda fn: collect(axis, fn(axis)))


def _virtual_ranks(count: int) -> Ranks:
    if not 1 <= count <= MOST_RANKS:
        raise ValueError(f"check-device: --ranks must be from 1 to {MOST_RANKS}, got {count}")
    simulated = importlib.import_module("weft.world.simulated")  # it stands on private names of one torch
    if (why := simulated.misfit()) is not None:
        raise ValueError(f"check-device: --device sim: {why}")
    simulated.install()
    world = VirtualWorld(count, rules="nccl", device="sim")
    return Ranks(count, torch.device("sim", 0), True, lambda fn: world.run(fn).results)


def _outcomes(case: Case, pool: Ranks) -> list[Outcome]:
    """Of every rank."""
    try:
        wanted = results_on_cpu(case, pool.size)
        return pool.run(lambda axis: measure(case, axis, pool.device, wanted[axis.rank]))
    except Exception as error:  # of virtual ranks together, as a deadlock is
        return [failed(error)]


def _row(case: Case, outcomes: Sequence[Outcome], size: int) -> dict[str, Any]:
    """The worst of all ranks."""
    verdicts = [one.verdict(case, size) for one in outcomes]
    worst = next((at for at, word in enumerate(verdicts) if word != "right"), 0)
    chosen = asdict(outcomes[worst])
    for name in ("error", "syncs", "decompositions", "milliseconds", "alone"):
        values = [getattr(one, name) for one in outcomes if getattr(one, name) is not None]
        chosen[name] = max(values, default=None)
    return {
        "operation": case.name, "family": case.family, **chosen, "tolerance": TOLERANCES[case.dtype],
        "syncs_allowed": case.syncs, "verdict": verdicts[worst], "rank": worst,
    }  # fmt: skip


def _say_verdict(rows: Sequence[dict[str, Any]], title: str) -> None:
    bad = [row for row in rows if row["verdict"] != "right"]
    for row in bad:
        places = "; ".join(f"{count} x {place}" for place, count in row["places"].items())
        why = row["fault"] or (places if row["verdict"] == "host waits" else f"tolerance {row['tolerance']:.0e}")
        print(f"{row['operation']}: {row['verdict']} on rank {row['rank']}: {why}")
    if bad:
        print(f"verdict: wrong: {len(bad)} of {len(rows)} operations are not right: {title}")
    else:
        print(f"verdict: right: {len(rows)} operations: {title}")
