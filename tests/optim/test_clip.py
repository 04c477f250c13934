"""`clip_grad_norm_` against torch's on one process that has all gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from worlds import place, virtual_world

import weft

pytestmark = pytest.mark.usefixtures("every_network")


@pytest.mark.parametrize("order", [2.0, 1.0, math.inf, 3.0])
@pytest.mark.parametrize("replicate", [False, True])
@pytest.mark.parametrize("size", [1, 3])
def test_the_norm_of_everything_counted_once(size: int, replicate: bool, order: float) -> None:
    torch.manual_seed(0)
    one, two, head = nn.Embedding(11, 3), nn.Embedding(4, 3), nn.Linear(3, 2)
    for module in (one, two, head):
        module.double()
    ids = [torch.tensor([1, 2, rank, 1]) for rank in range(size)]

    def loss(a: nn.Module, b: nn.Module, c: nn.Module, some: Tensor) -> Tensor:
        return c(a(some) + b(some % 4)).exp().sum()

    wanted = [one, two, head]
    (sum(loss(*wanted, some) for some in ids) / size).backward()
    grads = [parameter.grad.clone() for module in wanted for parameter in module.parameters()]
    parameters = [parameter for module in wanted for parameter in module.parameters()]
    norm = torch.nn.utils.clip_grad_norm_(parameters, 0.1, order)
    clipped = [parameter.grad for parameter in parameters]

    def program(axis: weft.Axis) -> tuple[Tensor, list[Tensor], int]:
        tables = [weft.ShardedEmbedding.from_embedding(x, group=axis, replicate=replicate) for x in (one, two)]
        tables = place(tables)
        mine = place(nn.Linear(3, 2).double())
        mine.load_state_dict(head.state_dict())
        loss(*tables, mine, ids[axis.rank]).backward()
        for parameter, grad in zip(mine.parameters(), grads[2:], strict=True):
            parameter.grad = place(grad.clone())  # averaged, as DistributedDataParallel would
        with weft.record() as ledger:
            found = weft.clip_grad_norm_([*(t.weight for t in tables), *mine.parameters()], 0.1, order)
        shards = [t.weight.grad.to_dense()[t.ownership.ids(axis.rank)] if replicate else t.weight.grad.to_dense()
                  for t in tables]  # fmt: skip
        return found, [*shards, *(p.grad for p in mine.parameters())], ledger.bytes_sent

    results = virtual_world(size).run(program).results
    for rank, (found, parts, sent) in enumerate(results):
        assert torch.equal(found, results[0][0])
        torch.testing.assert_close(found, norm, rtol=1e-12, atol=0)
        for part, whole in zip(parts[:2], clipped[:2], strict=True):
            torch.testing.assert_close(part, whole[rank::size], rtol=1e-10, atol=1e-14)
        for part, whole in zip(parts[2:], clipped[2:], strict=True):
            torch.testing.assert_close(part, whole, rtol=1e-10, atol=1e-14)
        assert sent == 8 * (size - 1)  # one scalar for both tables


def test_a_rank_without_gradients_takes_part() -> None:
    def program(axis: weft.Axis) -> float:
        table = place(weft.ShardedEmbedding(4, 1, group=axis, reduce="sum"))
        table(torch.tensor([0] if axis.rank == 0 else [], dtype=torch.int64)).sum().backward()
        return weft.clip_grad_norm_(table.parameters(), 10.0).item()

    assert virtual_world(3).run(program).results == [1.0] * 3


def test_a_norm_that_is_not_finite() -> None:
    x = torch.ones(2, requires_grad=True)
    x.grad = torch.tensor([1.0, math.inf])
    with pytest.raises(RuntimeError, match=r"norm of order 2\.0 of the gradients is inf"):
        weft.clip_grad_norm_(x, 1.0, error_if_nonfinite=True)
    assert weft.clip_grad_norm_([torch.ones(2, requires_grad=True)], 1.0) == 0
