"""Devices that run behind the host: lanes on side streams, memory that two streams use, copies between host and device.

The host only queues work on such a device. What it frees goes back to the allocator at once, and may be handed out
again to the stream that it came from while another stream still uses it. So a `Transfer` owns the memory that a lane
uses until whoever waits for it has been ordered after the lane.

CUDA, ROCm, XPU and the simulated device take the same lines, by ``torch.get_device_module``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from weft.comm.wire import Pending, without_gradients

T = TypeVar("T")


def runs_behind(device: torch.device) -> bool:
    """Whether the host only queues work there.

    >>> runs_behind(torch.device("cpu")), runs_behind(torch.device("meta"))
    (False, False)
    """
    return device.type not in ("cpu", "meta")


def own_device() -> torch.device:
    """The accelerator of this process, with its number, or the CPU where there is none."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return torch.device("cpu")
    return torch.device(kind.type, torch.get_device_module(kind).current_device())


def choose_device(name: str = "auto", number: int = 0, ranks: int = 1) -> torch.device:
    """What this process is to compute on, made its current device: "cpu", a kind of accelerator or one by number.

    "auto": an accelerator, if this machine has one for each of its ``ranks``, else the CPU. A kind alone ("auto",
    "cuda") means the one with ``number``. A simulated one has to be named.
    """
    kind = torch.accelerator.current_accelerator(check_available=True)
    if name == "auto":
        has_enough = kind is not None and kind.type != "sim" and ranks <= torch.accelerator.device_count()
        device = torch.device(kind.type if has_enough and kind is not None else "cpu")
    else:
        try:
            device = torch.device(name)
        except RuntimeError:
            raise ValueError(f"--device {name!r} is no device of this torch; give auto, cpu, cuda or cuda:0") from None
    if not runs_behind(device):
        return device
    if kind is None or kind.type != device.type:
        raise ValueError(f"--device {name}: there is none here, only {'cpu' if kind is None else f'cpu and {kind}'}")
    module = torch.get_device_module(device)
    device = torch.device(device.type, number if device.index is None else device.index)
    if device.index >= module.device_count():
        raise ValueError(f"--device {name}: {device} is wanted, but this machine has {module.device_count()}")
    module.set_device(device)
    return device


@contextmanager
def outside_autocast() -> Iterator[None]:
    """As if there were no ``torch.autocast`` around this thread. Also a decorator.

    >>> with torch.autocast("cpu", torch.bfloat16), outside_autocast():
    ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
    torch.float32
    """
    accelerator = torch.accelerator.current_accelerator()
    with ExitStack() as stack:
        for device in ("cpu",) if accelerator is None else ("cpu", accelerator.type):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def stream_number(device: torch.device) -> int:
    """Of the stream that is current on ``device``, among those of it; 0 where there are none."""
    if not runs_behind(device):
        return 0
    return torch.get_device_module(device).current_stream(device).stream_id


def milliseconds(device: torch.device, work: Callable[[], object], calls: int = 5) -> float:
    """Of one call of ``work``, by the clock of the device; of the host, where that computes."""
    if not runs_behind(device):
        began = time.perf_counter()
        for _ in range(calls):
            work()
        return 1e3 * (time.perf_counter() - began) / calls
    stream = torch.get_device_module(device).current_stream(device)
    begin, end = (torch.get_device_module(device).Event(enable_timing=True) for _ in range(2))
    begin.record(stream)
    for _ in range(calls):
        work()
    end.record(stream)
    end.synchronize()
    return begin.elapsed_time(end) / calls


def use_here(tensors: Sequence[Tensor], stream: int) -> None:
    """Tell the allocator that the current stream uses these, which were made while number ``stream`` was current."""
    for tensor in tensors:
        if runs_behind(tensor.device) and stream_number(tensor.device) != stream:
            tensor.record_stream(torch.get_device_module(tensor.device).current_stream(tensor.device))


class Written:
    """A tensor that the current stream has written, for a reader that may be on another one."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._stream = tensor, stream_number(tensor.device)
        if runs_behind(tensor.device):
            self._done = torch.get_device_module(tensor.device).current_stream(tensor.device).record_event()

    def read_here(self) -> None:
        """What the current stream is given from now on comes after the writing."""
        if stream_number(self._tensor.device) != self._stream:
            torch.get_device_module(self._tensor.device).current_stream(self._tensor.device).wait_event(self._done)
            use_here([self._tensor], self._stream)


class Transfer(Generic[T]):
    """The work of a lane, and the memory it was given: ``buffers`` are its own until its reader is ordered after it.

    Dropped without that, as after an error, it leaves its buffers to the allocator with a note of the stream that may
    still use them.
    """

    def __init__(self, stream: Any, value: T, buffers: Sequence[Tensor]) -> None:
        self._stream, self._value, self._buffers = stream, value, tuple(buffers)
        self._done = stream.record_event()

    def hand_over(self) -> T:
        """The lane's value, once the stream that is current now waits for the lane; the host does not wait."""
        reader = torch.get_device_module(self._stream.device).current_stream(self._stream.device)
        reader.wait_event(self._done)
        self._buffers = ()
        for tensor in _tensors_in(self._value):
            tensor.record_stream(reader)  # it was made on the lane's stream, and is freed there
        return self._value

    def __del__(self) -> None:
        for tensor in self._buffers:
            tensor.record_stream(self._stream)


class StreamLane:
    """A side stream: schedules run on it in the order they were started, issued by the caller's thread."""

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream(device)

    def start(self, schedule: Callable[[], T], buffers: Sequence[Tensor]) -> Pending[T]:
        """Run ``schedule`` behind what the caller has issued. ``buffers``: memory of the caller's that it uses."""
        self._stream.wait_stream(self._module.current_stream(self._stream.device))
        try:
            with without_gradients(), self._module.stream(self._stream):
                value = schedule()
        except BaseException:
            Transfer(self._stream, None, buffers)  # dropped at once: what has been issued may still use them
            raise
        return Pending(Transfer(self._stream, value, buffers).hand_over)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor) and runs_behind(value.device):
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _tensors_in(one)


def start_copy_to_host(tensor: Tensor) -> Pending[Tensor]:
    """``tensor`` on the CPU, when it is waited for: the one place where weft lets the host wait for a device.

    What was queued after this is not waited for.
    """
    if not runs_behind(tensor.device):
        return Pending(lambda: tensor)
    if not tensor.numel():
        return Pending(lambda: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu"))
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True, device="cpu")
    copy.copy_(tensor.detach(), non_blocking=True)
    done = torch.get_device_module(tensor.device).current_stream(tensor.device).record_event()

    def finish() -> Tensor:
        if not done.query():  # a host that has waited for later work already knows
            done.synchronize()
        return copy

    return Pending(finish)


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor on ``device``, without the host waiting: it leaves from pinned memory."""
    if tensor.device == device or not runs_behind(device) or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def note_work(device: torch.device) -> Pending[None]:
    """What the current stream has been given so far: ``wait()`` orders the stream that is current then after it."""
    if not runs_behind(device):
        return Pending(lambda: None)
    module = torch.get_device_module(device)
    done = module.current_stream(device).record_event()
    return Pending(lambda: module.current_stream(device).wait_event(done))


def finish_work(device: torch.device) -> None:
    """Let the host wait until the device has nothing left to do: for measuring, not for steps."""
    if runs_behind(device):
        torch.get_device_module(device).synchronize(device)


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream is being captured into a graph: nothing may be asked of works under way then."""
    module = torch.get_device_module(device)
    return hasattr(module, "is_current_stream_capturing") and module.is_current_stream_capturing()
