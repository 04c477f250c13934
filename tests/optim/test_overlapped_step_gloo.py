"""`OverlappedStep` on real Gloo processes: training, checkpoints at another size."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from mixed_model import Mixed, assert_all_have, backward, overlapped, train_alone, train_in_sequence, train_overlapped
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import weft
from weft.world.launch import ProcessWorld

pytestmark = pytest.mark.processes
ORDER = (1, 2, 0)


def train(axis: weft.Axis, early: bool, micros: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return train_overlapped(axis, 4, micros, dtype, overlap_backward=early, order=ORDER, bucket_bytes=100)


@pytest.mark.parametrize("early", [False, True])
def test_it_is_three_optimizers_on_averaged_gradients(two: ProcessWorld, four: ProcessWorld, early: bool) -> None:
    world = four if early else two
    assert_all_have(train_alone(world.size, 4, 2), world.run(train, early, 2))


def test_low_precision(two: ProcessWorld) -> None:
    wanted = two.run(train_in_sequence, 4, 1, torch.bfloat16)
    assert_all_have(wanted[0], two.run(train, True, 1, torch.bfloat16))


def steps_on(model: Mixed, optimizer: torch.optim.Optimizer, steps: range) -> list[Tensor]:
    """Every rank has the same batches, so that the number of ranks, a power of two, does not matter."""
    for step in steps:
        model(torch.arange(8) * 3 + step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.values()


def save(axis: weft.Axis, folder: str) -> list[Tensor]:
    model = Mixed(axis)
    optimizer = overlapped(model, axis, order=ORDER)
    steps_on(model, optimizer, range(3))
    content = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(content, checkpoint_id=folder)
    return steps_on(model, optimizer, range(3, 6))


def go_on(axis: weft.Axis, folder: str) -> list[Tensor]:
    model = Mixed(axis)
    for parameter in model.parameters():
        parameter.detach().zero_()
    optimizer = overlapped(model, axis, order=ORDER)
    content = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(content, checkpoint_id=folder, no_dist=axis.size == 1)
    set_state_dict(model, optimizer, model_state_dict=content["model"], optim_state_dict=content["optimizer"])
    return steps_on(model, optimizer, range(3, 6))


def test_a_checkpoint_of_four_goes_on_at_any_size(two: ProcessWorld, four: ProcessWorld, tmp_path: Path) -> None:
    wanted = four.run(save, str(tmp_path))
    assert_all_have(wanted[0], wanted)
    for found in (
        four.run(go_on, str(tmp_path)),
        two.run(go_on, str(tmp_path)),
        [go_on(weft.Axis.of(None), str(tmp_path))],
    ):
        assert_all_have(wanted[0], found)


def lacking(axis: weft.Axis) -> tuple[str, bool]:
    model = Mixed(axis)
    optimizer = overlapped(model, axis, overlap_backward=True, bucket_bytes=100)
    before = [p.detach().clone() for p in model.parameters()]
    if axis.rank == 1:
        model.net[3].requires_grad_(False)
    backward(model, axis, 0, 1)
    model.net[3].requires_grad_(True)
    words = ""
    try:
        optimizer.step()
    except ValueError as error:
        words = str(error)
    kept = all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))
    optimizer.zero_grad()
    backward(model, axis, 0, 1)
    optimizer.step()
    return words, kept


def test_a_gradient_that_one_rank_lacks(two: ProcessWorld) -> None:
    """The others' have left; all raise the same, and the next step is made."""
    found = two.run(lacking)
    assert len({words for words, _ in found}) == 1 and all(kept for _, kept in found)
    assert "(REKLS) has no gradient on rank 1 of 2, but on other ranks" in found[0][0]


def run_example(axis: weft.Axis, path: str) -> tuple[list[float], str]:
    return runpy.run_path(path)["train"](axis, 40)


def test_the_example_learns(two: ProcessWorld) -> None:
    path = Path(__file__).parents[2] / "examples" / "overlapped_step.py"
    assert len(path.read_text().splitlines()) < 60
    for losses, explained in two.run(run_example, str(path)):
        assert losses[-1] < 0.75 * losses[0] and "RowAdam" in explained and "exposed" in explained
