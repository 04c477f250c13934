"""`weft bench rekls`: steps of a matrix optimizer on transformer blocks, beside the replicated algorithm.

Each rank of data x tensor ranks holds its shards of the blocks, which one optimizer steps.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.bench.matrix.replicated import ReplicatedREKLS
from weft.bench.ranks import RankPool
from weft.bench.report import Column, Layout, Report
from weft.bench.timing import line_up
from weft.comm import Axis, record
from weft.optim import REKLS

SHAPES = ((3, 1, 0), (1, 1, 1), (4, 1, 0), (1, 4, 1))  # qkv, projection, up, down: rows, columns (x h), cut along
COLUMNS = (
    Column("case", "width", "{}"),
    Column("method", "method", "{}"),
    Column("cpu_milliseconds", "CPU ms", "{:,.0f}"),
    Column("less_cpu", "x less CPU", "{:.2f}"),
    Column("milliseconds", "wall ms", "{:,.0f}"),
    Column("to_one_thread", "x 1 thread", "{:.2f}"),
    Column("to_two_threads", "x 2 threads", "{:.2f}"),
    Column("megabytes", "MB sent", "{:,.2f}"),
    Column("state_megabytes", "MB state", "{:,.1f}"),
    Column("eigh_share", "eigh", "{:.0%}"),
    Column("busiest", "busiest", "{:.2f}"),
)


@dataclass(frozen=True)
class Method:
    """An optimizer ("replicated", or a variant of `REKLS`) on the first data x tensor ranks.

    ``averaged_first``: gradients are averaged over the data ranks by an all-reduce, then every replica steps alone.
    ``baseline``: the method whose CPU its own is compared with. ``to_serial``: compare times with the serial runs.
    """

    name: str
    optimizer: str
    data: int = 1
    tensor: int = 1
    threads: int = 1
    averaged_first: bool = False
    baseline: str | None = None
    to_serial: bool = False

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
        self.parameters = [(torch.nn.Parameter(one), dim) for one, (*_, dim) in zip(weights, self.shapes, strict=True)]
        self.optimizer: ReplicatedREKLS | REKLS
        if method.optimizer == "replicated":
            self.optimizer = ReplicatedREKLS(self.parameters, 0.01, self.tensor_axis)
        else:
            cuts = {dim: [weight for weight, cut in self.parameters if cut == dim] for dim in (0, 1)}
            groups = [{"params": weights, "partition_dim": dim} for dim, weights in cuts.items()]
            data = None if method.averaged_first else self.data_axis
            self.optimizer = REKLS(groups, 0.01, variant=method.optimizer, group=self.tensor_axis, data_group=data)

    def _shards(self, make: torch.Generator, scale: float = 1.0) -> list[Tensor]:
        shards = []
        for rows, columns, dim in self.shapes:
            whole = scale * torch.randn(rows, columns, generator=make)
            shards.append(whole.tensor_split(self.method.tensor, dim)[self.tensor_axis.rank].contiguous())
        return shards

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
    with use_threads(run.method.threads), record() as ledger, _time_eigh() as within:
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
def _time_eigh() -> Iterator[list[float]]:
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
    """Bytes of the state that each method's optimizer keeps on this rank between steps."""
    kept = {
        name: [one for state in run.optimizer.state.values() for one in state.values()] for name, run in _made.items()
    }
    return {name: sum(one.untyped_storage().nbytes() for one in tensors) for name, tensors in kept.items()}


def _methods() -> list[Method]:
    found = [Method(f"replicated, tensor {size}", "replicated", tensor=size) for size in (2, 4)]
    for variant in ("exact", "stable"):
        for threads in (1, 2):
            found.append(Method(f"{variant}, serial, {threads} thread{'s' * (threads > 1)}", variant, threads=threads))
        for size in (2, 4):
            baseline = f"replicated, tensor {size}"
            name = f"{variant}, tensor {size}"
            found.append(Method(name, variant, tensor=size, baseline=baseline, to_serial=True))
        replicas = f"{variant}, 2 replicas of tensor 2"
        found.append(Method(replicas, variant, data=2, tensor=2, averaged_first=True))
        found.append(Method(f"{variant}, data 2 x tensor 2", variant, data=2, tensor=2, baseline=replicas))
    return found


METHODS = _methods()


def layouts(ranks: int, blocks: int) -> dict[str, Layout]:
    """The table of this benchmark."""
    return {"rekls": Layout(f"one step of REKLS for {blocks} transformer blocks on up to {ranks} ranks", COLUMNS)}


def run(pool: RankPool, report: Report, repeats: int, warm_steps: int, widths: tuple[int, ...], blocks: int) -> None:
    """Measure, adding the rows of a width as soon as it is done. Methods take turns; ranks without work wait."""
    methods = [method for method in METHODS if method.ranks <= pool.size]
    with report.progress(len(widths) * repeats, "rekls") as advance:
        for width in widths:
            pool.run(prepare, methods, width, blocks, warm_steps)
            state: list[dict[str, int]] = pool.run(inspect)
            samples: list[list[dict[str, Sample]]] = []
            try:
                for turn in range(repeats + 1):
                    first = turn % len(methods)
                    taken = pool.run(sample, methods[first:] + methods[:first], turn)
                    if turn:  # the first warms up
                        samples.append(taken)
                        advance()
            finally:  # Ctrl-C keeps what was measured
                for method in methods if samples else ():
                    report.add("rekls", _row(width, method, samples, state))


def _row(
    width: int, method: Method, samples: list[list[dict[str, Sample]]], state: list[dict[str, int]]
) -> dict[str, Any]:
    """``samples[turn][rank][method]``. Ratios are taken sample by sample: what else the machine did slowed both."""

    def turns(name: str) -> list[list[Sample]]:
        return [[rank[name] for rank in turn if name in rank] for turn in samples]

    def cpu(name: str) -> list[float]:
        return [sum(part.cpu for part in turn) for turn in turns(name)]

    def wall(name: str) -> list[float]:
        return [max(part.wall for part in turn) for turn in turns(name)]

    def ratio(others: list[float], mine: list[float]) -> float:
        return statistics.median(other / own for other, own in zip(others, mine, strict=True))

    name, serial = method.name, f"{method.optimizer}, serial, "
    eigh = [[part.eigh for part in turn] for turn in turns(name)]
    return {
        "case": f"h {width}",
        "method": name,
        "cpu_milliseconds": 1e3 * statistics.median(cpu(name)),
        "less_cpu": ratio(cpu(method.baseline), cpu(name)) if method.baseline else None,
        "milliseconds": 1e3 * statistics.median(wall(name)),
        "to_one_thread": ratio(wall(serial + "1 thread"), wall(name)) if method.to_serial else None,
        "to_two_threads": ratio(wall(serial + "2 threads"), wall(name)) if method.to_serial else None,
        "megabytes": max(part.bytes_sent for part in turns(name)[-1]) / 1e6,
        "state_megabytes": max(rank[name] for rank in state if name in rank) / 1e6,
        "eigh_share": statistics.median(sum(parts) / all_cpu for parts, all_cpu in zip(eigh, cpu(name), strict=True)),
        "busiest": statistics.median(max(parts) * len(parts) / sum(parts) for parts in eigh),
        "samples": len(samples),
    }
