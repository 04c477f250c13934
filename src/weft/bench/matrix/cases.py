"""`weft bench matrix`: steps of a matrix optimizer on transformer blocks, beside the replicated algorithm.

Each rank of data x tensor ranks holds its shards of the blocks, which one optimizer steps.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from weft.bench.matrix.methods import OPTIMIZERS, begins_so
from weft.bench.matrix.replicated import ReplicatedREKLS
from weft.bench.matrix.virtual import simulate
from weft.bench.ranks import Measured, RankPool, fill_table, highest_megabytes, ratio
from weft.bench.report import Column, Layout, Report
from weft.bench.timing import Case, Sample, measure_each, use_threads
from weft.comm import Axis
from weft.optim import StepPart


def _less_cpu(measured: Measured) -> float | None:
    """How many times less CPU than its baseline, if it has one."""
    baseline = METHODS[measured.case].baseline
    return ratio(measured.cpu(baseline), measured.cpu()) if baseline else None


SHAPES = ((3, 1, 0), (1, 1, 1), (4, 1, 0), (1, 4, 1))  # qkv, projection, up, down: rows, columns (x h), cut along
COLUMNS = (
    Column("case", "width"),
    Column("method", "method"),
    Column("cpu_milliseconds", "CPU ms", "{:,.0f}"),
    Column("less_cpu", "x less CPU", "{:.2f}", _less_cpu),
    Column("milliseconds", "wall ms", "{:,.0f}"),
    Column("to_one_thread", "x 1 thread", "{:.2f}", lambda m: m.faster_than(METHODS[m.case].serial + "1 thread")),
    Column("to_two_threads", "x 2 threads", "{:.2f}", lambda m: m.faster_than(METHODS[m.case].serial + "2 threads")),
    Column("megabytes", "MB sent", "{:,.2f}"),
    Column("state_megabytes", "MB state", "{:,.1f}"),
    Column("eigh_share", "eigh", "{:.0%}", lambda m: ratio(list(map(sum, _eigh(m))), m.cpu())),
    Column("busiest", "busiest", "{:.2f}", lambda m: _busiest(_eigh(m))),
    Column("samples", None),
)


@dataclass(frozen=True)
class Method:
    """An optimizer ("replicated", or one of ``OPTIMIZERS``) on the first data x tensor ranks.

    ``averaged_first``: gradients are averaged over the data ranks by an all-reduce, then every replica steps alone.
    ``baseline``: the method whose CPU its own is compared with. ``serial``: how the names begin of those whose time is.
    """

    name: str
    optimizer: str
    data: int = 1
    tensor: int = 1
    threads: int = 1
    averaged_first: bool = False
    baseline: str = ""
    serial: str = ""

    @property
    def ranks(self) -> int:
        return self.data * self.tensor


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
        self.optimizer: ReplicatedREKLS | StepPart
        if method.optimizer == "replicated":
            self.optimizer = ReplicatedREKLS(self.parameters, 0.01, self.tensor_axis)
        else:
            cuts = {dim: [weight for weight, cut in self.parameters if cut == dim] for dim in (0, 1)}
            groups = [{"params": weights, "partition_dim": dim} for dim, weights in cuts.items()]
            data = None if method.averaged_first else self.data_axis
            # Steps after the dense ones, which a long run has few of.
            own = {"dense_steps": 0} if method.optimizer == "stable" else {}
            make = OPTIMIZERS[method.optimizer]
            self.optimizer = make(groups, lr=0.01, group=self.tensor_axis, data_group=data, **own)

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

    def step(self) -> float:
        """One step; returns the seconds of CPU within eigh."""
        with use_threads(self.method.threads), _time_eigh() as within:
            if self.method.averaged_first:
                self._average()
            self.optimizer.step()
        return sum(within)

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


def prepare(axis: Axis, names: list[str], width: int, blocks: int, warm_steps: int) -> None:
    """Make every method's blocks and step them for a while, so that factors have their full rank."""
    _made.clear()
    for name in names:
        if axis.rank < METHODS[name].ranks:
            _made[name] = run = Run(axis, METHODS[name], width, blocks)
            for step in range(warm_steps):
                run.take_gradients(-1 - step)
                run.step()


def sample(axis: Axis, names: list[str], turn: int) -> dict[str, Sample]:
    """One step by each method that has work for this rank."""

    def ready(name: str) -> Case | None:
        if name not in _made:
            return None
        _made[name].take_gradients(turn)
        return _made[name].step

    return measure_each(axis, names, ready, turn)


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
    return {
        name: sum(one.untyped_storage().nbytes() for state in run.optimizer.state.values() for one in state.values())
        for name, run in _made.items()
    }


def _methods() -> Iterator[Method]:
    for size in (2, 4):
        yield Method(f"replicated, tensor {size}", "replicated", tensor=size)
    for name in OPTIMIZERS:
        serial, replicas = f"{name}, serial, ", f"{name}, 2 replicas of tensor 2"
        yield Method(serial + "1 thread", name, threads=1)
        yield Method(serial + "2 threads", name, threads=2)
        for size in (2, 4):
            # Rare roots beside roots at every step, these and the published update beside the replicated algorithm.
            other = {"stable": f"stable, every step, tensor {size}", "exact": f"replicated, tensor {size}"}
            baseline = other.get(name, other["exact"] if name == "stable, every step" else "")
            yield Method(f"{name}, tensor {size}", name, tensor=size, baseline=baseline, serial=serial)
        if name in ("exact", "stable"):
            yield Method(replicas, name, data=2, tensor=2, averaged_first=True)
            yield Method(f"{name}, data 2 x tensor 2", name, data=2, tensor=2, baseline=replicas)


METHODS: dict[str, Method] = {method.name: method for method in _methods()}


def run(
    pool: RankPool, report: Report, repeats: int, warm_steps: int, widths: tuple[int, ...], blocks: int,
    h100_ranks: tuple[int, ...], methods: tuple[str, ...],
) -> None:  # fmt: skip
    """Measure, adding the rows of a width as soon as it is done; then simulate. Ranks without work wait."""
    title = f"one step for {blocks} transformer blocks on up to {pool.size} ranks"
    report.tables["matrix"] = Layout(title, COLUMNS)
    names = [name for name in begins_so(METHODS, methods) if METHODS[name].ranks <= pool.size]
    with report.progress(len(widths) * repeats, "matrix") as advance:
        for width in widths:
            pool.run(prepare, names, width, blocks, warm_steps)
            state = pool.run(inspect)
            sizes = {name: highest_megabytes(rank.get(name) for rank in state) for name in names}
            facts = {name: {"case": f"h {width}", "method": name, "state_megabytes": sizes[name]} for name in names}
            fill_table(report, "matrix", partial(pool.run, sample, names), repeats, advance, facts)
    for count in h100_ranks if pool.reports else ():
        simulate(report, count, methods)


def _eigh(measured: Measured) -> list[list[float]]:
    """[turn][rank]."""
    return [[rank.result for rank in turn] for turn in measured.of()]


def _busiest(seconds: list[list[float]]) -> float | None:
    """Of [turn][rank]: the busiest rank's over the mean, in turns that decompose anything."""
    found = [max(turn) * len(turn) / sum(turn) for turn in seconds if sum(turn)]
    return statistics.median(found) if found else None
