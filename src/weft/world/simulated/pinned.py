"""Copies between the host and the device, pinned memory, and the host that looks at it too early.

A copy makes the host wait unless ``non_blocking`` is asked for; one to pageable memory waits even then, as on CUDA. A
non-blocking copy to pinned memory **arrives late**: until the host has waited for an event or a stream that comes
after it, the memory holds a poison (NaN, large integers, inverted truth values). So whoever reads too early computes
with numbers that no test takes for right. That was preferred to watching every CPU operator (`WatchHost` can be asked
to): it would slow the CPU's own tests down and not see what NumPy does. What the host *writes* too early is reported:
over a poison when the copy arrives, over a source when the copy is over or the memory is used for the next one.

Private names of torch: ``aten._copy_from``; ``_pin_memory`` and ``is_pinned`` are registered for CPU tensors; factories
of the module torch are wrapped, for without an allocator in C++ they refuse ``pin_memory=True``.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.jit import _builtins
from torch.utils import _device

from weft.world.simulated.memory import (
    DEVICE_TYPE,
    ON_CPU,
    Part,
    access,
    aten,
    below_autograd,
    cpu_alias,
    overlap,
)
from weft.world.simulated.places import Place, describe, place, reports
from weft.world.simulated.streams import Stream, current_rank, current_stream, host_sync

_FACTORIES = ("empty", "zeros", "ones", "full", "empty_like", "zeros_like", "empty_strided", "tensor", "arange")
_KEPT_SOURCES = 256
_pinned: dict[int, Any] = {}  # the address of a pinned storage -> a weak reference to it


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _poison(values: torch.Tensor) -> torch.Tensor:
    if values.dtype is torch.bool:
        return values.logical_not()
    poison = torch.empty_like(values)
    _bytes(poison).fill_(0xFF if values.dtype.is_floating_point or values.dtype.is_complex else 0x7F)
    return poison


class PinnedCopy:
    """A non-blocking copy between pinned ``memory`` and the device that the host has not waited for."""

    writes_host: bool

    def __init__(self, memory: torch.Tensor, held: torch.Tensor, stream: Stream, count: int, where: Place) -> None:
        self.memory, self.held, self.stream, self.count, self.where = memory, held, stream.stream_id, count, where

    def _check(self, what: str) -> None:
        with below_autograd():
            same = torch.equal(_bytes(self.memory), _bytes(self.held))
        if not same:
            where = describe(self.where)
            reports.add(f"pinned memory: the host wrote {what} the non-blocking copy at {where} before it was over")

    def finish(self) -> None:
        """The host has waited for it."""
        raise NotImplementedError


class _ToHost(PinnedCopy):
    writes_host = True

    def __init__(self, memory: torch.Tensor, values: torch.Tensor, stream: Stream, count: int, where: Place) -> None:
        self.values, poison = values, _poison(values)
        memory.copy_(poison)
        super().__init__(memory, poison, stream, count, where)

    def finish(self) -> None:
        try:
            self._check("over the target of")
        finally:
            with below_autograd():
                self.memory.copy_(self.values)


class _FromHost(PinnedCopy):
    writes_host = False

    def finish(self) -> None:
        self._check("over the source of")


def _order_after_earlier(memory: torch.Tensor, writes: bool, stream: Stream, where: Place) -> None:
    """Copies under way over the same bytes: the stream must come after them; then they are over for it."""
    rank, pointer, part = stream.rank, memory.untyped_storage().data_ptr(), Part.of(memory)
    for copy in list(rank.host_copies):
        if not isinstance(copy, PinnedCopy) or copy.memory.untyped_storage().data_ptr() != pointer:
            continue
        if not overlap(Part.of(copy.memory), part) or not (writes or copy.writes_host):
            if not copy.writes_host:
                copy.finish()
            continue
        if stream.clock.get(copy.stream, 0) < copy.count and rank.host.get(copy.stream, 0) < copy.count:
            reports.add(
                f"race: a copy on stream {stream.stream_id} at {describe(where)} uses pinned memory, not ordered after "
                f"stream {copy.stream} used it at {describe(copy.where)}"
            )
        rank.host_copies.remove(copy)
        copy.finish()


def copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """``target.copy_(source)``, where at least one is on the device."""
    stream, where = current_stream(), place()
    from_device, to_device = source.device.type == DEVICE_TYPE, target.device.type == DEVICE_TYPE
    memory = None
    if from_device != to_device and non_blocking and is_pinned(target if from_device else source):
        memory = (target if from_device else source).detach()
        _order_after_earlier(memory, from_device, stream, where)
    with below_autograd():
        inner_source = cpu_alias(source) if from_device else source
        inner_target = cpu_alias(target) if to_device else target
        if memory is None or to_device:
            aten.copy_.default(inner_target, inner_source)
        count = stream.tick()
        if memory is not None:
            held = inner_source.to(target.dtype, copy=True) if from_device else source.clone()
            kind = _ToHost if from_device else _FromHost
            _keep(kind(memory, held.expand(memory.shape), stream, count, where))
    if from_device:
        access(source, False, stream, count, where, "copy")
    if to_device:
        access(target, True, stream, count, where, "copy")
    if (from_device != to_device and not non_blocking) or (from_device and not to_device and memory is None):
        host_sync("copy to host" if from_device else "copy to device")
    return target


def _keep(copy: PinnedCopy) -> None:
    copies = current_rank().host_copies
    copies.append(copy)
    sources = [one for one in copies if isinstance(one, _FromHost)]
    if len(sources) > _KEPT_SOURCES:
        copies.remove(sources[0])
        sources[0].finish()


def is_pinned(tensor: torch.Tensor, device: Any = None) -> bool:
    """Whether its memory was pinned."""
    return tensor.untyped_storage().data_ptr() in _pinned


def pin(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    """A copy in pinned memory."""
    made = torch.empty_like(tensor, memory_format=torch.contiguous_format).copy_(tensor)
    storage = made.untyped_storage()
    if pointer := storage.data_ptr():
        _pinned[pointer] = weakref.ref(storage, lambda _: _pinned.pop(pointer, None))
    return made


def _to_copy(self: torch.Tensor, *, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> torch.Tensor:
    """To the CPU without blocking is to pinned memory, as on CUDA."""
    kwargs.pop("pin_memory", None)
    if not non_blocking or device is None or device.type != "cpu":
        return aten._to_copy.default.redispatch(ON_CPU, self, device=device, non_blocking=non_blocking, **kwargs)
    return pin(aten.empty_like(self, device=device, **kwargs)).copy_(self, non_blocking=True)


def _pinning(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if not kwargs.pop("pin_memory", False):
            return factory(*args, **kwargs)
        needs_gradient = kwargs.pop("requires_grad", False)
        return factory(*args, **kwargs).pin_memory().requires_grad_(needs_gradient)

    return make


def install_pinned(library: Any) -> None:
    """Copies, and pinned memory for CPU tensors."""
    library.impl("_copy_from", copy_from, "PrivateUse1")
    for key in ("Conjugate", "Negative"):  # otherwise it would call itself for ever
        library.impl("_copy_from", torch.library.fallthrough_kernel, key)
    library.impl("_to_copy", _to_copy, "PrivateUse1")
    library.impl("_pin_memory", pin, "CPU")
    library.impl("is_pinned", is_pinned, "CPU")
    _device._device_constructors()  # keeps the factories by identity: before they are wrapped
    for name in _FACTORIES:
        pinning = _pinning(getattr(torch, name))
        _builtins._register_builtin(pinning, f"aten::{name}")  # torch.jit knows factories by identity too
        setattr(torch, name, pinning)
