"""The steps that `weft bench step` measures: a small model's parameters, their gradients, and one way to step them."""

from __future__ import annotations

import ctypes
import gc
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from weft.bench.matrix.cases import SHAPES
from weft.bench.timing import Case, Sample, line_up, measure_each, peak_memory
from weft.comm import Axis
from weft.comm.wire import SoloWire
from weft.ops.embedding import BigramHashEmbedding, ShardedEmbedding
from weft.optim import REKLS, OverlappedStep, RowAdam, ShardedAdamW, StepPart
from weft.parallel.mesh import axis_of_ranks, make_zero_adamw, wrap_with_ddp

_LR = 1e-3
_PEAK_STEPS = 3


@dataclass(frozen=True)
class Sizes:
    """The model: blocks of width h, a bigram table of ``rows`` x h, token embeddings of ``vocabulary`` x h."""

    width: int
    blocks: int
    rows: int
    vocabulary: int
    tokens: int  # of a rank in a step


TINY = Sizes(8, 1, 64, 64, 8)  # for a first step that loads what the code needs
Batch = tuple[Tensor, list[Tensor]]  # of a rank in a step: ids of rows, and the gradients of what `Model` returns


@dataclass(frozen=True)
class Method:
    """How the first ``ranks`` ranks step: "sequence" or "overlapped" with weft's parts, "ddp" or "zero".

    ``matrices``: "rekls" or "adamw".
    """

    name: str
    kind: str
    matrices: str
    ranks: int

    @property
    def is_weft(self) -> bool:
        return self.kind not in ("ddp", "zero")


class Model(nn.Module):
    """Parameters only. What is computed between the embeddings and the loss is the same for all and left out."""

    def __init__(self, sizes: Sizes, table: nn.Module) -> None:
        super().__init__()
        make, width = torch.Generator().manual_seed(0), sizes.width

        def draw(*shape: int) -> nn.Parameter:
            return nn.Parameter(0.02 * torch.randn(*shape, generator=make))

        self.table = table
        self.tokens = draw(sizes.vocabulary, width)
        shapes = [(rows * width, columns * width) for rows, columns, _ in SHAPES] * sizes.blocks
        self.matrices = nn.ParameterList(draw(*shape) for shape in shapes)
        self.norms = nn.ParameterList(nn.Parameter(torch.ones(width)) for _ in range(2 * sizes.blocks + 1))

    @property
    def dense(self) -> list[nn.Parameter]:
        return [self.tokens, *self.matrices, *self.norms]

    def forward(self, ids: Tensor) -> list[Tensor]:
        """The rows of ``ids``, and all other parameters, through which their gradients come in."""
        rows = self.table(rows=ids) if isinstance(self.table, ShardedEmbedding) else self.table(ids)
        return [rows, *(parameter.view_as(parameter) for parameter in self.dense)]


def _alone() -> Axis:
    return Axis.over(SoloWire())


class Run:
    """One rank's model and what steps it."""

    def __init__(self, axis: Axis, method: Method, sizes: Sizes) -> None:
        self.axis, self.method, self.sizes = axis, method, sizes
        table: nn.Module
        if method.is_weft:
            table = BigramHashEmbedding(sizes.rows, sizes.width, group=axis)
        else:
            table = nn.Embedding(sizes.rows, sizes.width, _weight=torch.zeros(sizes.rows, sizes.width))
        self.model = Model(sizes, table)
        self.wrapped: nn.Module = self.model if method.is_weft else wrap_with_ddp(axis, self.model)
        self.optimizers: Sequence[torch.optim.Optimizer] = self._optimizers()

    def _optimizers(self) -> Sequence[torch.optim.Optimizer]:
        model, axis, kind = self.model, self.axis, self.method.kind
        options: dict[str, Any] = {"lr": _LR, "weight_decay": 0.0}
        if kind == "ddp":
            return [torch.optim.AdamW(model.parameters(), fused=True, **options)]
        if kind == "zero":
            return [make_zero_adamw(axis, model.parameters(), fused=True, **options)]
        parts: list[StepPart] = [RowAdam(model.table.parameters(), **options)]
        others = model.dense
        if self.method.matrices == "rekls":
            parts.insert(0, REKLS(model.matrices, variant="stable", group=_alone(), data_group=axis, **options))
            others = [model.tokens, *model.norms]
        parts.insert(-1, ShardedAdamW(others, group=axis, **options))
        return parts if kind == "sequence" else [OverlappedStep(parts, overlap_backward=True)]

    def draw(self, step: int) -> Batch:
        """Bigrams of tokens by Zipf's law; gradients that are different on every rank."""
        sizes, make = self.sizes, torch.Generator().manual_seed(1_000_003 * (1 + step) + self.axis.rank)
        drawn = torch.rand(1, sizes.tokens, generator=make, dtype=torch.float64)
        tokens = (sizes.vocabulary**drawn).long() - 1
        ids = BigramHashEmbedding(sizes.rows, 1, group=_alone(), device="meta").rows_of(tokens)
        shapes = [(*ids.shape, sizes.width), *(parameter.shape for parameter in self.model.dense)]
        return ids, [torch.randn(shape, generator=make) for shape in shapes]

    def step(self, batch: Batch) -> None:
        """What is measured: from ids and gradients to new weights and no gradients."""
        ids, grads = batch
        torch.autograd.backward(self.wrapped(ids), grads)
        for optimizer in self.optimizers:
            optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    @torch.no_grad()
    def weights(self) -> list[Tensor]:
        """All of them, of the table those of this rank."""
        table = self.model.table
        if isinstance(table, ShardedEmbedding):
            return [table.table.current(), *self.model.dense]
        return [*table.parameters(), *self.model.dense]


_axes: dict[int, Axis] = {}  # of the first so many ranks: a process group of its own each
_made: dict[str, Run] = {}  # of this rank: what each method steps


def _axis_of(axis: Axis, ranks: int) -> Axis:
    if ranks not in _axes:
        _axes[ranks] = axis if ranks == axis.size else axis_of_ranks(range(ranks))
    return _axes[ranks]


def set_up(axis: Axis) -> None:
    """What is here already, modules above all, need not be looked through whenever a model is given up."""
    gc.freeze()


def measure_peak(axis: Axis, method: Method, sizes: Sizes) -> int | None:
    """Bytes that the resident memory rises at most while the model is made and stepped a few times, nothing else here.

    It is all that a rank needs: weights, gradients, states, messages and what is computed with.
    """
    _made.clear()
    found = None
    if axis.rank < method.ranks:
        _train(_axis_of(axis, method.ranks), method, TINY)
        gc.collect()
        found = peak_memory(lambda: _train(_axis_of(axis, method.ranks), method, sizes))
    line_up(axis)
    return found


def _train(axis: Axis, method: Method, sizes: Sizes) -> None:
    run = Run(axis, method, sizes)
    for step in range(_PEAK_STEPS):
        run.step(run.draw(step))


def prepare(axis: Axis, methods: list[Method], sizes: Sizes, warm_steps: int) -> None:
    """Make every method's model, and step them for a while."""
    _made.clear()
    gc.collect()
    for method in methods:
        if axis.rank < method.ranks:
            _made[method.name] = run = Run(_axis_of(axis, method.ranks), method, sizes)
            for step in range(-warm_steps, 0):
                run.step(run.draw(step))


def sample(axis: Axis, names: list[str], turn: int) -> dict[str, Sample]:
    """One step by each method that has work for this rank."""

    def ready(name: str) -> Case | None:
        run = _made.get(name)
        return None if run is None else partial(run.step, run.draw(turn))

    return measure_each(axis, names, ready, turn)


def digest(axis: Axis) -> dict[str, str]:
    """A hash of each method's weights on this rank, to the bit."""
    found = {}
    for name, run in _made.items():
        hashed = hashlib.sha256()
        for weight in run.weights():
            held = weight.detach().contiguous()
            hashed.update(ctypes.string_at(held.data_ptr(), held.numel() * held.element_size()))
        found[name] = hashed.hexdigest()
    return found
