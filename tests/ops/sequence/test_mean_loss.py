"""`mean_loss`: one process's mean, gradient, norm and clipping on any number of ranks, without a factor by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from worlds import virtual_world

import weft
from weft.world.launch import ProcessWorld

TOKENS, CLASSES, IGNORED = 17, 5, -100


def data(seed: int = 0) -> tuple[Tensor, Tensor]:
    make = torch.Generator().manual_seed(seed)
    targets = torch.randint(0, CLASSES, (TOKENS,), generator=make)
    targets[[2, 3, 11]] = IGNORED
    return torch.randn(TOKENS, 4, generator=make, dtype=torch.float64), targets


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, CLASSES)).double()


def cut(rank: int, ranks: int) -> slice:
    """Uneven; the second of three and more has nothing, the first of three only ignored tokens and one more."""
    sizes = {1: [17], 2: [4, 13], 3: [4, 0, 13], 4: [4, 0, 12, 1]}[ranks]
    start = sum(sizes[:rank])
    return slice(start, start + sizes[rank])


def sum_and_count(net: Callable, rank: int, ranks: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    x, targets = (part[cut(rank, ranks)] for part in data(seed))
    return cross_entropy(net(x), targets, reduction="sum"), (targets != IGNORED).sum()


def train_alone(steps: int = 3) -> tuple[list[float], list[float], list[Tensor]]:
    """(losses, norms, weights)"""
    net = model()
    optimizer, losses, norms = torch.optim.AdamW(net.parameters(), lr=0.1), [], []
    for step in range(steps):
        loss = cross_entropy(net(data(step)[0]), data(step)[1])
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), 0.3)))
        losses.append(loss.item())
        optimizer.step()
    return losses, norms, [p.detach() for p in net.parameters()]


def check(found: tuple[list[float], list[float], list[Tensor]]) -> None:
    losses, norms, weights = train_alone()
    torch.testing.assert_close(found[0], losses, rtol=1e-12, atol=0)
    torch.testing.assert_close(found[1], norms, rtol=1e-6, atol=0)
    for mine, whole in zip(found[2], weights, strict=True):
        torch.testing.assert_close(mine, whole, rtol=0, atol=1e-9)


def sharded(net: nn.Module, axis: weft.Axis) -> Any:
    return weft.optim.ShardedAdamW(net.parameters(), lr=0.1, clip=0.3, group=axis)


def in_a_step(net: nn.Module, axis: weft.Axis) -> Any:
    parts = [weft.optim.ShardedAdamW(layer.parameters(), lr=0.1, group=axis) for layer in (net[0], net[2])]
    return weft.optim.OverlappedStep(parts, clip=0.3, overlap_backward=True)


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize("kind", [sharded, in_a_step])
@pytest.mark.parametrize(("ranks", "as_share"), [(1, False), (2, True), (2, False), (3, True), (4, False)])
def test_it_trains_as_one_process(ranks: int, kind: Callable, as_share: bool) -> None:
    def program(axis: weft.Axis) -> tuple[list[float], list[float], list[Tensor]]:
        net = model()
        optimizer, losses, norms = kind(net, axis), [], []
        for step in range(3):
            loss_sum, count = sum_and_count(net, axis.rank, axis.size, step)
            if as_share:
                loss = weft.mean_loss(loss_sum / (data(step)[1] != IGNORED).sum(), group=axis)
            else:
                loss = weft.mean_loss(loss_sum, count, group=axis)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            norms.append(optimizer.norm)
        return losses, norms, [p.detach() for p in net.parameters()]

    results = virtual_world(ranks).run(program).results
    for found in results:
        check(found)
        assert found[0] == results[0][0] and found[1] == results[0][1]


def on_processes(axis: weft.Axis, kind: str) -> tuple[list[float], list[float], list[Tensor]]:
    """Wrappers of torch: their gradients are averages when the backward is over."""
    net: Any = model()
    if kind == "fsdp":
        fully_shard(net, mesh=init_device_mesh("cpu", (axis.size,)))
    else:
        net = DistributedDataParallel(net)
    optimizer, losses, norms = torch.optim.AdamW(net.parameters(), lr=0.1), [], []
    for step in range(3):
        loss = weft.mean_loss(*sum_and_count(net, axis.rank, axis.size, step), group=axis)
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(weft.clip_grad_norm_(net.parameters(), 0.3)))
        losses.append(loss.item())
        optimizer.step()
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in net.parameters()]
    dist.barrier()
    return losses, norms, [p.detach() for p in whole]


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_wrappers_of_torch_take_it(two: ProcessWorld, kind: str) -> None:
    for found in two.run(on_processes, kind):
        check(found)


@pytest.mark.usefixtures("every_network")
def test_no_tokens_at_all() -> None:
    """The mean over nothing is 0, and so is its gradient."""

    def program(axis: weft.Axis) -> tuple[float, float]:
        x = torch.ones(3, requires_grad=True)
        loss = weft.mean_loss(x[:0].sum() * 2, 0, group=axis)
        loss.backward()
        return loss.item(), float(x.grad.abs().sum())

    assert virtual_world(2).run(program).results == [(0.0, 0.0)] * 2


def wrong(count: Any = 1, loss: Any = None) -> Callable[[], tuple[Any, Any]]:
    return lambda: (torch.ones((), requires_grad=True) * 1 if loss is None else loss, count)


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize(
    ("given", "words"),
    [
        (wrong(count=-1), "ValueError: mean_loss: count must not be negative, got -1.0 (rank 1)"),
        (wrong(count=float("nan")), "ValueError: mean_loss: count must be a finite number, got nan (rank 1)"),
        (wrong(count="4"), "TypeError: mean_loss: count must be a number, got '4' (str) (rank 1)"),
        (wrong(count=torch.ones(2)), "TypeError: mean_loss: count must be a number, got torch.float32 (rank 1)"),
        (wrong(loss=2.0), "TypeError: mean_loss: loss_sum must be a floating-point tensor, the sum of the losses"),
        (wrong(loss=torch.ones(2)), "ValueError: mean_loss: loss_sum must have one element, got [2] (rank 1)"),
        (wrong(loss=torch.ones(())), "ValueError: mean_loss: loss_sum has no gradient on rank 1 of 3, but on other"),
    ],
)  # fmt: skip
def test_what_one_rank_has_wrong_is_raised_on_all(given: Callable, words: str) -> None:
    def program(axis: weft.Axis) -> str:
        try:
            weft.mean_loss(*(given if axis.rank == 1 else wrong())(), group=axis)
        except (ValueError, TypeError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    found = virtual_world(3).run(program).results
    assert len(set(found)) == 1 and found[0].startswith(words), found


@pytest.mark.usefixtures("every_network")
def test_losses_without_tokens_are_refused() -> None:
    def program(axis: weft.Axis) -> str:
        with pytest.raises(ValueError, match="no tokens on any of 2 ranks, but their losses add up to"):
            weft.mean_loss(torch.ones(()), 0, group=axis)
        return "refused"

    assert virtual_world(2).run(program).results == ["refused"] * 2


@pytest.mark.usefixtures("every_network")
def test_second_derivatives() -> None:
    """Right in one process; over several ranks a gradient is P times a share, so they are refused."""

    def penalty(axis: weft.Axis) -> Tensor:
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        loss = weft.mean_loss((x**3).sum(), 2, group=axis)
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), x)[0]

    x = torch.tensor([1.0, 2.0])
    assert torch.allclose(penalty(weft.Axis.of(None)), 2 * (1.5 * x**2) * 3 * x)

    def program(axis: weft.Axis) -> str:
        with pytest.raises(NotImplementedError, match="mean_loss: second derivatives are not supported over 2 ranks"):
            penalty(axis)
        return "refused"

    assert virtual_world(2).run(program).results == ["refused"] * 2
