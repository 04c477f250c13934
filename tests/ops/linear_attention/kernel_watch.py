"""What Triton's interpreter sees of kernels while they run: exponents, and every address they read or write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from weft.ops.fused.launch import Launch


@contextmanager
def no_positive_exponent() -> Iterator[list[float]]:
    """Watches every exponential: the list gets the largest argument of each."""
    seen: list[float] = []
    before = InterpreterBuilder.create_exp

    def watch(self, argument):
        seen.append(float(argument.data.max()))
        return before(self, argument)

    with mock.patch.object(InterpreterBuilder, "create_exp", watch):
        yield seen


@contextmanager
def memory_is_safe() -> Iterator[None]:
    """Fails on an access outside of the launch's tensors, and where two programs of a launch write one address."""
    load, store, run = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store, Launch.run
    ranges: list[tuple[int, int]] = []
    written: list[np.ndarray] = []

    def within(pointers, mask) -> np.ndarray:
        found = pointers.data[mask.data]
        if found.size:
            low, high = int(found.min()), int(found.max())
            assert any(begin <= low and high < end for begin, end in ranges), "an access outside of the tensors"
        return found

    def watch_load(self, pointers, mask, *rest):
        within(pointers, mask)
        return load(self, pointers, mask, *rest)

    def watch_store(self, pointers, value, mask, *rest):
        written.append(within(pointers, mask).ravel())
        return store(self, pointers, value, mask, *rest)

    def watch_run(self: Launch) -> None:
        ranges[:] = [_range(x) for x in self.arguments if isinstance(x, Tensor)]
        written.clear()
        run(self)
        addresses = np.concatenate(written)
        assert len(np.unique(addresses)) == len(addresses), f"{self.kernel} writes an address twice"

    with (
        mock.patch.object(InterpreterBuilder, "create_masked_load", watch_load),
        mock.patch.object(InterpreterBuilder, "create_masked_store", watch_store),
        mock.patch.object(Launch, "run", watch_run),
    ):
        yield


def _range(x: Tensor) -> tuple[int, int]:
    """From the first byte of a tensor to beyond its last."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + ((last + 1) * x.element_size() if x.numel() else 0)
