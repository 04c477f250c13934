"""On real Gloo processes: transformers' Trainer, and loops of one's own with DDP and FSDP2."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Result, alone, distance, make_model, packed_batch, plain_batch, shared, sum_of
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from trained import Texts, Trained, arguments, as_torchrun, collate, full_loss, train_alone, train_shared

import weft
from weft.integrations.transformers import ContextParallel
from weft.world.launch import ProcessWorld

pytest.importorskip("transformers", reason="the extra weft-torch[transformers] is not installed")
pytest.importorskip("accelerate", reason="Trainer needs accelerate, which the project's set-up installs")
pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train_alone("qwen3", tmp_path_factory.mktemp("alone"), 2)


def moved(name: str, weights: dict[str, Tensor]) -> float:
    """How far training went."""
    start = make_model(name).named_parameters()
    return max((weights[key] - weight.detach()).abs().max().item() for key, weight in start)


def assert_trained_alike(found: list[Trained], wanted: Trained) -> None:
    weights, losses = wanted
    far = moved("qwen3", weights)
    assert far > 1e-4
    assert len(losses) == 3  # two steps and an evaluation
    for mine, logged in found:
        assert mine.keys() == weights.keys()
        off = max((mine[name] - weights[name]).abs().max().item() for name in weights)
        assert off < 1e-6 * far
        assert logged == pytest.approx(losses, rel=1e-6)


@pytest.mark.slow
def test_trainer_on_two_context_ranks(two: ProcessWorld, wanted: Trained, tmp_path: Path) -> None:
    """Two steps with accumulation and checkpointing, and the losses that are logged, of an evaluation too."""
    assert_trained_alike(two.run(train_shared, "qwen3", str(tmp_path), 2, 1, {}), wanted)


@pytest.mark.slow
def test_trainer_on_two_data_by_two_context_ranks(four: ProcessWorld, wanted: Trained, tmp_path: Path) -> None:
    assert_trained_alike(four.run(train_shared, "qwen3", str(tmp_path), 1, 2, {}), wanted)


def trainer_fault(axis: weft.Axis, folder: str, changes: dict[str, Any], stock: bool) -> str:
    """What a Trainer raises: with its own sampler, which goes by rank, or with other arguments."""
    from transformers import Trainer

    with as_torchrun(axis):
        cp, model = ContextParallel(), make_model("llama")
        cp.enable(model)
        collator = cp.collator(collate)
        trainer = Trainer(
            model=model, args=arguments(folder, 2, **changes), train_dataset=Texts(), data_collator=collator
        )
        if not stock:
            trainer.get_train_dataloader = lambda: cp.loader(Texts(), 2, collator)
        try:
            trainer.train()
        except ValueError as error:
            return str(error)
    return "nothing"


def test_the_sampler_of_trainer_is_found_out(four: ProcessWorld, tmp_path: Path) -> None:
    found = four.run(trainer_fault, str(tmp_path), {}, True)
    assert len(set(found)) == 1 and "hold different samples: rank 0 2 x" in found[0] and "cp.loader" in found[0]


@pytest.mark.slow
def test_label_smoothing_of_trainer_is_refused(four: ProcessWorld, tmp_path: Path) -> None:
    for words in four.run(trainer_fault, str(tmp_path), {"label_smoothing_factor": 0.1}, False):
        assert "leave label_smoothing_factor at 0" in words


@pytest.mark.slow
def test_counts_of_one_rank_alone_are_refused(four: ProcessWorld, tmp_path: Path) -> None:
    for words in four.run(trainer_fault, str(tmp_path), {"average_tokens_across_devices": False}, False):
        assert "leave Trainer's average_tokens_across_devices on" in words


RATE = 0.1


def batches(step: int, data_rank: int) -> dict[str, Tensor]:
    """Another for each step and data rank."""
    if step == 0:
        return plain_batch(2, 30 + data_rank, seed=data_rank)
    return packed_batch(41, (9 + data_rank, 23), seed=data_rank)


def make_optimizer(how: str, model: Any) -> torch.optim.Optimizer:
    kind = torch.optim.AdamW if how in ("owners", "overlapped") else torch.optim.SGD
    return kind(model.parameters(), lr=RATE)


def overlapped(model: Any) -> weft.optim.OverlappedStep:
    """Two parts, whose gradients leave in the backward."""
    matrices = [weight for weight in model.parameters() if weight.ndim == 2]
    rest = [weight for weight in model.parameters() if weight.ndim != 2]
    parts = [weft.optim.ShardedAdamW(some, lr=RATE) for some in (matrices, rest)]
    return weft.optim.OverlappedStep(parts, overlap_backward=True, bucket_bytes=1 << 12)


def own_loop(axis: weft.Axis, how: str) -> dict[str, Tensor]:
    """Two steps on 2 data x 2 context ranks, written by hand."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    cp, model = ContextParallel(mesh["cp"]), make_model("llama")
    model.loss_function = full_loss
    cp.enable(model)
    wrapped = model
    if how == "fsdp":
        for layer in model.model.layers:
            fully_shard(layer)
        wrapped = fully_shard(model)
    elif how == "ddp":
        wrapped = DistributedDataParallel(model)
    optimizer: torch.optim.Optimizer
    if how == "owners":
        optimizer = weft.optim.ShardedAdamW(model.parameters(), lr=RATE)
    else:
        optimizer = overlapped(model) if how == "overlapped" else make_optimizer(how, model)
    for step in range(2):
        part = cp.shard(batches(step, mesh["dp"].get_local_rank()))
        loss = wrapped(**part).loss * cp.size  # all three take the mean over all ranks, and cp of them share a batch
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = {name: weight.detach() for name, weight in model.named_parameters()}
    return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in whole.items()}


def loop_alone(how: str) -> dict[str, Tensor]:
    model = make_model("llama")
    optimizer = make_optimizer(how, model)
    for step in range(2):
        for data_rank in range(2):
            batch = batches(step, data_rank)
            logits = model(**{name: x for name, x in batch.items() if name != "labels"}, use_cache=False).logits
            targets = (batch["labels"][:, 1:] != -100).sum()
            (full_loss(logits, batch["labels"], num_items_in_batch=targets) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: weight.detach() for name, weight in model.named_parameters()}


@pytest.mark.parametrize("how", ["ddp", "fsdp", "owners", "overlapped"])
def test_a_loop_of_ones_own(four: ProcessWorld, how: str) -> None:
    wanted = loop_alone(how)
    far = moved("llama", wanted)
    for found in four.run(own_loop, how):
        assert found.keys() == wanted.keys()
        assert max((found[name] - wanted[name]).abs().max().item() for name in wanted) < 1e-10 * far


def refused(axis: weft.Axis) -> str:
    cp, model = ContextParallel(), make_model("llama")
    cp.enable(model)
    try:
        model(**cp.shard(plain_batch(seed=axis.rank // 3)))
    except ValueError as error:
        return str(error)
    return "nothing"


def test_different_samples_are_named_on_all_ranks(four: ProcessWorld) -> None:
    found = four.run(refused)
    assert len(set(found)) == 1 and "ranks 0, 1, 2 2 x 37" in found[0] and "rank 3 2 x 37" in found[0]


def gradients(axis: weft.Axis, name: str) -> Result:
    cp, model = ContextParallel(), make_model(name)
    cp.enable(model)
    return shared(cp, model, batch_of(name))


def batch_of(name: str) -> dict[str, Tensor]:
    """GPT-OSS alone lets packed documents see one another."""
    return plain_batch() if name == "gpt_oss" else packed_batch()


@pytest.mark.parametrize("name", ["gpt_oss", "llama4", "mixtral", "phi3"])
def test_models_with_sinks_chunks_routers_and_long_positions(two: ProcessWorld, name: str) -> None:
    assert distance(sum_of(two.run(gradients, name)), alone(make_model(name), batch_of(name))) < 2e-6


EXAMPLE = Path(__file__).parents[2] / "examples" / "transformers_context_parallel.py"


def run_example(_: weft.Axis, steps: int) -> list[float]:
    return runpy.run_path(str(EXAMPLE))["train"](None, steps)


def test_the_example_has_the_loss_of_one_process(four: ProcessWorld) -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 80
    wanted = runpy.run_path(str(EXAMPLE))["train_alone"](4)
    assert wanted[-1] < wanted[0] - 0.3
    for losses in four.run(run_example, 4):
        assert losses == pytest.approx(wanted, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["python", "torchrun", "accelerate"])
def test_the_example_under_each_launcher(launcher: str) -> None:
    words = {
        "python": [sys.executable],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
        "accelerate": [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2",
                       "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"],
    }  # fmt: skip
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    run = subprocess.run([*words[launcher], str(EXAMPLE)], capture_output=True, text=True, timeout=240, env=clean)
    assert run.returncode == 0, run.stderr[-2000:]
    lines = [line for line in run.stdout.splitlines() if line.startswith("step ")]
    assert len(lines) == 8
    for line in lines:
        numbers = [float(word) for word in line.replace(",", " ").split() if "." in word]
        assert abs(numbers[0] - numbers[1]) < 2e-3
