"""Operations that torch.compile must leave alone: they number their calls and talk to other ranks."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def eager(operation: Callable[P, T]) -> Callable[P, T]:
    """Let ``operation`` run outside the compiler: a model that calls it has a graph break there.

    Like ``torch.compiler.disable``, but without importing the compiler, which takes seconds, where nobody compiles.
    """

    outside: list[Callable[P, T]] = []

    @functools.wraps(operation)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if "torch._dynamo" not in sys.modules:
            return operation(*args, **kwargs)
        if not outside:
            outside.append(torch.compiler.disable(operation))
        return outside[0](*args, **kwargs)

    run._torchdynamo_disable = True  # type: ignore[attr-defined]  # the mark torch.compiler.disable leaves
    return run
