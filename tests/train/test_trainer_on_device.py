"""The trainer on the simulated device: the losses of the CPU, and a host that waits once in a step."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_run import SMALL, furthest, losses_of, small_config, train_alone, virtual_mesh
from worlds import simulated_device

import weft
from weft.parallel import rendezvous
from weft.parallel.mesh import make_mesh
from weft.train.config import TrainConfig
from weft.train.sample import generate, load_model
from weft.train.trainer import Trainer

MESHES = [(1, 1), (1, 2), (2, 1)]  # dp, cp
EVERY_KIND = replace(SMALL, pattern="lsd", layers=3)


def sim_world(size: int) -> weft.world.VirtualWorld:
    simulated_device()
    return weft.world.VirtualWorld(size, rules="nccl", device="sim")


def on_device(work: Callable[[Any], None]) -> None:
    """One process with a simulated device, as a thread: what a thread keeps of earlier devices is not here."""
    simulated = simulated_device()

    def run() -> None:
        with simulated.inside_rank(simulated.Rank()) as rank:
            work(rank)

    with ThreadPoolExecutor(1) as thread:
        thread.submit(run).result()


@pytest.mark.parametrize(
    ("dp", "cp", "dtype", "apart"),
    [
        *((*mesh, "fp64", 1e-9) for mesh in MESHES), (1, 2, "bf16", 0.01),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [(2, 2, "fp64", 1e-9), (2, 1, "bf16", 0.01)]),
    ],
)  # fmt: skip
def test_losses_are_those_of_the_cpu(dp: int, cp: int, dtype: Any, apart: float) -> None:
    """Forward, backward, prefetch and step; under an autocast with CUDA's lists, where norms come out in fp32."""
    config = replace(EVERY_KIND, steps=3, dp=dp, cp=cp, dtype=dtype, device="sim")
    found = sim_world(dp * cp).run(lambda axis: losses_of(Trainer(config, virtual_mesh(axis, dp, cp)))).results
    assert all(losses == found[0] for losses in found)
    assert furthest(found[0], train_alone(steps=3, dtype=dtype, pattern="lsd", layers=3)) < apart


def waits_of_a_step(dp: int, cp: int) -> list[dict[str, int]]:
    """How often each rank's host waits in a step after the first two, by file of weft."""

    def program(axis: weft.Axis) -> dict[str, int]:
        rank = simulated_device().current_rank()
        trainer = Trainer(replace(EVERY_KIND, dp=dp, cp=cp, device="sim"), virtual_mesh(axis, dp, cp))
        for _ in range(2):
            trainer.take_step()
        rank.host_syncs.clear()
        rank.host_sync_places.clear()
        trainer.take_step()
        trainer.close()
        found: dict[str, int] = {}
        for (kind, where), count in rank.host_sync_places.items():
            frame = where[0] if where else "unknown"
            path = frame if isinstance(frame, str) else frame[0].co_filename.rpartition("/weft/")[2]
            found[f"{kind} in {path}"] = found.get(f"{kind} in {path}", 0) + count
        assert sum(found.values()) == rank.host_syncs.total()
        return found

    return sim_world(dp * cp).run(program).results


@pytest.mark.parametrize(("dp", "cp"), MESHES)
def test_the_host_waits_once_in_a_step(dp: int, cp: int) -> None:
    """For the verdict of the optimizers: the loss, the norm and the next batch's rows cost no other wait.

    Besides, torch waits in every decomposition, for whether it came to an end.
    """
    for waits in waits_of_a_step(dp, cp):
        besides = {place: count for place, count in waits.items() if not place.startswith("eigh in optim/matrix/")}
        assert not {place for place in besides if " in train/" in place or " in ops/" in place}, besides
        assert sum(besides.values()) <= 1, besides


def test_validation_reads_once() -> None:
    def work(rank: Any) -> None:
        trainer = Trainer(replace(SMALL, device="sim", validate_batches=3), make_mesh((1, 1, 1)))
        trainer.close()
        first = trainer.validation_loss()
        rank.host_syncs.clear()
        assert trainer.validation_loss() == first
        assert rank.host_syncs.total() == 1, rank.places_of_syncs()
        wanted = Trainer(replace(SMALL, validate_batches=3), make_mesh((1, 1, 1)))
        wanted.close()
        assert first == pytest.approx(wanted.validation_loss(), rel=1e-12)

    on_device(work)


def test_a_run_is_saved_gone_on_with_and_sampled(tmp_path: Path) -> None:
    """The bits of a run that saves and is left alone; on the CPU the checkpoint gives the same text."""

    def work(rank: Any) -> None:
        config = replace(EVERY_KIND, steps=5, checkpoint_every=2, device="sim", out=tmp_path / "whole")
        wanted = [result.loss for result in Trainer(config, make_mesh((1, 1, 1)))]
        run = tmp_path / "run"
        trainer = Trainer(replace(config, out=run), make_mesh((1, 1, 1)), lambda: 15 if trainer.done == 2 else 0)
        first = [result.loss for result in trainer]
        assert trainer.ended_by == 15 and len(first) == 2
        again = [result.loss for result in Trainer(replace(config, out=run, resume="auto"), make_mesh((1, 1, 1)))]
        assert first + again == wanted
        texts = [list(generate(load_model(run, device), list(b"def "), 8, 0.0, 1, 0)) for device in ("cpu", "sim")]
        assert texts[0] == texts[1]

    on_device(work)


@pytest.mark.processes
def test_the_command(tmp_path: Path) -> None:
    """Every step's loss stands under its number, also when the run goes on later."""
    simulated_device()
    settings = small_config(tmp_path, device="sim")
    for words in ([settings, "--steps", "2"], ["--resume", "run", "--steps", "4"]):
        command = [sys.executable, "-m", "weft", "train", *words]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "run" / "report.html").exists()
    config = replace(SMALL, steps=2, checkpoint_every=2, validate_every=2, out=tmp_path / "cpu")
    wanted = [result.line() for result in Trainer(config, make_mesh((1, 1, 1)))]
    goes_on = replace(config, steps=4, resume=config.out)
    wanted += [result.line() for result in Trainer(goes_on, make_mesh((1, 1, 1)))]
    found = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in found] == [1, 2, 3, 4]
    for name in ("loss", "norm", "valid_loss"):
        numbers = [[line[name] for line in lines if name in line] for lines in (found, wanted)]
        assert numbers[0] == pytest.approx(numbers[1], rel=1e-9), name


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--device", "gpu"], "train: --device 'gpu' is no device of this torch"),
        (["--device", "cuda"], "train: --device cuda: there is none here"),
        (["--device", "sim", "--cp", "2"], "train: --device sim is for one process"),
    ],
)
def test_a_device_that_is_not_there(call: Any, tmp_path: Path, words: list[str], wanted: str) -> None:
    status, _, said = call("train", small_config(tmp_path, device="auto"), *words)
    assert status == 2 and said.startswith(wanted) and len(said.splitlines()) == 1, said


@pytest.mark.parametrize(
    ("device", "backend"), [("cpu", "gloo"), ("cuda:1", "cpu:gloo,cuda:nccl"), ("xpu:1", "cpu:gloo,xpu:xccl")]
)
def test_ranks_join_by_what_their_device_has(monkeypatch: pytest.MonkeyPatch, device: str, backend: str) -> None:
    """Integers over Gloo, tensors of the device over its own; the mesh is of that kind of device."""
    asked: list[Any] = []
    monkeypatch.setattr(rendezvous, "choose_device", lambda *args: asked.append(args) or torch.device(device))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **how: asked.append((backend, how)))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with contextlib.suppress(ValueError), rendezvous.joined_world(device="auto"):  # there is no group to talk over
        pass
    assert asked[0] == ("auto", 1, 2)
    assert asked[1][0] == backend and asked[1][1].get("device_id") == (
        None if device == "cpu" else torch.device(device)
    )


def test_the_setting() -> None:
    assert TrainConfig().device == "auto" and '"device": "auto"' in TrainConfig().as_json()
