"""The units of a step, their names, and the two orders they stand in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from weft.comm.arguments import show
from weft.optim.step.part import StepPart
from weft.optim.step.run import Unit


def name_parts(parts: Sequence[StepPart]) -> dict[str, StepPart]:
    """Each part by the name of its class; the second of a class is called ``REKLS_2``, and so on.

    >>> import torch, weft
    >>> one, other = (weft.optim.ShardedAdamW([torch.nn.Parameter(torch.ones(2))]) for _ in range(2))
    >>> list(name_parts([one, other]))
    ['ShardedAdamW', 'ShardedAdamW_2']
    """
    named: dict[str, StepPart] = {}
    for part in parts:
        kind = type(part).__name__
        count = sum(type(other).__name__ == kind for other in named.values())
        named[kind if not count else f"{kind}_{count + 1}"] = part
    return named


def name_parameter(parts: dict[str, StepPart], parameter: Tensor) -> str:
    """A parameter by its own name, or its number, and its part's."""
    for name, part in parts.items():
        for number, group in enumerate(part.param_groups):
            for at, one in enumerate(group["params"]):
                if one is parameter:
                    numbered = f"parameter {at} of group {number}"
                    return f"{group['param_names'][at] if 'param_names' in group else numbered} ({name})"
    raise AssertionError("not a parameter of this step")


def list_units(parts: dict[str, StepPart]) -> list[Unit]:
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
        """Those that were given, with what they do not name behind it as by default."""
        default = Orders.default(units, early)
        found = Orders(
            read_order("scatter_order", () if scatter is None else scatter, units, default.scatter),
            read_order("work_order", () if work is None else work, units, default.work),
        )
        if fault := find_scatter_fault(found.scatter, units, early):
            raise fault
        return found

    def sort_scatter(self, units: Sequence[Unit]) -> list[Unit]:
        return _sort(units, self.scatter)

    def sort_work(self, units: Sequence[Unit]) -> list[Unit]:
        return _sort(units, self.work)


def _sort(units: Sequence[Unit], names: Sequence[str]) -> list[Unit]:
    by_name = {unit.name: unit for unit in units}
    return [by_name[name] for name in names]


def read_order(word: str, given: Sequence[str], units: Sequence[Unit], default: Sequence[str]) -> tuple[str, ...]:
    """An order that names parts or units, with the others behind them in the order of ``default``."""
    if not isinstance(given, tuple | list) or not all(type(name) is str for name in given):
        raise TypeError(f"OverlappedStep: {word} must be a list of names, got {show(given)}")
    found: list[str] = []
    for name in given:
        meant = [unit.name for unit in units if name in (unit.name, unit.name.rpartition(".")[0])]
        if not meant:
            known = ", ".join(unit.name for unit in units)
            raise ValueError(f"OverlappedStep: {word} names {name!r}, no part or bucket of one; there are {known}")
        again = [one for one in meant if one in found]
        if again and name in again:
            raise ValueError(f"OverlappedStep: {word} names {name!r} twice")
        found += [one for one in meant if one not in found]
    return (*found, *(name for name in default if name not in found))


def find_scatter_fault(order: Sequence[str], units: Sequence[Unit], early: bool) -> Exception | None:
    """Tables have their place: their gradients leave in the backward, and what else does leaves before them."""
    tables = [name for name in order if name in {unit.name for unit in units if not unit.part.sends_in_step}]
    others = [name for name in order if name not in tables]
    if list(order) == (others + tables if early else tables + others):
        return None
    place, why = ("last", ", after all others") if early else ("first", "")
    return ValueError(
        f"OverlappedStep: scatter_order has {tables[0]} between others, but the gradients of tables leave in the "
        f"backward{why}; name it {place} or leave it out"
    )
