"""Virtual worlds for tests of operations.

Such a test runs on an ideal network and with NCCL's rules (fixture ``network``), or besides on a simulated device
(fixture ``every_network``). There the autograd Functions of operations are given tensors of the device and give back
those of the host, results of ranks come to the host, and `place` puts what a test makes itself on the device.
"""

from __future__ import annotations

import importlib
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor, nn

import weft
from weft.comm.function import RankFunction

RULES = ("ideal", "nccl")
_current = ["ideal"]


def _why_not_simulated() -> str | None:
    """Why tests on the simulated device do not run; None if they do."""
    try:
        return importlib.import_module("weft.world.simulated").misfit()
    except (ImportError, AttributeError) as error:  # a torch whose private names are others
        return f"the simulated device does not fit this torch: {error}"


on_simulated_device = pytest.mark.skipif(_why_not_simulated() is not None, reason=str(_why_not_simulated()))


def use_rules(rules: str) -> None:
    """What `virtual_world` makes from now on: see the fixture ``network``."""
    _current[0] = rules


def current_rules() -> str:
    """What `use_rules` was given last."""
    return _current[0]


class _SimulatedWorld(weft.world.VirtualWorld):
    """Ranks with a simulated device whose results come back to the host."""

    def __init__(self, size: int) -> None:
        super().__init__(size, rules="nccl", device="sim")

    def run(self, fn: Callable[[weft.Axis], Any]) -> Any:
        with _functions_on_device():
            return super().run(lambda axis: move(fn(axis), "cpu"))


def virtual_world(size: int) -> weft.world.VirtualWorld:
    if _current[0] == "sim":
        return _SimulatedWorld(size)
    return weft.world.VirtualWorld(size, rules=_current[0])


def place(what: Any) -> Any:
    """Tensors (also in lists, tuples and dicts) or a module where this network's ranks compute."""
    return move(what, "sim") if _current[0] == "sim" else what


def move(what: Any, device: str) -> Any:
    """The same on another device; what is neither a tensor nor made of tensors stays as it is."""
    if isinstance(what, nn.Parameter) and what.is_leaf:
        return what if what.device.type == device else nn.Parameter(what.detach().to(device), what.requires_grad)
    if isinstance(what, Tensor | nn.Module):
        return what.to(device)
    if type(what) in (list, tuple):
        return type(what)(move(one, device) for one in what)
    if type(what) in (dict, OrderedDict):
        return type(what)((key, move(value, device)) for key, value in what.items())
    return what


@contextmanager
def _functions_on_device() -> Iterator[None]:
    """Every operation over ranks computes on the device, whatever it is given, and gives back tensors of the host."""
    apply = RankFunction.apply.__func__

    def apply_on_device(cls: Any, *args: Any) -> Any:
        if any(isinstance(arg, Tensor) and arg.device.type == "sim" for arg in args):
            return apply(cls, *args)
        found = apply(cls, *(arg.to("sim") if isinstance(arg, Tensor) else arg for arg in args))
        return move(found, "cpu")

    RankFunction.apply = classmethod(apply_on_device)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        RankFunction.apply = classmethod(apply)  # type: ignore[method-assign, assignment]


def every(values):
    """All of ``values`` on an ideal network; under NCCL's rules, where a program runs twice, a seventh of them.

    `make soak` takes all of them there too.
    """
    values = list(values)
    return values if _current[0] == "ideal" or "WEFT_SOAK" in os.environ else values[1::7] or values


def simulated_device() -> Any:
    """`weft.world.simulated`, installed. Where it cannot be had, what uses it is skipped, with a line that says why."""
    if (reason := _why_not_simulated()) is not None:
        pytest.skip(reason)
    simulated = importlib.import_module("weft.world.simulated")
    simulated.install()
    return simulated
