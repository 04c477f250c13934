"""How an operator of the simulated device runs: on CPU tensors over the same memory, below autograd.

One fallback takes every operator that has no kernel of its own. What an operator reads and writes stands in its schema.
Operators after which CUDA makes the host wait are counted here (`HOST_SYNCS`). ``torch.linalg.qr`` and the ``_ex``
functions are not among them: neither reads anything back, unless ``check_errors`` asks for it.

Private names of torch: the boxed fallback of `torch.library`, ``redispatch`` of operators,
``_dispatch_get_all_op_names``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from weft.world.simulated.memory import (
    DEVICE_TYPE,
    HOST,
    ON_CPU,
    access,
    allocate,
    aten,
    below_autograd,
    cpu_alias,
    device_tensor,
    record_stream,
    set_tensor,
)
from weft.world.simulated.places import place
from weft.world.simulated.streams import current_stream, host_sync

_C: Any = torch._C
ON_SPARSE_CPU = _C.DispatchKeySet(_C.DispatchKey.SparseCPU)
_sparse_of_parts = aten._sparse_coo_tensor_with_dims_and_tensors.default
_PLAIN = {int, float, bool, str, complex, type(None), torch.dtype, torch.layout, torch.memory_format}

HOST_SYNCS = {
    "_local_scalar_dense": "item", "equal": "equal",
    "nonzero": "nonzero", "masked_select": "masked_select", "_to_sparse": "nonzero", "_coalesce": "coalesce",
    "_unique": "unique", "_unique2": "unique", "unique_dim": "unique", "unique_consecutive": "unique",
    "unique_dim_consecutive": "unique", "bincount": "bincount", "histc": "histc", "multinomial": "multinomial",
    "_linalg_eigh": "eigh", "_linalg_svd": "svd", "linalg_eig": "eig", "_linalg_eigvals": "eig",
    "linalg_lstsq": "lstsq",
}  # fmt: skip
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}  # indices may be on the CPU

Kernel = Callable[..., Any]
emulated: dict[Any, Kernel] = {}  # what a CPU has no kernel for, as functions of CPU tensors
own_kernels: dict[Any, Kernel] = {}  # operators that take tensors of the device as they are


class Operator:
    """What is known of an operator. Of each argument: r(ead), w(ritten) or v(iewed); then i(ndices) or t(ensor).

    For a "t" a number may come, where Python wrapped one.
    """

    __slots__ = ("by_name", "by_place", "indexes", "kernel", "name", "own", "sync")

    def __init__(self, op: Any) -> None:
        self.name = op._schema.name.removeprefix("aten::")
        self.indexes = self.name in _INDEXING
        only_shape = self.name.startswith(("new_", "empty")) or self.name.endswith("_like")
        self.by_place = []
        for at, argument in enumerate(op._schema.arguments):
            alias = argument.alias_info
            kind = "v" if only_shape else "r" if alias is None else "w" if alias.is_write else "v"
            if at == 1 and self.indexes:
                kind += "i"
            elif kind == "r" and str(argument.type) == "Tensor":
                kind += "t"
            self.by_place.append(kind)
        self.by_name = {a.name: kind for a, kind in zip(op._schema.arguments, self.by_place, strict=True)}
        self.sync, self.kernel, self.own = HOST_SYNCS.get(self.name), emulated.get(op, op), own_kernels.get(op)

    def sync_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """What makes the host wait in this call, if anything does."""
        if self.sync is not None:
            return self.sync
        if self.name == "repeat_interleave":
            return "repeat_interleave" if kwargs.get("output_size") is None else None
        if kwargs.get("check_errors"):
            return self.name
        return _sync_of_indices(args) if self.indexes else None


def _sync_of_indices(args: tuple[Any, ...]) -> str | None:
    """A mask becomes indices, unless one value is written where one mask is true; CPU indices are copied."""
    given = [index for index in args[1] if index is not None]
    masks = [index for index in given if index.dtype in (torch.bool, torch.uint8)]
    accumulate = len(args) > 3 and args[3]
    if masks and not (len(args) > 2 and len(given) == 1 and args[2].numel() == 1 and not accumulate):
        return "nonzero"
    return "copy to device" if any(index.device.type == "cpu" for index in given) else None


class _Launch:
    """One call on its way to the CPU. (Without closures: they would be cycles, and keep memory alive.)"""

    __slots__ = ("mixed", "number", "owners", "reads", "same", "stream", "where", "writes")

    def __init__(self) -> None:
        self.stream, self.where = current_stream(), place()
        self.same: dict[int, tuple[Any, Any]] = {}  # the id of a CPU tensor -> itself, and the tensor of the device
        self.owners: dict[int, Any] = {}  # the address of a storage -> a tensor of the device over it
        self.reads: list[Any] = []
        self.writes: list[tuple[Any, Any]] = []
        self.mixed: Any = None
        self.number = False

    def to_cpu(self, value: Any, kind: str) -> Any:
        """An argument as the CPU's kernel takes it."""
        type_ = type(value)
        if type_ in _PLAIN:
            if value is not None and kind == "rt":
                self.number = True
            return value
        if type_ is list or type_ is tuple:
            return [self.to_cpu(one, kind) for one in value]
        if isinstance(value, torch.Tensor):
            if value.device.type != DEVICE_TYPE:
                if value.device.type == "cpu" and value.ndim and kind[1:] != "i":
                    self.mixed = value
                return value
            inner = self._sparse_to_cpu(value) if value.layout is torch.sparse_coo else self._dense_to_cpu(value, kind)
            self.same[id(inner)] = (inner, value)
            return inner
        if type_ is torch.Generator and value.device.type != DEVICE_TYPE:
            raise RuntimeError(f"Expected a '{DEVICE_TYPE}' device type for generator but found '{value.device.type}'")
        return HOST if type_ is torch.device else value

    def _dense_to_cpu(self, value: torch.Tensor, kind: str) -> torch.Tensor:
        inner = cpu_alias(value)
        if pointer := value.untyped_storage().data_ptr():
            self.owners[pointer] = value
        if kind == "w":
            self.writes.append((value, inner))
        elif kind[0] == "r":
            self.reads.append(value)
        return inner

    def _sparse_to_cpu(self, value: torch.Tensor) -> torch.Tensor:
        indices, values = (
            self.to_cpu(part.default.redispatch(ON_SPARSE_CPU, value), "r") for part in (aten._indices, aten._values)
        )
        coalesced = aten.is_coalesced.default.redispatch(ON_SPARSE_CPU, value)
        return _make_sparse(value, indices, values, HOST, coalesced)

    def to_device(self, value: Any) -> Any:
        """A result as the caller sees it: an argument, a view of one, or new."""
        if not isinstance(value, torch.Tensor):
            return type(value)([self.to_device(one) for one in value]) if isinstance(value, list | tuple) else value
        if (same := self.same.get(id(value))) is not None:
            return same[1]
        if value.layout is torch.sparse_coo:
            indices, values = self.to_device(value._indices()), self.to_device(value._values())
            return _make_sparse(value, indices, values, torch.device(DEVICE_TYPE, 0), value.is_coalesced())
        storage = value.untyped_storage()
        owner = self.owners.get(storage.data_ptr())
        if owner is not None:
            return device_tensor(owner.untyped_storage(), value)
        return device_tensor(allocate(storage, self.stream, self.where), value)

    def note_accesses(self, name: str) -> None:
        """The operator has run: it is the next on its stream. What was written may have another size now."""
        count = self.stream.tick()
        for tensor in self.reads:
            access(tensor, False, self.stream, count, self.where, name)
        for tensor, inner in self.writes:
            if inner.shape != tensor.shape or inner.stride() != tensor.stride():
                new, old = inner.untyped_storage(), tensor.untyped_storage()
                moved = new.data_ptr() != old.data_ptr()
                set_tensor(tensor, allocate(new, self.stream, self.where) if moved else old, inner)
            access(tensor, True, self.stream, count, self.where, name)


def _make_sparse(like: Any, indices: Any, values: Any, device: torch.device, coalesced: bool) -> Any:
    return _sparse_of_parts.redispatch(
        ON_SPARSE_CPU, len(indices), values.ndim - 1, like.shape, indices, values, dtype=like.dtype, layout=like.layout,
        device=device, is_coalesced=coalesced,
    )  # fmt: skip


_operators: dict[Any, Operator] = {}


def operator_of(op: Any) -> Operator:
    """What is known of it, worked out once."""
    known = _operators.get(op)
    if known is None:
        known = _operators[op] = Operator(op)
    return known


def run_operator(op: Any, *args: Any, **kwargs: Any) -> Any:
    """The fallback: any operator, on tensors of the device."""
    known = operator_of(op)
    if known.own is not None:
        return known.own(*args, **kwargs)
    launch = _Launch()
    with below_autograd():
        inner_args = [launch.to_cpu(value, kind) for value, kind in zip(args, known.by_place, strict=False)]
        inner_kwargs = {name: launch.to_cpu(value, known.by_name[name]) for name, value in kwargs.items()}
        if launch.mixed is not None and launch.same:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {DEVICE_TYPE}:0 and "
                f"cpu! ({op}, a tensor of sizes {list(launch.mixed.shape)} is on the CPU)"
            )
        # A number that stands for a tensor comes as a number: then the overload for numbers is wanted.
        kernel = op.overloadpacket if launch.number and known.kernel is op else known.kernel
        result = kernel(*inner_args, **inner_kwargs)
    launch.note_accesses(known.name)
    if (sync := known.sync_of(args, kwargs)) is not None:
        host_sync(sync)
    return launch.to_device(result)


def _allocating(op: Any) -> Kernel:
    def make(*args: Any, dtype: Any = None, memory_format: Any = None, **_: Any) -> torch.Tensor:
        more = {} if memory_format is None else {"memory_format": memory_format}
        inner = op.redispatch(ON_CPU, *args, dtype=dtype, **more)
        return device_tensor(allocate(inner.untyped_storage(), current_stream(), place()), inner)

    return make


def _only_sizes(op: Any) -> Kernel:
    return lambda *args, **kwargs: op.redispatch(ON_CPU, *args, **kwargs)


def _resize(tensor: torch.Tensor, size: Any, *, memory_format: Any = None) -> torch.Tensor:
    """Beyond the memory it has, a tensor gets new memory; other views of the old do not follow."""
    if math.prod(size) * tensor.element_size() <= tensor.untyped_storage().nbytes():
        return aten.resize_.default.redispatch(ON_CPU, tensor, size, memory_format=memory_format)
    stream, where = current_stream(), place()
    inner = aten.empty.memory_format.redispatch(ON_CPU, size, dtype=tensor.dtype)
    with below_autograd():
        inner.view(-1)[: tensor.numel()] = cpu_alias(tensor).reshape(-1)
    access(tensor, False, stream, stream.tick(), where, "resize_")
    return set_tensor(tensor, allocate(inner.untyped_storage(), stream, where), inner)


def _makes_or_changes(op: Any) -> bool:
    """Functional, or in place: not a view, and without ``out=``."""
    aliased = any(a.alias_info is not None for a in (*op._schema.arguments, *op._schema.returns))
    return not aliased or op.overloadpacket.__name__.endswith("_")


def overload(name: str) -> Any:
    """The operator ``name`` or ``name.overload`` of ATen."""
    packet, _, which = name.partition(".")
    return getattr(getattr(aten, packet), which or "default")


def cpu_operators(key: str) -> Iterator[Any]:
    """The operators of ATen that have a kernel of their own for a dispatch key."""
    for full_name in _C._dispatch_get_all_op_names():
        if full_name.startswith("aten::") and _C._dispatch_has_kernel_for_dispatch_key(full_name, key):
            yield overload(full_name.removeprefix("aten::"))


def install_operators(library: Any, everything: Any) -> None:
    """Kernels of its own for what allocates or only looks at sizes; the fallback for everything else.

    For many operators torch has a composite kernel, which goes before a fallback: it allocates the result and calls the
    operator with ``out=``. Those are given the fallback by name, so that they are one operator, as on CUDA.
    """
    for op in (aten.empty.memory_format, aten.empty_strided.default):
        own_kernels[op] = _allocating(op)
    own_kernels[aten.resize_.default] = _resize
    own_kernels[aten.record_stream.default] = record_stream
    views = [aten.as_strided.default, aten.view.default, aten._reshape_alias.default, aten.unfold.default]
    for op in (*views, *(getattr(aten.set_, name) for name in aten.set_.overloads())):
        own_kernels[op] = _only_sizes(op)
    for op in cpu_operators("CompositeExplicitAutogradNonFunctional"):
        if _makes_or_changes(op) and _C._dispatch_has_kernel_for_dispatch_key(op.name(), "CPU"):
            library.impl(op, functools.partial(run_operator, op), "PrivateUse1")
    everything.fallback(run_operator, "PrivateUse1")
