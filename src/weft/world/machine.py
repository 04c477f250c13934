"""A simulated machine: the few numbers it is made of, and what local operators cost on it in virtual time.

Meta tensors are not worked out a thousand times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode


@dataclass(frozen=True)
class Machine:
    """What a message and a local operator cost in a virtual world.

    latency: seconds a message is on its way, whatever its size (a delay, not an occupation of the link).
    bandwidth: bytes/s at which a sender's link is taken; messages of one rank leave one after the other.
    flops: FLOP/s of local matrix products. memory_bandwidth: bytes/s read and written by local operators.
    An operator takes the longer of its two costs. inf means free.

    >>> Machine(latency=5e-6, bandwidth=25e9).message_seconds(25_000)
    1e-06
    """

    latency: float
    bandwidth: float
    flops: float = math.inf
    memory_bandwidth: float = math.inf

    def __post_init__(self) -> None:
        if not 0 <= self.latency < math.inf:
            raise ValueError(f"Machine: latency must be a finite number of seconds >= 0, got {self.latency}")
        for name in ("bandwidth", "flops", "memory_bandwidth"):
            if not getattr(self, name) > 0:
                raise ValueError(f"Machine: {name} must be > 0 a second (inf = free), got {getattr(self, name)}")

    def message_seconds(self, size: int) -> float:
        """How long a message of ``size`` bytes takes the sender's link."""
        return size / self.bandwidth

    def operator_seconds(self, flops: float, size: int) -> float:
        """How long a local operator of ``flops`` that touches ``size`` bytes takes."""
        return max(flops / self.flops, size / self.memory_bandwidth)

    @property
    def counts_operators(self) -> bool:
        return self.flops < math.inf or self.memory_bandwidth < math.inf


# One GPU of a cluster, by what its vendor says: dense tf32 products, which is what weft's Triton kernels take, memory
# bandwidth, and a network link of its own (200, 400 and 400 Gbit/s) with 10 us of delay.
PRESETS = {
    "a100": Machine(latency=10e-6, bandwidth=25e9, flops=156e12, memory_bandwidth=2.0e12),
    "h100": Machine(latency=10e-6, bandwidth=50e9, flops=495e12, memory_bandwidth=3.35e12),
    "b200": Machine(latency=10e-6, bandwidth=50e9, flops=1100e12, memory_bandwidth=8.0e12),
}

_aten = torch.ops.aten
_READ = _aten._local_scalar_dense.default


def _attention_flops(products: int, queries: int, keys: int, is_causal: int) -> Any:
    """FLOPs of a flash operator with so many products of [B, h, n, D] and [B, w, m, D]; a causal square costs half."""

    def count(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        batch, heads, rows, dim = args[queries].shape
        causal = len(args) > is_causal and bool(args[is_causal])
        columns = args[keys].shape[2]
        return products * 2 * batch * heads * rows * ((columns + 1) // 2 if causal else columns) * dim

    return count


def _flash_flops(products: int, first: int, lengths: int) -> Any:
    """FLOPs of a device's flash operator; its queries are argument ``first``, then keys and values; ``lengths`` is the
    first of: cumulative lengths of queries and keys (or None), largest lengths, dropout, whether it is causal."""

    def count(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        q, k, (ends, key_ends, *_, causal) = args[first], args[first + 1], args[lengths : lengths + 6]
        left, right = (kwargs.get(f"window_size_{side}", -1) for side in ("left", "right"))
        if ends is None:
            sizes = [(q.shape[1], k.shape[1])] * q.shape[0]
        else:
            sizes = list(zip(ends.diff().tolist(), key_ends.diff().tolist(), strict=True))
        pairs = sum(_seen_pairs(*size, left, 0 if causal else right) for size in sizes)
        return products * 2 * pairs * q.shape[-2] * q.shape[-1]

    return count


def _seen_pairs(queries: int, keys: int, left: int, right: int) -> int:
    """Pairs within ``left`` before and ``right`` after the diagonal that ends in the last ones; -1: without end."""

    def before(ends: int) -> int:
        inside = min(max(ends, 0), keys)
        return inside * (inside + 1) // 2 + max(ends - keys, 0) * keys

    def up_to(side: int) -> int:
        return before(keys + side) - before(keys + side - queries)

    return (queries * keys if right < 0 else up_to(right)) - (0 if left < 0 else up_to(-left - 1))


def _eigh_flops(matrix: Any, uplo: str = "L", compute_v: bool = True, out_val: Any = None) -> int:
    """FLOPs of an eigendecomposition: 4/3 n^3 to a tridiagonal matrix, and with vectors about 9 n^3 in all."""
    n = matrix.shape[-1]
    return int(matrix.numel() * n * (9 if compute_v else 4 / 3))


# FLOPs of operators that torch's own registry lacks, or counts without masks: attention, and eigh.
_FORMULAS = {
    _aten._flash_attention_forward: _flash_flops(2, 0, 3),
    _aten._flash_attention_backward: _flash_flops(5, 1, 6),
    _aten._linalg_eigh: _eigh_flops,
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops(2, 0, 1, 4),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_flops(5, 1, 2, 7),
}

_MADE_LIKE = ("zeros_like", "ones_like", "full_like")  # what they are made like is not read

# An operator on meta tensors: the seconds it costs, and its outputs as (shape, stride, dtype); None where it
# writes into an argument and its outputs are that argument.
_Known = tuple[float, list[tuple[Any, ...]] | None]


class CostMode(TorchDispatchMode):
    """Calls ``spend(name, seconds)`` for every operator: the longer of its FLOPs and its memory traffic.

    What the host reads of a meta tensor is 1, or True: a program takes the way of ordinary values.

    Working out a meta operator takes torch some 200 microseconds and every rank repeats the same ones, so
    their outcomes are kept in ``known``, which the ranks of a world share.
    """

    def __init__(self, machine: Machine, spend: Callable[[str, float], None], known: dict[Any, _Known]) -> None:
        super().__init__()
        self._machine, self._spend, self._known = machine, spend, known

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch's default wraps every dispatch and imports the compiler for it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _READ and args[0].is_meta:
            return args[0].dtype == torch.bool or 1
        if not _touches_memory(func):
            return func(*args, **kwargs)
        key = (func, _describe(args), _describe(tuple(kwargs.items()))) if _on_meta(args) else None
        if key in self._known:
            seconds, outputs = self._known[key]
            out = _written(func, args, kwargs) if outputs is None else _rebuild(outputs)
        else:
            out = func(*args, **kwargs)
            seconds = self._cost(func, args, kwargs, out)
            if key is not None:
                self._remember(key, func, seconds, out)
        if seconds > 0:
            self._spend(func._overloadpacket.__name__, seconds)
        return out

    def _cost(self, func: Any, args: Any, kwargs: Any, out: Any) -> float:
        from torch.utils.flop_counter import flop_registry  # imports triton where that is installed

        count = _FORMULAS.get(func._overloadpacket) or flop_registry.get(func._overloadpacket)
        flops = count(*args, **kwargs, out_val=out) if count else 0
        read = () if func._overloadpacket.__name__.startswith(("new_", *_MADE_LIKE)) else (args, tuple(kwargs.values()))
        touched = sum(t.numel() * t.element_size() for t in _tensors((read, out)))
        return self._machine.operator_seconds(flops, touched)

    def _remember(self, key: Any, func: Any, seconds: float, out: Any) -> None:
        if _writes(func):
            if len(func._schema.returns) == 1:
                self._known[key] = seconds, None
            return
        outputs = list(out) if isinstance(out, tuple | list) else [out]
        if all(isinstance(t, torch.Tensor) and t.is_meta for t in outputs) and isinstance(out, torch.Tensor | tuple):
            self._known[key] = seconds, [(t.shape, t.stride(), t.dtype) for t in outputs]


@contextmanager
def counting(machine: Machine, spend: Callable[[str, float], None], known: dict[Any, _Known]) -> Iterator[None]:
    """Count this thread's operators. Not by ``with CostMode()``, whose process-wide flags ranks would mix up."""
    if not machine.counts_operators:
        with FreeOperators():
            yield
        return
    _push_mode(CostMode(machine, spend, known))
    try:
        yield
    finally:
        _pop_mode()


class FreeOperators(TorchFunctionMode):
    """For a machine whose operators cost nothing: passes over those on meta tensors that torch takes 200 us to do."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs and isinstance(out := kwargs.get("out"), torch.Tensor) and out.is_meta:
            return out
        if func in _ELEMENTWISE and args[0].is_meta:
            return torch.empty(args[0].shape, dtype=args[0].dtype, device="meta")
        return func(*args, **(kwargs or {}))


_ELEMENTWISE = {torch.exp, torch.Tensor.exp, torch.neg, torch.Tensor.neg}
_memory: dict[Any, bool] = {}


def _touches_memory(func: Any) -> bool:
    """False for views (an alias that is not written) and for bare allocations."""
    if func not in _memory:
        returns = func._schema.returns
        is_view = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        bare = func._overloadpacket.__name__.startswith(("empty", "new_empty", "detach"))
        _memory[func] = not is_view and not bare
    return _memory[func]


def _writes(func: Any) -> bool:
    return any(argument.alias_info is not None and argument.alias_info.is_write for argument in func._schema.arguments)


def _written(func: Any, args: Any, kwargs: Any) -> Any:
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            return kwargs[argument.name] if argument.name in kwargs else args[position]
    raise AssertionError(f"{func} writes nothing")


def _rebuild(outputs: list[tuple[Any, ...]]) -> Any:
    built = [torch.empty_strided(shape, stride, dtype=dtype, device="meta") for shape, stride, dtype in outputs]
    return built[0] if len(built) == 1 else tuple(built)


def _on_meta(args: Any) -> bool:
    found = False
    for tensor in _tensors(args):
        if not tensor.is_meta:
            return False
        found = True
    return found


def _describe(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.shape, tree.stride(), tree.dtype
    if isinstance(tree, tuple | list):
        return tuple(_describe(branch) for branch in tree)
    return tree


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, tuple | list):
        for branch in tree:
            yield from _tensors(branch)
