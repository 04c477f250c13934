"""Memory of the simulated device: who allocated it, who uses which bytes on which stream, when it is handed out again.

A tensor of the device is a real PrivateUse1 tensor whose storage lies over the memory of a CPU storage. Of each storage
a `Block` is kept until torch gives the storage back. As CUDA's caching allocator does it, freed memory can go to the
next allocation on the *same* stream at once; so whoever used it on another stream must be ordered before that, or have
been named by ``record_stream``.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from weft.world.simulated.clocks import Freed, clock_of
from weft.world.simulated.places import Place, describe, reports
from weft.world.simulated.streams import Rank, Stream

_C: Any = torch._C  # private: _construct_storage_from_data_pointer, _acc.create_empty_tensor, DispatchKeySet, guards
aten: Any = torch.ops.aten
DEVICE_TYPE = "sim"
HOST = torch.device("cpu")
ON_CPU = _C.DispatchKeySet(_C.DispatchKey.CPU)
_set_storage = aten.set_.source_Storage_storage_offset
_lock = threading.RLock()


class Part(NamedTuple):
    """The bytes of a storage that a tensor covers."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    itemsize: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Part:
        return cls(int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride(), tensor.element_size())

    @property
    def end(self) -> int:
        last = self.offset + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        return (last + 1) * self.itemsize


def overlap(a: Part, b: Part) -> bool:
    """Whether they share a byte: exactly, for columns of one matrix lie within one another."""
    if a == b:
        return True
    if a.end <= b.offset * b.itemsize or b.end <= a.offset * a.itemsize:
        return False
    with below_autograd():
        marks = torch.zeros(max(a.end, b.end), dtype=torch.uint8, device=HOST)
        for value, part in enumerate((a, b), 1):
            shape = [size if stride else 1 for size, stride in zip(part.shape, part.stride, strict=True)]
            for byte in range(part.itemsize):
                strides = [stride * part.itemsize for stride in part.stride]
                torch.as_strided(marks, shape, strides, part.offset * part.itemsize + byte).bitwise_or_(value)
        return bool((marks == 3).any())


class Block:
    """The memory of one storage: the CPU storage under it, where it was allocated, and who has used it since."""

    __slots__ = ("allocated", "bases", "cpu", "gone", "nbytes", "recorded", "stream", "used")

    def __init__(self, cpu: Any, stream: Stream, where: Place) -> None:
        self.cpu, self.stream, self.allocated, self.nbytes = cpu, stream, where, cpu.nbytes()
        self.recorded: set[int] = set()
        self.bases: dict[torch.dtype, torch.Tensor] = {}
        self.gone: Any = None
        whole = Part(0, (self.nbytes,), (1,), 1)  # handed out: what the stream had before may still write it
        self.used: dict[int, dict[tuple[bool, Part], tuple[int, Place]]] = {
            stream.stream_id: {(True, whole): (stream.count, where)}
        }


_blocks: dict[int, Block] = {}  # by the address of the memory


@contextmanager
def below_autograd() -> Iterator[None]:
    """Operators within it run as torch's own kernels call them: no autograd, no overrides."""
    with _C._AutoDispatchBelowAutograd(), _C.DisableTorchFunction():
        yield


def allocate(cpu_storage: Any, stream: Stream, where: Place) -> Any:
    """A storage of the device over the memory of a CPU storage."""
    pointer = cpu_storage.data_ptr()
    made = _C._construct_storage_from_data_pointer(pointer, torch.device(DEVICE_TYPE, 0), cpu_storage.nbytes())
    if pointer:
        with _lock:
            _hand_out(stream, where)
            block = _blocks[pointer] = Block(cpu_storage, stream, where)
            block.gone = weakref.ref(made, lambda _: _free(pointer))  # lives as long as torch's storage does
    return made


def _hand_out(stream: Stream, where: Place) -> None:
    """Any memory that was freed on the stream may be what is handed out now."""
    rank = stream.rank
    for freed in rank.freed.pop(stream.stream_id, ()):
        if max(stream.clock.get(freed.stream, 0), rank.host.get(freed.stream, 0)) < freed.number:
            reports.add(
                f"freed too early: memory allocated on stream {stream.stream_id} at {describe(freed.allocated)} was "
                f"freed and may be handed out again at {describe(where)}, while stream {freed.stream} may still use it "
                f"at {describe(freed.used)}; record_stream, or an order of the streams, is missing"
            )


def _free(pointer: int) -> None:
    with _lock:
        block = _blocks.pop(pointer, None)
        if block is None:
            return
        home, waited_for = block.stream, clock_of(block.recorded)
        for stream, uses in block.used.items():
            count, where = max(uses.values(), key=lambda use: use[0])
            if stream != home.stream_id and waited_for.get(stream, 0) < count:
                home.rank.freed[home.stream_id].append(Freed(block.allocated, stream, count, where))


def record_stream(tensor: torch.Tensor, stream: torch.Stream) -> None:
    """When the memory is freed, it waits for what ``stream`` was given until then, and so for what that came after."""
    if (block := _blocks.get(tensor.untyped_storage().data_ptr())) is not None:
        block.recorded.add(stream.stream_id)


def access(tensor: torch.Tensor, write: bool, stream: Stream, count: int, where: Place, name: str) -> None:
    """Operator number ``count`` of ``stream`` reads or writes ``tensor``: whoever conflicts must come before."""
    block = _blocks.get(tensor.untyped_storage().data_ptr())
    if block is None or not tensor.numel():
        return
    part, mine = Part.of(tensor), stream.stream_id
    with _lock:
        if len(block.used) > 1 or mine not in block.used:
            for other, uses in block.used.items():
                known = stream.clock.get(other, 0)
                for (wrote, used), (number, before) in () if other == mine else uses.items():
                    if number > known and (wrote or write) and overlap(used, part):
                        reports.add(
                            f"race: {name} {'writes' if write else 'reads'} {list(tensor.shape)} on stream {mine} at "
                            f"{describe(where)}, not ordered after stream {other} {'wrote' if wrote else 'read'} it at "
                            f"{describe(before)}; allocated at {describe(block.allocated)}"
                        )
        if write and tensor.numel() * part.itemsize == block.nbytes:
            block.used = {}  # whoever is ordered after this is ordered after those
        block.used.setdefault(mine, {})[write, part] = (count, where)


def memory_allocated(rank: Rank) -> int:
    """Bytes of the storages of a rank that are alive."""
    with _lock:
        return sum(block.nbytes for block in _blocks.values() if block.stream.rank is rank)


def cpu_alias(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the same memory, for kernels: call it `below_autograd`."""
    pointer, dtype = tensor.untyped_storage().data_ptr(), tensor.dtype
    if not pointer:
        return aten.empty_strided.default.redispatch(ON_CPU, tensor.shape, tensor.stride(), dtype=dtype)
    block = _blocks[pointer]
    if (base := block.bases.get(dtype)) is None:
        empty = aten.empty.memory_format.redispatch(ON_CPU, [0], dtype=dtype)
        items = block.nbytes // dtype.itemsize
        base = block.bases[dtype] = _set_storage.redispatch(ON_CPU, empty, block.cpu, 0, (items,), (1,))
    made = base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    if tensor.is_conj() or tensor.is_neg():
        _C._set_conj(made, tensor.is_conj())
        _C._set_neg(made, tensor.is_neg())
    return made


def host_alias(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the memory of a tensor of the device; no access is noted. To move the bytes of messages."""
    with below_autograd():
        return cpu_alias(tensor.detach())


def device_tensor(storage: Any, like: torch.Tensor) -> torch.Tensor:
    """A tensor over a storage of the device, with the dtype, sizes and strides of ``like``."""
    made = _C._acc.create_empty_tensor((0,), like.dtype)
    return _set_storage.redispatch(ON_CPU, made, storage, like.storage_offset(), like.shape, like.stride())


def set_tensor(tensor: torch.Tensor, storage: Any, like: torch.Tensor) -> torch.Tensor:
    """``tensor`` itself over ``storage``, with the sizes and strides of ``like``."""
    return _set_storage.redispatch(ON_CPU, tensor, storage, like.storage_offset(), like.shape, like.stride())
