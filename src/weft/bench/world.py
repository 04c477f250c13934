"""Where a benchmark's ranks come from: torchrun's world if this is one, local processes if not."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from weft.bench.timing import slowest
from weft.parallel.rendezvous import joined_world
from weft.world.launch import ProcessWorld, collect


class RankPool(Protocol):
    """Runs a function on every rank and gives all results to whoever reports."""

    size: int
    reports: bool

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """``fn(axis, *args)`` on every rank, results in rank order."""
        ...


class _Local:
    reports = True

    def __init__(self, world: ProcessWorld) -> None:
        self.size, self.run = world.size, world.run


class _Joined:
    def __init__(self, axis: Any) -> None:
        self._axis, self.size, self.reports = axis, axis.size, axis.rank == 0

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        return collect(self._axis, fn(self._axis, *args))


def take_samples(
    pool: RankPool,
    measure: Callable[..., dict[str, float]],
    args: Sequence[Any],
    repeats: int,
    advance: Callable[[], None],
) -> Iterator[dict[str, float]]:
    """``measure(axis, *args, turn)`` again and again: seconds of each case on the slowest rank. The first warms up."""
    for turn in range(repeats + 1):
        seconds = slowest(pool.run(measure, *args, turn))
        if turn:
            yield seconds
            advance()  # by now whoever asked has kept the sample


def by_case(samples: Sequence[dict[str, float]]) -> dict[str, list[float]]:
    """The samples of each case."""
    return {name: [sample[name] for sample in samples] for name in (samples[0] if samples else ())}


@contextmanager
def rank_pool(ranks: int | None) -> Iterator[RankPool]:
    """``ranks`` local Gloo processes, or under torchrun the ranks it started."""
    with joined_world() as axis:
        if axis is not None:
            if ranks is not None and ranks != axis.size:
                raise ValueError(f"--ranks {ranks} does not fit the {axis.size} ranks torchrun started; leave it out")
            yield _Joined(axis)
            return
    count = 4 if ranks is None else ranks
    print(f"starting {count} ranks", file=sys.stderr)
    with ProcessWorld(count) as world:
        yield _Local(world)
