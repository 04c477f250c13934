"""What ``torch.get_device_module("sim")`` gives: the names of `torch.cuda` that programs use."""

from __future__ import annotations

import contextlib
import types
from typing import Any

import torch

from weft.world.simulated import memory, streams


def _stream(stream: Any) -> Any:
    return contextlib.nullcontext() if stream is None else stream


def _default_stream(device: Any = None) -> Any:
    return streams.current_rank().default_stream


def _synchronize(device: Any = None) -> None:
    streams.host_sync("synchronize", streams.current_rank().issued)


def _memory_allocated(device: Any = None) -> int:
    return memory.memory_allocated(streams.current_rank())


def _no_device_change(device: Any = None) -> Any:
    return contextlib.nullcontext()


def _set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    torch.set_rng_state(state)


def make_device_module() -> types.ModuleType:
    """One device; random numbers are the CPU's."""
    module = types.ModuleType(f"torch.{memory.DEVICE_TYPE}")
    module.__dict__.update(
        Stream=streams.Stream,
        Event=streams.Event,
        stream=_stream,
        set_stream=streams.set_stream,
        current_stream=streams.current_stream,
        default_stream=_default_stream,
        synchronize=_synchronize,
        device=_no_device_change,
        set_device=lambda device: None,
        current_device=lambda: 0,
        device_count=lambda: 1,
        is_available=streams.is_accelerator,
        is_initialized=lambda: True,
        is_current_stream_capturing=streams.is_capturing,
        memory_allocated=_memory_allocated,
        empty_cache=lambda: None,
        manual_seed=lambda seed: None,  # torch.manual_seed has seeded the CPU
        manual_seed_all=lambda seed: None,
        get_rng_state=lambda device=None: torch.get_rng_state(),
        set_rng_state=_set_rng_state,
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        _is_in_bad_fork=lambda: False,
    )
    return module
