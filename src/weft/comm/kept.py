"""Tensors that are kept from one call to the next: ordinary ones, whatever mode the call that made them ran in.

A tensor made under ``torch.inference_mode()`` cannot be written to in a training step, and one made under a
FakeTensorMode has no memory; nor can a call under such a mode use an ordinary one. So what is kept is made outside the
first, and the second neither keeps nor uses any.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")

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
