"""The units of a step, their names, and the two orders in which they are sent and worked on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from weft.comm.arguments import show
from weft.optim.step.record import StepRecord, part_of
from weft.optim.step.verbs import PartVerbs

Part = TypeVar("Part", bound=PartVerbs)


@dataclass(frozen=True)
class Unit:
    """One bucket of one part: what is sent and worked on at once."""

    part: PartVerbs
    bucket: int
    name: str


def name_parts(parts: Sequence[Part]) -> dict[str, Part]:
    """Each part by the name of its class; the second of a class is called ``REKLS_2``, and so on.

    >>> import torch, weft
    >>> one, other = (weft.optim.ShardedAdamW([torch.nn.Parameter(torch.ones(2))]) for _ in range(2))
    >>> list(name_parts([one, other]))
    ['ShardedAdamW', 'ShardedAdamW_2']
    """
    named: dict[str, Part] = {}
    for part in parts:
        kind = type(part).__name__
        count = sum(type(other).__name__ == kind for other in named.values())
        named[kind if not count else f"{kind}_{count + 1}"] = part
    return named


def list_units(parts: Mapping[str, PartVerbs]) -> list[Unit]:
    """Every bucket of every part, as ``PART.NUMBER``."""
    return [
        Unit(part, bucket, f"{name}.{bucket}") for name, part in parts.items() for bucket in range(len(part.buckets()))
    ]


@dataclass(frozen=True)
class Orders:
    """In which order units send their gradients, and in which they are worked on: names of units."""

    scatter: tuple[str, ...]
    work: tuple[str, ...]

    @staticmethod
    def default(units: Sequence[Unit], early: bool = False) -> Orders:
        """Tables first, whose gradients leave in the backward: they are there while others travel. Then as listed.

        ``early``: all leave in the backward, which comes to tables last.
        """
        tables = [unit.name for unit in units if not unit.part.sends_in_step]
        others = [unit.name for unit in units if unit.part.sends_in_step]
        order = (*others, *tables) if early else (*tables, *others)
        return Orders(order, order)

    @staticmethod
    def read(
        scatter: Sequence[str] | None, work: Sequence[str] | None, units: Sequence[Unit], early: bool = False
    ) -> Orders:
        """Those that were given, with what they do not name behind it as by default.

        Tables have their place: their gradients leave in the backward, and what else does leaves before them.
        """
        default = Orders.default(units, early)
        found = Orders(
            read_order("scatter_order", scatter, units, default.scatter),
            read_order("work_order", work, units, default.work),
        )
        of_tables = {unit.name for unit in units if not unit.part.sends_in_step}
        tables = [name for name in found.scatter if name in of_tables]
        others = [name for name in found.scatter if name not in of_tables]
        if [*found.scatter] != (others + tables if early else tables + others):
            place, why = ("last", ", after all others") if early else ("first", "")
            raise ValueError(
                f"OverlappedStep: scatter_order has {tables[0]} between others, but the gradients of tables leave in "
                f"the backward{why}; name it {place} or leave it out"
            )
        return found

    def sort(self, units: Sequence[Unit]) -> tuple[list[Unit], list[Unit]]:
        """The units as they send their gradients, and as they are worked on."""
        by_name = {unit.name: unit for unit in units}
        return [by_name[name] for name in self.scatter], [by_name[name] for name in self.work]


def read_order(
    word: str, given: Sequence[str] | None, units: Sequence[Unit], default: Sequence[str]
) -> tuple[str, ...]:  # fmt: skip
    """An order that names parts or units, with the others behind them in the order of ``default``."""
    given = () if given is None else given
    if not isinstance(given, tuple | list) or not all(type(name) is str for name in given):
        raise TypeError(f"OverlappedStep: {word} must be a list of names, got {show(given)}")
    found: list[str] = []
    for name in given:
        meant = [unit.name for unit in units if name in (unit.name, part_of(unit.name))]
        if not meant:
            known = ", ".join(unit.name for unit in units)
            raise ValueError(f"OverlappedStep: {word} names {name!r}, no part or bucket of one; there are {known}")
        if name in meant and name in found:
            raise ValueError(f"OverlappedStep: {word} names {name!r} twice")
        found += [one for one in meant if one not in found]
    return (*found, *(name for name in default if name not in found))


def send_in_order(units: Sequence[Unit], record: StepRecord) -> None:
    """Start the gradients of units."""
    for unit in units:
        with record.sending(unit.name):
            unit.part.send(unit.bucket)


def work_in_order(units: Sequence[Unit], scale: float, record: StepRecord) -> None:
    """Work on units. Messages of several hops are moved on: the next unit's gradients, the last one's results.

    What the work on one raises is noted, and the others are worked on all the same: ranks wait for their results.
    """
    for place, unit in enumerate(units):
        if unit.part.travels(unit.bucket):  # else there is work to do while others' first messages travel
            for ahead in units[place : place + 2]:
                with record.sending(ahead.name):
                    ahead.part.advance(ahead.bucket)
        with record.working(unit.name):
            unit.part.attempt(None, partial(unit.part.work_on, unit.bucket, scale), lambda: None)
        for behind in units[max(0, place - 1) : place]:
            with record.returning(behind.name):
                behind.part.advance(behind.bucket)
