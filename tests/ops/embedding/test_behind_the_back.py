"""Whoever reads a table's weight finds rows up to date; copies, pickles, wrappers, and other optimizers."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from worlds import place, virtual_world

import weft
from weft.world.launch import ProcessWorld

ROWS, WIDTH = 10, 3


class Pair:
    """A table and a dense one, trained alike; most rows of the table have missed steps."""

    def __init__(self, axis: weft.Axis | None = None, steps: int = 8, **options) -> None:
        torch.manual_seed(0)
        self.plain = nn.Embedding(ROWS, WIDTH, dtype=torch.float64)
        table = weft.ShardedEmbedding.from_embedding(self.plain, group=axis)
        self.table = table if axis is None else place(table)
        self.rows = weft.optim.RowAdam(self.table.parameters(), lr=0.1, **options)
        self.dense = torch.optim.AdamW(self.plain.parameters(), lr=0.1, **{"weight_decay": 0.0, **options})
        self.train(range(steps))

    def train(self, steps: range) -> None:
        for step in steps:
            for table, optimizer in ((self.table, self.rows), (self.plain, self.dense)):
                backward(table, step)
                optimizer.step()
                optimizer.zero_grad()

    def dense_shard(self, weight: Tensor) -> Tensor:
        return weight.detach()[self.table.ownership.ids(self.table.axis.rank)]

    @property
    def behind(self) -> bool:
        """Whether rows really lag."""
        return not torch.allclose(
            self.table.table.shard.cpu(), self.dense_shard(self.plain.weight), rtol=1e-9, atol=1e-9
        )


def backward(table: nn.Module, step: int) -> None:
    ids = torch.arange(ROWS) if step == 0 else torch.tensor([step % 2])
    (table(ids) * (1 + 0.1 * step)).sin().sum().backward()


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one.cpu(), other.cpu(), rtol=1e-12, atol=1e-12)


READERS: dict[str, Callable[[Tensor], Tensor]] = {
    "detach": lambda weight: weight.detach().clone(),
    "data": lambda weight: weight.data.clone(),
    "operation": lambda weight: weight * 1.0,
    "matmul": lambda weight: torch.eye(len(weight), dtype=weight.dtype, device=weight.device) @ weight,
    "transposed": lambda weight: weight.T.T.clone(),
    "stack": lambda weight: torch.stack([weight, weight])[0],
    "foreach": lambda weight: torch._foreach_mul([weight], 1.0)[0],
    "index": lambda weight: weight[:],
    "numpy": lambda weight: torch.from_numpy(weight.detach().cpu().numpy().copy()),
    "deepcopy": lambda weight: copy.deepcopy(weight),
    "to": lambda weight: weight.to(torch.float64, copy=True),
}


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("reader", READERS)
def test_who_reads_the_weight_finds_all_rows_up_to_date(reader: str, size: int) -> None:
    def program(axis: weft.Axis) -> None:
        pair = Pair(axis)
        assert pair.behind
        looked = pair.table.weight  # none of these needs a row
        assert looked.shape[1] == WIDTH and looked.numel() and looked.grad is None and looked.requires_grad
        assert pair.behind
        close(READERS[reader](pair.table.weight).detach(), pair.dense_shard(pair.plain.weight))
        pair.train(range(8, 14))
        close(pair.table.full_weight(), pair.plain.weight)

    virtual_world(size).run(program)


def test_who_writes_the_weight_writes_to_rows_that_are_up_to_date() -> None:
    for write in (lambda weight: weight.mul_(0.5), lambda weight: weight.data.clamp_(-1, 1), nn.init.ones_):
        pair = Pair()
        with torch.no_grad():
            for weight in (pair.table.weight, pair.plain.weight):
                write(weight)
        pair.train(range(8, 14))
        close(pair.table.full_weight(), pair.plain.weight)


@pytest.mark.usefixtures("network")  # on another device torch itself averages by another formula
@pytest.mark.parametrize("size", [1, 3])
def test_an_average_of_weights_is_that_of_the_dense_table(size: int) -> None:
    def program(axis: weft.Axis) -> None:
        pair = Pair(axis, steps=0)
        averages = [AveragedModel(pair.table), AveragedModel(pair.plain)]
        for step in range(9):
            pair.train(range(step, step + 1))
            for average, model in zip(averages, (pair.table, pair.plain), strict=True):
                average.update_parameters(model)
        close(averages[0].module.full_weight(), averages[1].module.weight)

    virtual_world(size).run(program)


def test_a_penalty_on_the_weight_itself() -> None:
    pair = Pair()
    for table, optimizer in ((pair.table, pair.rows), (pair.plain, pair.dense)):
        for step in range(8, 12):
            backward(table, step)
            (0.1 * table.weight.square().sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
    close(pair.table.full_weight(), pair.plain.weight)


def test_a_frozen_table_stays_as_it_is() -> None:
    pair = Pair()
    for table in (pair.table, pair.plain):
        table.weight.requires_grad_(False)
    for table, optimizer in ((pair.table, pair.rows), (pair.plain, pair.dense)):
        assert not table(torch.tensor([1])).requires_grad
        optimizer.step()
        table.weight.requires_grad_(True)
    pair.train(range(8, 12))
    close(pair.table.full_weight(), pair.plain.weight)


def test_another_dtype_needs_another_optimizer() -> None:
    pair = Pair()
    pair.table.float()
    close(pair.table.table.shard, pair.plain.weight.detach().float())
    backward(pair.table, 9)
    with pytest.raises(TypeError, match=r"is torch.float32 on cpu now, but its moments were made torch.float64 on cpu"):
        pair.rows.step()
    low = weft.ShardedEmbedding(ROWS, WIDTH, dtype=torch.float32)
    optimizer = weft.optim.RowAdam(low.parameters(), lr=0.1)
    low.bfloat16()  # moments are fp32 for both
    low(torch.tensor([1])).sum().backward()
    optimizer.step()
    made = weft.ShardedEmbedding(ROWS, WIDTH, device="meta").to_empty(device="cpu")
    made.reset_parameters()
    made(torch.tensor([1])).sum().backward()
    weft.optim.RowAdam(made.parameters()).step()


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize("order", ["model first", "optimizer first", "optimizer alone"])
@pytest.mark.parametrize("size", [1, 3])
def test_copies_of_a_model_and_its_optimizer_go_on_by_themselves(order: str, size: int) -> None:
    def program(axis: weft.Axis) -> None:
        pair = Pair(axis, weight_decay=0.1)
        if order == "model first":
            table, rows = copy.deepcopy((pair.table, pair.rows))
        elif order == "optimizer first":
            rows, table = copy.deepcopy((pair.rows, pair.table))
        else:
            rows = copy.deepcopy(pair.rows)
            table = copy.deepcopy(pair.table)
            assert rows.param_groups[0]["params"][0] is not pair.table.weight
        before = pair.table.full_weight().detach()
        if order == "optimizer alone":
            other = rows.param_groups[0]["params"][0]
            close(other.detach(), pair.table.table.shard)
        else:
            assert rows.param_groups[0]["params"] == [table.weight] and rows.param_groups[0]["lr"] == 0.1
            for step in range(8, 14):
                backward(table, step)
                rows.step()
                rows.zero_grad()
            close(pair.table.full_weight(), before)
            pair.train(range(8, 14))
            assert torch.equal(table.full_weight(), pair.table.full_weight())
        close(pair.table.full_weight(), pair.plain.weight)

    virtual_world(size).run(program)


@pytest.mark.parametrize("what", ["table", "weight"])
def test_a_table_of_one_rank_is_saved_whole(what: str) -> None:
    pair = Pair()
    file = io.BytesIO()
    torch.save(pair.table if what == "table" else pair.table.weight, file)
    file.seek(0)
    found = torch.load(file, weights_only=what == "weight")
    if what == "weight":
        close(found, pair.plain.weight)
        return
    close(found.full_weight(), pair.plain.weight)
    backward(found, 3)
    weft.optim.RowAdam(found.parameters()).step()
    hashed = torch.load(io.BytesIO(_bytes(weft.BigramHashEmbedding(11, 2))), weights_only=False)
    assert hashed(torch.tensor([[1, 2]])).shape == (1, 2, 2)


def _bytes(thing: object) -> bytes:
    file = io.BytesIO()
    torch.save(thing, file)
    return file.getvalue()


@pytest.mark.usefixtures("every_network")
def test_what_lies_on_ranks_is_not_pickled() -> None:
    def program(axis: weft.Axis) -> list[str]:
        pair, words = Pair(axis), []
        for thing in (pair.table, pair.rows):
            with pytest.raises(TypeError) as error:
                _bytes(thing)
            words.append(str(error.value))
        return words

    for rank, words in enumerate(virtual_world(2).run(program).results):
        assert f"ShardedEmbedding: a table over 2 ranks is not pickled (rank {rank}); save its state_dict()" in words[0]
        assert words[1] == "RowAdam: an optimizer of tables over ranks is not pickled; save its state_dict()"


@pytest.mark.parametrize("kind", ["rows", "overlapped"])
def test_a_table_has_one_optimizer(kind: str) -> None:
    pair = Pair()
    second = weft.optim.RowAdam(pair.table.parameters(), lr=0.1)
    close(pair.table.table.shard, pair.plain.weight.detach())  # it takes over rows that are up to date
    backward(pair.table, 9)
    old = pair.rows if kind == "rows" else weft.optim.OverlappedStep([pair.rows])
    with pytest.raises(ValueError, match="has been taken over by another RowAdam, which keeps its rows since"):
        old.step()
    second.step()


def test_a_parameter_listed_twice_and_states_of_another_adam_are_refused() -> None:
    pair = Pair()
    weight = weft.ShardedEmbedding(ROWS, WIDTH).weight
    with (
        pytest.warns(UserWarning, match="duplicate"),
        pytest.raises(ValueError, match="is listed twice in a group"),
    ):
        weft.optim.RowAdam([weight, weight])
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        weft.optim.RowAdam([{"params": [weight]}, {"params": [weight]}])
    before = copy.deepcopy(pair.rows.state_dict())
    for kind, options, words in (
        (torch.optim.Adam, {"amsgrad": True}, "of an optimizer with amsgrad=True, which this is not"),
        (torch.optim.Adam, {"maximize": True}, "of an optimizer with maximize=True"),
        (torch.optim.Adam, {"weight_decay": 0.1}, "weight_decay=0.1 of Adam's kind"),
    ):
        other = kind(pair.plain.parameters(), **options)
        backward(pair.plain, 0)
        other.step()
        with pytest.raises(ValueError, match=words):
            pair.rows.load_state_dict(other.state_dict())
    saved = torch.optim.Adam(pair.plain.parameters(), amsgrad=True)
    saved.step()
    hidden = saved.state_dict()
    hidden["param_groups"][0]["amsgrad"] = False
    with pytest.raises(ValueError, match="parameter 0 of the state has max_exp_avg_sq"):
        pair.rows.load_state_dict(hidden)
    after = pair.rows.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert all(torch.equal(after["state"][0][name], before["state"][0][name]) for name in before["state"][0])


def wrap(axis: weft.Axis, kind: str) -> tuple[str, str]:
    """(the error, and that of the same model with the table kept off)."""
    words = []
    for keep_off in (False, True):
        model = nn.Sequential(weft.ShardedEmbedding(7, 3), nn.Linear(3, 2))
        try:
            if kind == "ddp":
                if keep_off:
                    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight"])
                made = DistributedDataParallel(model)
            else:
                made = fully_shard(model, ignored_params={model[0].weight} if keep_off else None)
            made(torch.tensor([axis.rank])).sum().backward()
            dist.barrier()
            words.append("no error")
        except ValueError as error:
            words.append(str(error))
    return words[0], words[1]


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_wrapper_that_would_take_a_table_over_is_told(two: ProcessWorld, kind: str) -> None:
    name = {"ddp": "DistributedDataParallel", "fsdp2": "fully_shard"}[kind]
    for refused, taken in two.run(wrap, kind):
        assert refused.startswith(f"ShardedEmbedding: {name} would take over a table, whose rows lie on")
        assert taken == "no error"
