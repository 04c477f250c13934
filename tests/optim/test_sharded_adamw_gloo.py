"""`ShardedAdamW` on real Gloo processes: training, checkpoints at another size, wrappers that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from test_sharded_adamw import OPTIONS, assert_all_have, averaged, give, groups_of, train_alone, train_over, weights
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import weft
from weft import optim
from weft.world.launch import ProcessWorld

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_adamw_on_averaged_gradients(two: ProcessWorld, four: ProcessWorld, dtype: torch.dtype) -> None:
    for world in (two, four):
        assert_all_have(train_alone(5, world.size, dtype), world.run(train_over, 5, dtype))


class Weights(nn.Module):
    """Parameters with names, as checkpoints want them. (torch does not save a tensor without elements.)"""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        for index, weight in enumerate(weights(dtype)):
            self.register_parameter(f"p{index}", nn.Parameter(weight))


def made(dtype: torch.dtype, lr: float, plain: bool = False) -> tuple[Weights, torch.optim.Optimizer]:
    model = Weights(dtype)
    groups = groups_of(list(model.parameters()))
    kind = torch.optim.AdamW if plain else optim.ShardedAdamW
    return model, kind(groups, **{**OPTIONS, "lr": lr})


def steps_on(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, dtype: torch.dtype) -> list[Tensor]:
    """Every rank has the same gradients, so that the number of ranks does not matter."""
    for step in steps:
        give(list(model.parameters()), [grad.to(dtype) for grad in averaged(step, 1, dtype)])
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def save(axis: weft.Axis, folder: str, dtype: torch.dtype) -> list[Tensor]:
    model, optimizer = made(dtype, OPTIONS["lr"])
    steps_on(model, optimizer, range(3), dtype)
    content = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(content, checkpoint_id=folder)
    return steps_on(model, optimizer, range(3, 6), dtype)


def go_on(axis: weft.Axis, folder: str, dtype: torch.dtype, plain: bool = False) -> list[Tensor]:
    model, optimizer = made(dtype, 9.0, plain)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    content = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(content, checkpoint_id=folder, no_dist=axis.size == 1)
    set_state_dict(model, optimizer, model_state_dict=content["model"], optim_state_dict=content["optimizer"])
    return steps_on(model, optimizer, range(3, 6), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_of_four_goes_on_at_any_size(
    two: ProcessWorld, four: ProcessWorld, tmp_path: Path, dtype: torch.dtype
) -> None:
    wanted = four.run(save, str(tmp_path), dtype)
    assert_all_have(wanted[0], wanted)
    assert_all_have(wanted[0], two.run(go_on, str(tmp_path), dtype))
    assert_all_have(wanted[0], [go_on(weft.Axis.of(None), str(tmp_path), dtype)])
    if dtype == torch.float32:
        assert_all_have(wanted[0], [go_on(weft.Axis.of(None), str(tmp_path), dtype, plain=True)])


def refused(axis: weft.Axis, wrap: str) -> str:
    model = nn.Linear(3, 2)
    wrapped = DistributedDataParallel(model) if wrap == "ddp" else fully_shard(model)
    try:
        optimizer = optim.ShardedAdamW(model.parameters())
        wrapped(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    except (ValueError, TypeError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("wrap", "words"), [("ddp", "is in a DistributedDataParallel"), ("fsdp", "is a DTensor")])
def test_wrappers_that_average_already_are_refused(two: ProcessWorld, wrap: str, words: str) -> None:
    found = two.run(refused, wrap)
    assert all(words in one for one in found)
