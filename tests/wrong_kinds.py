"""Values of wrong kinds, and every public operation that talks to ranks with right arguments: for `test_wrong_kinds`.

The arguments of an operation are read from its signature, so a new one is tried without an edit here.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

import weft
from weft import optim


class Hostile:
    """Raises whatever it is asked."""

    def _raise(self, *_: object) -> Any:
        raise RuntimeError("asked too much")

    __eq__ = __ne__ = __lt__ = __gt__ = __le__ = __ge__ = __bool__ = __len__ = __iter__ = __index__ = __float__ = _raise
    __int__ = __repr__ = __str__ = __getitem__ = __contains__ = _raise
    __hash__ = None  # type: ignore[assignment]


class HostileText(str):
    """A string that cannot be compared or shown."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("asked too much")

    def __repr__(self) -> str:
        raise RuntimeError("asked too much")

    __hash__ = str.__hash__


class HostileInt(int):
    def __int__(self) -> int:
        raise RuntimeError("asked too much")

    __index__ = __repr__ = __str__ = __int__  # type: ignore[assignment]


class HostileTensor(Tensor):
    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise RuntimeError("no operation on this tensor")


class HostileWrapper(Tensor):
    """Has a shape and a dtype, but no operator works on it."""

    @staticmethod
    def __new__(cls) -> Any:
        return Tensor._make_wrapper_subclass(cls, (1, 4, 2, 2), dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, *_: Any, **__: Any) -> Any:
        raise RuntimeError("no operation on this tensor")


def a_dtensor() -> Tensor:
    """A DTensor over one rank, made without a process group."""
    mesh = DeviceMesh("cpu", torch.arange(1), _init_backend=False, _rank=0)
    local = torch.ones(1, 4, 2, 2)
    spec = DTensorSpec(mesh, (Replicate(),), TensorMeta(local.shape, local.stride(), local.dtype))
    return DTensor(local, spec, requires_grad=False)


VALUES: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "text": lambda: "a",
    "digits": lambda: "64",
    "bytes": lambda: b"a",
    "empty list": list,
    "list": lambda: [1, 2],
    "list of lists": lambda: [[1, 2], [3]],
    "list of texts": lambda: ["a", None],
    "dict": lambda: {"a": 1},
    "half": lambda: 1.5,
    "float": lambda: 64.0,
    "pair of floats": lambda: (1.5, 2),
    "pair with zero": lambda: (0.5, 0.0),
    "pair of booleans": lambda: (True, False),
    "negative pair": lambda: (-2, 0),
    "pair of methods": lambda: ("ulysses", "gather"),
    "mask of another sequence": lambda: weft.Mask.causal(3),
    "nan": lambda: math.nan,
    "infinite": lambda: math.inf,
    "complex": lambda: 1j,
    "huge": lambda: 10**30,
    "negative": lambda: -1,
    "zero": lambda: 0,
    "seven": lambda: 7,
    "true": lambda: True,
    "false": lambda: False,
    "object": object,
    "class": lambda: int,
    "function": lambda: len,
    "iterator": lambda: iter("ab"),
    "array": lambda: np.ones((1, 4, 2, 2), dtype=np.float32),
    "array of integers": lambda: np.arange(3),
    "integer of numpy": lambda: np.int64(2),
    "dtype": lambda: torch.int8,
    "integers": lambda: torch.arange(4),
    "booleans": lambda: torch.ones(1, 4, 2, 2, dtype=torch.bool),
    "number in a tensor": lambda: torch.tensor(0.5),
    "nan in a tensor": lambda: torch.tensor(math.nan),
    "vector": lambda: torch.ones(5),
    "five dimensions": lambda: torch.ones(1, 1, 4, 2, 2),
    "complex tensor": lambda: torch.ones(1, 4, 2, 2, dtype=torch.complex64),
    "float8": lambda: torch.ones(1, 4, 2, 2).to(torch.float8_e4m3fn),
    "sparse": lambda: torch.ones(1, 4, 2, 2).to_sparse(),
    "sparse integers": lambda: torch.ones(4, dtype=torch.int64).to_sparse(),
    "meta": lambda: torch.empty(1, 4, 2, 2, device="meta"),
    "meta integers": lambda: torch.empty(4, dtype=torch.int64, device="meta"),
    "dtensor": a_dtensor,
    "hostile": Hostile,
    "hostile text": lambda: HostileText("auto"),
    "hostile integer": lambda: HostileInt(2),
    "hostile pair": lambda: (Hostile(), Hostile()),
    "hostile tensor": lambda: torch.ones(1, 4, 2, 2).as_subclass(HostileTensor),
    "hostile wrapper": HostileWrapper,
}


Call = Callable[..., Any]


@dataclass(frozen=True)
class Subject:
    """An operation: ``start(axis)`` gives a function that calls it with right arguments, or some of them changed.

    ``signature``: whose arguments are tried. ``talks``: whether other ranks take part, and so hear of a fault.
    ``gathers``: whether in a gather of the call itself, also after the first; if not, they find out when they wait.
    """

    start: Callable[[weft.Axis], Call]
    signature: Callable[..., Any]
    talks: bool = True
    gathers: bool = True
    leave_out: tuple[str, ...] = ("self", "group")

    def arguments(self) -> list[str]:
        return [name for name in inspect.signature(self.signature).parameters if name not in self.leave_out]


def _q(rank: int) -> Tensor:
    return torch.randn(1, 4, 2, 2, generator=torch.Generator().manual_seed(rank))


def _attention(axis: weft.Axis, with_sequence: bool = False) -> Call:
    q = _q(axis.rank)
    where: dict[str, Any] = {"sequence": weft.sequence(4, group=axis)} if with_sequence else {"group": axis}
    return lambda **changes: weft.attention(**{"q": q, "k": q, "v": q, "causal": True, **where, **changes})


def _linear_attention(axis: weft.Axis, with_sequence: bool = False) -> Call:
    q = _q(axis.rank)
    where: dict[str, Any] = {"sequence": weft.sequence(4, group=axis)} if with_sequence else {"group": axis}
    return lambda **changes: weft.linear_attention(**{"q": q, "k": q, "v": q, **where, **changes})[0]


def _delta_rule(axis: weft.Axis, with_sequence: bool = False) -> Call:
    q = _q(axis.rank)
    where: dict[str, Any] = {"sequence": weft.sequence(4, group=axis)} if with_sequence else {"group": axis}
    return lambda **changes: weft.delta_rule(**{"q": q, "k": q, "v": q, "beta": q[..., 0], **where, **changes})[0]


def _mamba2(axis: weft.Axis, with_sequence: bool = False) -> Call:
    x = _q(axis.rank)
    right = {"x": x, "dt": x[..., 0].abs(), "A": -torch.ones(2), "B": x, "C": x}
    where: dict[str, Any] = {"sequence": weft.sequence(4, group=axis)} if with_sequence else {"group": axis}
    return lambda **changes: weft.mamba2(**{**right, **where, **changes})[0]


def _selective_scan(axis: weft.Axis, with_sequence: bool = False) -> Call:
    u = _q(axis.rank).flatten(2)
    right = {"u": u, "delta": u.abs(), "A": -torch.ones(4, 2), "B": u[..., :2], "C": u[..., 2:]}
    where: dict[str, Any] = {"sequence": weft.sequence(4, group=axis)} if with_sequence else {"group": axis}
    return lambda **changes: weft.selective_scan(**{**right, **where, **changes})[0]


def _short_conv(axis: weft.Axis, with_sequence: bool = False) -> Call:
    x = _q(axis.rank).flatten(2)
    where: dict[str, Any] = {"sequence": weft.sequence(4, group=axis)} if with_sequence else {"group": axis}
    return lambda **changes: weft.short_conv(**{"x": x, "weight": torch.ones(4, 3), **where, **changes})[0]


def _exclusive_scan(axis: weft.Axis) -> Call:
    return lambda **changes: weft.exclusive_scan(**{"state": torch.ones(2, 3), "group": axis, **changes})


def _shard(axis: weft.Axis) -> Call:
    return lambda **changes: weft.shard(**{"x": torch.arange(12.0), "dim": 0, "group": axis, **changes})


def _unshard(axis: weft.Axis) -> Call:
    return lambda **changes: weft.unshard(**{"x": _q(axis.rank), "dim": 1, "group": axis, **changes})


def _sequence(axis: weft.Axis) -> Call:
    return lambda **changes: weft.sequence(**{"local_length": 4, "group": axis, **changes}).lengths


def _sequence_by_total(axis: weft.Axis) -> Call:
    return lambda **changes: weft.sequence(**{"total": 14, "group": axis, **changes}).lengths


def _attention_with_a_mask(axis: weft.Axis) -> Call:
    q, mask = _q(axis.rank), weft.Mask.causal(12)
    return lambda **changes: weft.attention(**{"q": q, "k": q, "v": q, "mask": mask, "group": axis, **changes})


def _shard_in_balance(axis: weft.Axis) -> Call:
    right = {"x": torch.arange(12.0), "dim": 0, "layout": "balanced", "cu_seqlens": [0, 5, 12], "group": axis}
    return lambda **changes: weft.shard(**{**right, **changes})


def _sequence_in_balance(axis: weft.Axis) -> Call:
    right = {"total": 14, "layout": "balanced", "chunks_per_rank": 2, "mask": weft.Mask.causal(14), "group": axis}
    return lambda **changes: weft.sequence(**{**right, **changes}).lengths


def _table(axis: weft.Axis, kind: type[weft.ShardedEmbedding] = weft.ShardedEmbedding) -> weft.ShardedEmbedding:
    torch.manual_seed(0)
    return kind(12, 4, group=axis)


def _forward(axis: weft.Axis) -> Call:
    table = _table(axis)
    return lambda **changes: table(**{"ids": torch.tensor([axis.rank, 4]), **changes})


def _forward_after_prefetch(axis: weft.Axis) -> Call:
    table, ids = _table(axis), torch.tensor([axis.rank, 4])

    def call(**changes: Any) -> Tensor:
        if not table._prefetch:
            table.prefetch(ids)
        return table(**{"ids": ids, **changes})

    return call


def _prefetch(axis: weft.Axis) -> Call:
    table, ids = _table(axis), torch.tensor([axis.rank, 4])

    def call(**changes: Any) -> Tensor:
        table.prefetch(**{"ids": ids, **changes})
        return table(ids)

    return call


def _bigram(axis: weft.Axis) -> Call:
    table = _table(axis, weft.BigramHashEmbedding)
    return lambda **changes: table(**{"tokens": torch.tensor([[1, axis.rank, 3]]), **changes})


def _bigram_over_a_context(axis: weft.Axis) -> Call:
    table = _table(axis, weft.BigramHashEmbedding)
    return lambda **changes: table(
        **{"tokens": torch.tensor([[1, axis.rank, 3]]), "context_group": axis.apart("context"), **changes}
    )


def _rows(axis: weft.Axis) -> Call:
    def call(**changes: Any) -> Tensor:
        exchange = weft.RowExchange(
            **{"ids": torch.tensor([axis.rank, 4]), "num_embeddings": 12, "group": axis, **changes}
        )
        exchange.start_ids()
        return exchange.pull([torch.full((4, 2), float(axis.rank))]).wait()[0]

    return call


def _pull(axis: weft.Axis) -> Call:
    def call(**changes: Any) -> Tensor:
        exchange = weft.RowExchange(torch.arange(6), 12, group=axis)
        exchange.start_ids()
        exchange.wait_ids()
        return exchange.pull(**{"shards": [torch.full((4, 2), float(axis.rank))], **changes}).wait()[0]

    return call


def _push(axis: weft.Axis) -> Call:
    def call(**changes: Any) -> Any:
        exchange = weft.RowExchange(torch.arange(6), 12, group=axis)
        exchange.start_ids()
        exchange.wait_ids()
        return exchange.merge(exchange.push(**{"grads": [torch.ones(6, 2)], **changes}).wait())[0][1]

    return call


def _make_table(axis: weft.Axis) -> Call:
    def call(**changes: Any) -> Tensor:
        torch.manual_seed(0)
        arguments = {"num_embeddings": 12, "embedding_dim": 4, "group": axis, **changes}
        return weft.ShardedEmbedding(**arguments).weight.detach()

    return call


def _make_bigram(axis: weft.Axis) -> Call:
    def call(**changes: Any) -> Tensor:
        return weft.BigramHashEmbedding(**{"num_embeddings": 12, "embedding_dim": 4, "group": axis, **changes}).weight

    return call


def _model(axis: weft.Axis) -> nn.Linear:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1.0)
    return model


def _quick(optimizer: Any) -> Any:
    """Without the search for wrappers in the whole memory, which takes a second in a process of tests."""
    for part in getattr(optimizer, "parts", {"": optimizer}).values():
        part._looked_for_wrappers = True
    return optimizer


def _make(kind: type[optim.StepPart], **right: Any) -> Callable[[weft.Axis], Call]:
    def start(axis: weft.Axis) -> Call:
        def call(**changes: Any) -> list[Tensor]:
            model = _model(axis)
            arguments = {"params": list(model.parameters()), "group": axis, **right, **changes}
            _quick(kind(**arguments)).step()
            return [parameter.detach() for parameter in model.parameters()]

        return call

    return start


def _make_row_adam(axis: weft.Axis) -> Call:
    def call(**changes: Any) -> None:
        optim.RowAdam(**{"params": list(_table(axis).parameters()), **changes})

    return call


def _make_part(axis: weft.Axis) -> Call:
    def call(**changes: Any) -> None:
        optim.StepPart(**{"params": list(_model(axis).parameters()), "defaults": {}, **changes})

    return call


def _parts(axis: weft.Axis, model: nn.Linear) -> list[optim.StepPart]:
    return [optim.REKLS([model.weight], lr=0.1, group=axis), optim.ShardedAdamW([model.bias], group=axis)]


def _make_overlapped(axis: weft.Axis) -> Call:
    def call(**changes: Any) -> None:
        optim.OverlappedStep(**{"parts": _parts(axis, _model(axis)), **changes})

    return call


def _step(make: Callable[[weft.Axis, nn.Linear], torch.optim.Optimizer]) -> Callable[[weft.Axis], Call]:
    """A step, with values of its first group changed for this one alone."""

    def start(axis: weft.Axis) -> Call:
        model = _model(axis)
        optimizer = _quick(make(axis, model))

        def call(**changes: Any) -> list[Tensor]:
            group = optimizer.param_groups[0]
            before = {name: group[name] for name in changes}
            group.update(changes)
            try:
                optimizer.step()
            finally:
                group.update(before)
            return [parameter.detach().clone() for parameter in model.parameters()]

        return call

    return start


def _clip(axis: weft.Axis) -> Call:
    table = _table(axis)
    table(torch.tensor([axis.rank, 4])).sum().backward()
    return lambda **changes: weft.clip_grad_norm_(
        **{"parameters": list(table.parameters()), "max_norm": 100.0, **changes}
    )


def _mean_loss(axis: weft.Axis) -> Call:
    return lambda **changes: weft.mean_loss(
        **{"loss_sum": torch.tensor(1.0 + axis.rank), "count": 2, "group": axis, **changes}
    )


def _broadcast(axis: weft.Axis) -> Call:
    def call(**changes: Any) -> list[Tensor]:
        model = _model(axis)
        weft.broadcast_parameters(**{"module_or_parameters": model, "group": axis, **changes})
        return [parameter.detach() for parameter in model.parameters()]

    return call


def _head_strides(axis: weft.Axis) -> Call:
    return lambda **changes: weft.head_strides(**{"kv_heads": 8, "stride": 4, "first": 1, **changes})


def _mask(make: Callable[..., weft.Mask], **right: Any) -> Callable[[weft.Axis], Call]:
    return lambda axis: lambda **changes: make(**{**right, **changes})


OF_THE_OPTIMIZER = (
    "self",
    "params",
    "group",
    "data_group",
    "on_nonfinite",
    "bucket_bytes",
    "clip",
)  # not of its groups

SUBJECTS = {
    "attention": Subject(_attention, weft.attention),
    "attention with a sequence": Subject(lambda axis: _attention(axis, True), weft.attention, gathers=False),
    "attention with a mask": Subject(_attention_with_a_mask, weft.attention),
    "linear_attention": Subject(_linear_attention, weft.linear_attention),
    "linear_attention with a sequence": Subject(
        lambda axis: _linear_attention(axis, True), weft.linear_attention, gathers=False
    ),
    "delta_rule": Subject(_delta_rule, weft.delta_rule),
    "delta_rule with a sequence": Subject(lambda axis: _delta_rule(axis, True), weft.delta_rule, gathers=False),
    "mamba2": Subject(_mamba2, weft.mamba2),
    "mamba2 with a sequence": Subject(lambda axis: _mamba2(axis, True), weft.mamba2, gathers=False),
    "selective_scan": Subject(_selective_scan, weft.selective_scan),
    "selective_scan with a sequence": Subject(
        lambda axis: _selective_scan(axis, True), weft.selective_scan, gathers=False
    ),
    "short_conv": Subject(_short_conv, weft.short_conv),
    "short_conv with a sequence": Subject(lambda axis: _short_conv(axis, True), weft.short_conv, gathers=False),
    "exclusive_scan": Subject(_exclusive_scan, weft.exclusive_scan, gathers=False),
    "shard": Subject(_shard, weft.shard, talks=False),
    "shard in balance": Subject(_shard_in_balance, weft.shard, talks=False),
    "unshard": Subject(_unshard, weft.unshard),
    "sequence": Subject(_sequence, weft.sequence),
    "sequence by total": Subject(_sequence_by_total, weft.sequence),
    "sequence in balance": Subject(_sequence_in_balance, weft.sequence),
    "ShardedEmbedding": Subject(_make_table, weft.ShardedEmbedding, talks=False),
    "ShardedEmbedding.forward": Subject(_forward, weft.ShardedEmbedding.forward),
    "ShardedEmbedding.forward after a prefetch": Subject(_forward_after_prefetch, weft.ShardedEmbedding.forward),
    "ShardedEmbedding.prefetch": Subject(_prefetch, weft.ShardedEmbedding.prefetch),
    "BigramHashEmbedding": Subject(_make_bigram, weft.BigramHashEmbedding, talks=False),
    "BigramHashEmbedding.forward": Subject(
        _bigram, weft.BigramHashEmbedding.forward, leave_out=("self", "context_group")
    ),
    "BigramHashEmbedding.forward over a context": Subject(
        _bigram_over_a_context, weft.BigramHashEmbedding.forward, leave_out=("self", "context_group")
    ),
    "RowExchange": Subject(_rows, weft.RowExchange),
    "RowExchange.pull": Subject(_pull, weft.RowExchange.pull, gathers=False),
    "RowExchange.push": Subject(_push, weft.RowExchange.push, gathers=False),
    "ShardedAdamW": Subject(_make(optim.ShardedAdamW), optim.ShardedAdamW),
    "ShardedAdamW.step": Subject(
        _step(lambda axis, m: optim.ShardedAdamW(m.parameters(), group=axis)), optim.ShardedAdamW,
        leave_out=OF_THE_OPTIMIZER,
    ),
    "REKLS": Subject(
        _make(optim.REKLS, lr=0.1), optim.REKLS, leave_out=("self", "group", "data_group")
    ),
    "REKLS.step": Subject(
        _step(lambda axis, m: optim.REKLS(m.parameters(), lr=0.1, group=axis)), optim.REKLS, leave_out=OF_THE_OPTIMIZER
    ),
    **{
        kind.__name__: Subject(_make(kind, lr=0.1), kind, leave_out=("self", "group", "data_group"))
        for kind in (optim.Muon, optim.NorMuon, optim.SOAP)
    },
    "RowAdam": Subject(_make_row_adam, optim.RowAdam, talks=False),
    "StepPart": Subject(_make_part, optim.StepPart, talks=False),
    "OverlappedStep": Subject(_make_overlapped, optim.OverlappedStep, talks=False),
    "OverlappedStep.step": Subject(
        _step(lambda axis, m: optim.OverlappedStep(_parts(axis, m))), optim.REKLS, leave_out=OF_THE_OPTIMIZER
    ),
    # Other parameters on one rank may be right ones without a table, for which nobody waits.
    "clip_grad_norm_": Subject(_clip, weft.clip_grad_norm_, gathers=False, leave_out=("parameters",)),
    "mean_loss": Subject(_mean_loss, weft.mean_loss),
    "broadcast_parameters": Subject(_broadcast, weft.broadcast_parameters),
    "head_strides": Subject(_head_strides, weft.head_strides, talks=False),
    "Mask": Subject(_mask(weft.Mask, slices=[(0, 4, 0, 4)], total=4), weft.Mask, talks=False),
    "Mask.full": Subject(_mask(weft.Mask.full, documents=4), weft.Mask.full, talks=False),
    "Mask.causal": Subject(_mask(weft.Mask.causal, documents=[0, 4]), weft.Mask.causal, talks=False),
    "Mask.documents": Subject(_mask(weft.Mask.documents, cu_seqlens=[0, 4]), weft.Mask.documents, talks=False),
    "Mask.window": Subject(_mask(weft.Mask.window, left=2, right=0, documents=4), weft.Mask.window, talks=False),
    "Mask.prefix_lm": Subject(_mask(weft.Mask.prefix_lm, prefix=2, documents=4), weft.Mask.prefix_lm, talks=False),
    "Mask.chunks": Subject(_mask(weft.Mask.chunks, length=2, documents=4), weft.Mask.chunks, talks=False),
    "Mask.tree": Subject(_mask(weft.Mask.tree, parents=[-1, 0], lengths=[2, 2]), weft.Mask.tree, talks=False),
}  # fmt: skip


def every_case() -> Iterator[tuple[str, str, str]]:
    """(subject, argument, value) of the whole table."""
    for name, subject in SUBJECTS.items():
        for argument in subject.arguments():
            for value in VALUES:
                yield name, argument, value
