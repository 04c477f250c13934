"""Around work on the state of a table: it is the same work, on the same kinds of tensors, in whatever mode it is asked.

Rows are brought up to date, and memory is kept for the next time, when somebody looks something up: perhaps within
``inference_mode``, ``autocast`` or under fake tensors. What is kept then must be good for the training that goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily


@contextmanager
def outside_modes(weight: Tensor) -> Iterator[None]:
    """No gradients, no inference mode, no autocast and, if ``weight`` is real, no fake tensors."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())  # after it: leaving inference mode switches gradients on
        kind = weight.device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            stack.enter_context(torch.autocast(kind, enabled=False))
        if not isinstance(weight, FakeTensor):
            stack.enter_context(unset_fake_temporarily())
        yield
