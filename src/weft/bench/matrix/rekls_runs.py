"""The steps that `weft bench rekls` measures: transformer blocks on data x tensor ranks, stepped by one optimizer."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.bench.matrix.replicated_rekls import ReplicatedREKLS
from weft.bench.timing import line_up
from weft.comm import Axis, record
from weft.optim import REKLS

SHAPES = ((3, 1, 0), (1, 1, 1), (4, 1, 0), (1, 4, 1))  # qkv, projection, up, down: rows, columns (x h), cut along


@dataclass(frozen=True)
class Method:
    """An optimizer ("replicated", or a variant of `REKLS`) on the first data x tensor ranks.

    ``averaged_first``: gradients are averaged over the data ranks by an all-reduce, then every replica steps alone.
    """

    name: str
    optimizer: str
    data: int = 1
    tensor: int = 1
    threads: int = 1
    averaged_first: bool = False

    @property
    def ranks(self) -> int:
        return self.data * self.tensor


@dataclass(frozen=True)
class Sample:
    """One step on one rank: seconds of CPU, of time, of CPU within eigh; bytes sent."""

    cpu: float
    wall: float
    eigh: float
    bytes_sent: int


class Run:
    """One rank's shards of the blocks, and their optimizer."""

    def __init__(self, axis: Axis, method: Method, width: int, blocks: int) -> None:
        self.method = method
        row, column = divmod(axis.rank, method.tensor)
        self.tensor_axis = axis.subset([row * method.tensor + other for other in range(method.tensor)])
        self.data_axis = axis.subset([column + method.tensor * other for other in range(method.data)])
        self.shapes = [(rows * width, columns * width, dim) for rows, columns, dim in SHAPES * blocks]
        weights = self._shards(torch.Generator().manual_seed(0), scale=0.02)
        self.parameters = [
            (torch.nn.Parameter(weight), dim) for weight, (*_, dim) in zip(weights, self.shapes, strict=True)
        ]
        self.optimizer: ReplicatedREKLS | REKLS
        if method.optimizer == "replicated":
            self.optimizer = ReplicatedREKLS(self.parameters, 0.01, self.tensor_axis)
        else:
            groups = [
                {"params": [weight for weight, cut in self.parameters if cut == dim], "partition_dim": dim}
                for dim in (0, 1)
            ]
            data_axis = None if method.averaged_first else self.data_axis
            self.optimizer = REKLS(
                groups, 0.01, variant=method.optimizer, group=self.tensor_axis, data_group=data_axis
            )  # fmt: skip

    def _shards(self, make: torch.Generator, scale: float = 1.0) -> list[Tensor]:
        wholes = (scale * torch.randn(rows, columns, generator=make) for rows, columns, _ in self.shapes)
        cut = (
            whole.tensor_split(self.method.tensor, dim) for whole, (*_, dim) in zip(wholes, self.shapes, strict=True)
        )
        return [parts[self.tensor_axis.rank].contiguous() for parts in cut]

    def take_gradients(self, step: int) -> None:
        """Those of a step: different on the data ranks, shards of the same on the tensor ranks."""
        make = torch.Generator().manual_seed(1 + 2 * step + self.data_axis.rank)
        for (weight, _), grad in zip(self.parameters, self._shards(make), strict=True):
            weight.grad = grad

    def step(self) -> None:
        if self.method.averaged_first:
            self._average()
        self.optimizer.step()

    def _average(self) -> None:
        """An all-reduce of all gradients as one flat tensor: reduce-scatter, then all-gather."""
        grads = [weight.grad for weight, _ in self.parameters if weight.grad is not None]
        flat = torch.cat([grad.flatten() for grad in grads])
        parts = flat.tensor_split(self.data_axis.size)
        call = self.data_axis.begin("all_reduce")
        mine = call.sum_to_owners(parts).wait().div_(self.data_axis.size)
        flat = torch.cat(call.all_gather(mine, [len(part) for part in parts]).wait())
        for grad, mean in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(mean.view(grad.shape))


_made: dict[str, Run] = {}  # of this rank: what each method steps


def prepare(axis: Axis, methods: list[Method], width: int, blocks: int, warm_steps: int) -> None:
    """Make every method's blocks and step them for a while, so that factors have their full rank."""
    _made.clear()
    for method in methods:
        if axis.rank < method.ranks:
            _made[method.name] = run = Run(axis, method, width, blocks)
            for step in range(warm_steps):
                run.take_gradients(-1 - step)
                run.step()


def sample(axis: Axis, methods: list[Method], turn: int) -> dict[str, Sample]:
    """One step by each method that has work for this rank. The others wait meanwhile and use no processor."""
    found = {}
    for method in methods:
        run = _made.get(method.name)
        if run is not None:
            run.take_gradients(turn)
        line_up(axis)
        if run is not None:
            found[method.name] = _measure(run)
        line_up(axis)
    return found


def _measure(run: Run) -> Sample:
    with use_threads(run.method.threads), record() as ledger, time_eigh() as within:
        cpu, wall = time.process_time(), time.perf_counter()
        run.step()
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return Sample(cpu, wall, sum(within), ledger.bytes_sent)


@contextmanager
def use_threads(threads: int) -> Iterator[None]:
    """As many threads for torch's operators."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def time_eigh() -> Iterator[list[float]]:
    """CPU seconds of each call of ``torch.linalg.eigh`` by this process."""
    original, seconds = torch.linalg.eigh, []

    def timed(matrix: Tensor) -> Any:
        start = time.process_time()
        try:
            return original(matrix)
        finally:
            seconds.append(time.process_time() - start)

    torch.linalg.eigh = timed
    try:
        yield seconds
    finally:
        torch.linalg.eigh = original


def inspect(axis: Axis) -> dict[str, int]:
    """Bytes that each method's optimizer keeps on this rank between steps, parameters apart."""
    return {
        name: kept_bytes(run.optimizer, apart=[weight for weight, _ in run.parameters]) for name, run in _made.items()
    }


def kept_bytes(root: object, apart: Iterable[Tensor]) -> int:
    """Memory of all tensors that an object holds, in containers and in objects of weft and torch.optim; each once."""
    storages: dict[int, int] = {}
    seen, todo = {id(tensor) for tensor in apart}, [root]
    while todo:
        item = todo.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            storages[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
        elif isinstance(item, Mapping):
            todo += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set | frozenset):
            todo += item
        elif type(item).__module__.startswith(("weft.optim", "weft.bench", "torch.optim")):
            todo += vars(item).values()
    return sum(storages.values())
