"""Reports, with its place, the CPU operator that uses pinned memory while a copy is under way.

The poison of `weft.world.simulated.pinned` shows only in numbers. Where it must be found which line read it, this mode
looks at every CPU operator, and costs some microseconds for each. It cannot see ``tolist`` and ``numpy``.

Private names of torch: ``torch.utils._python_dispatch``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weft.world.simulated.memory import Part, overlap
from weft.world.simulated.operators import operator_of
from weft.world.simulated.pinned import PinnedCopy
from weft.world.simulated.places import describe, place, reports
from weft.world.simulated.streams import current_rank


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)


class WatchHost(TorchDispatchMode):
    """Within it, in this thread, a CPU operator reports what it reads or writes too early."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        copies = [copy for copy in current_rank().host_copies if isinstance(copy, PinnedCopy)]
        if copies and all(t.device.type == "cpu" for t in _tensors([*args, *kwargs.values()])):
            known = operator_of(func)
            given = [*zip(known.by_place, args, strict=False), *((known.by_name[n], a) for n, a in kwargs.items())]
            for kind, value in given:
                for tensor in _tensors(value) if kind[0] != "v" else ():
                    _check(tensor, kind == "w", known.name, copies)
        return func(*args, **kwargs)


def _check(tensor: torch.Tensor, writes: bool, name: str, copies: list[PinnedCopy]) -> None:
    if tensor.layout is not torch.strided or not tensor.numel():
        return
    pointer, part = tensor.untyped_storage().data_ptr(), Part.of(tensor)
    for copy in copies:
        same = copy.memory.untyped_storage().data_ptr() == pointer
        if same and (writes or copy.writes_host) and overlap(Part.of(copy.memory), part):
            reports.add(
                f"pinned memory: the host {'writes' if writes else 'reads'} it ({name}) at {describe(place())}, before "
                f"the non-blocking copy at {describe(copy.where)} was over"
            )
