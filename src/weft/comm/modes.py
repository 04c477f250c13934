"""What a caller may have set around a call (autocast, inference mode, fake tensors), and how to work outside of it.

State and cross-rank arithmetic are in the dtype they say, also inside ``torch.autocast``. What is kept from one call to
the next is ordinary: a tensor made under ``torch.inference_mode()`` cannot be written to in a training step, and one
made under a FakeTensorMode has no memory; nor can a call under such a mode use an ordinary one. So what is kept is made
outside the first, and the second neither keeps nor uses any.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

P = ParamSpec("P")
T = TypeVar("T")

_AUTOCAST = ("cpu", "cuda", "xpu")  # devices that may have one
_MODES = torch._C._TorchDispatchModeKey
_TRACING = (_MODES.FAKE, _MODES.PROXY, _MODES.FUNCTIONAL)


def tensors_are_real() -> bool:
    """Whether tensors have values now, and what is made may be kept.

    >>> tensors_are_real()
    True
    """
    return all(torch._C._get_dispatch_mode(mode) is None for mode in _TRACING)


def ordinary() -> Any:
    """A context in which tensors that will be kept are made: outside inference mode."""
    return torch.inference_mode(False)


def keep_tensors(maxsize: int) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """``functools.lru_cache`` for a function that makes tensors."""

    def decorate(make: Callable[P, T]) -> Callable[P, T]:
        def make_ordinary(*args: P.args, **keywords: P.kwargs) -> T:
            with ordinary():
                return make(*args, **keywords)

        kept: Callable[..., T] = functools.lru_cache(maxsize)(make_ordinary)

        @functools.wraps(make)
        def get(*args: P.args, **keywords: P.kwargs) -> T:
            return kept(*args, **keywords) if tensors_are_real() else make(*args, **keywords)

        return get

    return decorate


@contextmanager
def outside_autocast() -> Iterator[None]:
    """As if there were no ``torch.autocast`` around this thread. Also a decorator.

    >>> with torch.autocast("cpu", torch.bfloat16), outside_autocast():
    ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
    torch.float32
    """
    with ExitStack() as stack:
        for device in _AUTOCAST:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


@contextmanager
def outside_modes(weight: Tensor) -> Iterator[None]:
    """No gradients, no inference mode, no autocast and, if ``weight`` is real, no fake tensors."""
    with ExitStack() as stack:
        stack.enter_context(ordinary())
        stack.enter_context(torch.no_grad())  # after it: leaving inference mode switches gradients on
        stack.enter_context(outside_autocast())
        if not isinstance(weight, FakeTensor):
            stack.enter_context(unset_fake_temporarily())
        yield
