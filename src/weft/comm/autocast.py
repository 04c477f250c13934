"""State and cross-rank arithmetic are in the dtype they say, also where the caller is inside ``torch.autocast``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

_DEVICES = ("cpu", "cuda", "xpu")


@contextmanager
def outside_autocast() -> Iterator[None]:
    """As if there were no ``torch.autocast`` around this thread. Also a decorator.

    >>> with torch.autocast("cpu", torch.bfloat16), outside_autocast():
    ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
    torch.float32
    """
    with ExitStack() as stack:
        for device in _DEVICES:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield
