"""The table of schedules, with what each costs. A new one is a file with one function and a line here."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from weft.comm.rounds import Path, Schedule
from weft.ops.scan.affine import Form
from weft.ops.scan.doubling import doubling
from weft.ops.scan.gather import gather
from weft.ops.scan.pipeline import pipeline
from weft.ops.scan.ring import ring
from weft.ops.scan.transpose import transpose
from weft.ops.scan.tree import tree


@dataclass(frozen=True)
class Method:
    """A schedule, and its costs on P > 1 ranks as `weft.world.VirtualWorld` finds them.

    rounds(P): the delays one after the other. states(P, K): the time where only bytes cost, in units of the time of one
    state, with K blocks. decays(P): how many of these states have their decay with them, which is as large as a state
    where it is dense.
    """

    schedule: Callable[[Path, Form], Schedule[Tensor | None]]  # returns the state entering this rank, None for zero
    rounds: Callable[[int], int]
    states: Callable[[int, int], float]
    decays: Callable[[int], float]


def _log2(size: int) -> int:
    return math.ceil(math.log2(size))


METHODS: dict[str, Method] = {
    "ring": Method(ring, lambda p: p - 1, lambda p, k: p - 1, lambda p: 0),
    "gather": Method(gather, lambda p: 1, lambda p, k: p - 1, lambda p: p - 1),
    "pipeline": Method(pipeline, lambda p: p - 1, lambda p, k: (p + k - 2) / k, lambda p: 0),
    "tree": Method(tree, lambda p: 2 * _log2(p) + 1, lambda p, k: 2 * _log2(p) + 1, _log2),
    "doubling": Method(doubling, _log2, lambda p, k: _log2(p), lambda p: _log2(p) - 1),
    "transpose": Method(transpose, lambda p: 2, lambda p, k: 2 * (p - 1) / p, lambda p: (p - 1) / p),
}

# What `choose` assumes of the network, until the planner knows better: a delay in seconds and a rate in bytes/s.
LATENCY, BANDWIDTH = 10e-6, 25e9


def schedule(method: str, path: Path, form: Form, blocks: int | None = None) -> Schedule[Tensor | None]:
    """The schedule of ``method`` at one place of a path; ``blocks`` is for `pipeline`."""
    return METHODS[method].schedule(path, form) if blocks is None else pipeline(path, form, blocks)


def choose(form: Form, size: int) -> str:
    """The method with the least rounds * latency + bytes / bandwidth for states of this form; of equals the first.

    >>> import torch
    >>> [choose(Form("none", torch.Size((n, 64, 64)), torch.float32, torch.device("cpu")), 64) for n in (1, 512)]
    ['transpose', 'transpose']
    """
    if size == 1:
        return "doubling"
    order = ("doubling", *METHODS)  # on two ranks most are alike

    def seconds(name: str) -> float:
        states = METHODS[name].states(size, form.block_count(None)) * form.state_elements
        decays = METHODS[name].decays(size) * (form.map_elements - form.state_elements)
        return METHODS[name].rounds(size) * LATENCY + (states + decays) * form.dtype.itemsize / BANDWIDTH

    return min(order, key=seconds)
