"""A recorded step in virtual time: the same order of sends, work and returns, with the messages and seconds it had."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import torch

from weft.comm import Axis, Ledger, Pending
from weft.optim.owners import Held, Transfer
from weft.optim.step.orders import Orders, Unit, send_in_order, work_in_order
from weft.optim.step.record import StepRecord, part_of

Sizes = list[tuple[int, int]]  # (rank in the world, bytes)


class Hop(NamedTuple):
    """One exchange of one rank."""

    sends: Sizes
    receives: Sizes


@dataclass
class UnitProfile:
    """One unit of one rank: its exchanges out and back, and seconds of packing and of work."""

    sends: list[Hop] = field(default_factory=list)
    returns: list[Hop] = field(default_factory=list)
    seconds: float = 0.0
    packing: float = 0.0


@dataclass
class Profile:
    """One rank's step: its units by name, and seconds of work before the first and, by part, when results are back."""

    units: dict[str, UnitProfile]
    examined: float = 0.0
    committed: dict[str, float] = field(default_factory=dict)

    @property
    def work(self) -> float:
        units = sum(unit.packing + unit.seconds for unit in self.units.values())
        return self.examined + units + sum(self.committed.values())

    @property
    def bytes_sent(self) -> int:
        return sum(size for unit in self.units.values() for hop in unit.sends + unit.returns for _, size in hop.sends)

    @staticmethod
    def of(record: StepRecord, axes: Sequence[Axis]) -> Profile:
        """What a step was made of, with ranks numbered as in the world that all axes are part of."""
        numbers = {axis.counter.name: axis.wire.numbers for axis in axes}

        def hops(ledger: Ledger) -> list[Hop]:
            found = []
            for event in ledger.events:
                names = [name for name in numbers if event.lane.startswith(name)]
                if event.operation.endswith(".metadata") or not names:  # without a name: an axis of one rank
                    continue
                number = numbers[max(names, key=len)]
                sends, receives = (
                    [(number[peer], size) for peer, size in side] for side in (event.sends, event.receives)
                )
                found.append(Hop(sends, receives))
            return found

        units = {
            name: UnitProfile(hops(unit.sends), hops(unit.returns), unit.seconds, unit.packing)
            for name, unit in record.units.items()
        }
        return Profile(units, record.examined, dict(record.committed))

    @staticmethod
    def read(saved: dict[str, Any]) -> Profile:
        """Of what ``asdict`` gives, as JSON brings it back."""
        units = {
            name: UnitProfile(**{**unit, **{side: [Hop(*hop) for hop in unit[side]] for side in ("sends", "returns")}})
            for name, unit in saved["units"].items()
        }
        return Profile(units, saved["examined"], saved["committed"])


class TimedWire(Protocol):
    """What a rank of a virtual world has besides a wire: it can let time pass."""

    def spend(self, what: str, seconds: float) -> None:
        """Compute for so long."""
        ...


@runtime_checkable
class World(Protocol):
    """What a step is replayed in: a `weft.world.VirtualWorld` with a machine."""

    size: int
    machine: Any

    def run(self, fn: Any) -> Any:
        """``fn(axis)`` on every rank."""
        ...


class _Replayed:
    """A unit of one rank, with the verbs of a part: the messages are empty, and work only takes its time."""

    def __init__(self, axis: Axis, name: str, profile: UnitProfile, places: dict[int, int]) -> None:
        self._axis, self._name, self._profile, self._places = axis, name, profile, places
        self.under_way = Transfer([], [])

    def start(self, hops: Sequence[Hop]) -> None:
        self.under_way = Transfer([partial(self._exchange, hop) for hop in hops], [])

    def _exchange(self, hop: Hop, held: Held) -> Pending[Held]:
        sends, receives = (
            [(self._places[peer], torch.empty(size, dtype=torch.uint8, device="meta")) for peer, size in side]
            for side in (hop.sends, hop.receives)
        )
        pending = self._axis.begin(self._name).exchange(sends, receives)
        return Pending(lambda: [pending.wait()])

    def travels(self, bucket: int) -> bool:
        return bool(self._profile.sends)

    def send(self, bucket: int) -> None:
        cast(TimedWire, self._axis.wire).spend(f"pack: {self._name}", self._profile.packing)
        self.start(self._profile.sends)

    def advance(self, bucket: int) -> None:
        self.under_way.advance()

    def attempt(self, number: int | None, work: Callable[[], None], instead: Callable[[], None]) -> None:
        work()

    def work_on(self, bucket: int, scale: float) -> None:
        self.under_way.wait()
        cast(TimedWire, self._axis.wire).spend(self._name, self._profile.seconds)
        self.start(self._profile.returns)


def replay(world: World, profiles: dict[int, Profile], orders: Orders, naive: bool = False) -> float:
    """Seconds of a step in these orders. ``profiles``: each rank's, by its number.

    ``naive``: everything is sent, then everything waited for, then worked on, then returned.
    """
    places = {number: place for place, number in enumerate(sorted(profiles))}
    by_place = [profiles[number] for number in sorted(profiles)]

    def program(axis: Axis) -> None:
        mine = by_place[axis.rank]
        made = {name: _Replayed(axis, name, profile, places) for name, profile in mine.units.items()}
        units = {name: Unit(cast(Any, one), 0, name) for name, one in made.items()}
        record = StepRecord(axis.wire.clock)
        wire = cast(TimedWire, axis.wire)
        wire.spend("examine", mine.examined)
        axis.begin("start", metadata=[0]).metadata.wait()
        send_in_order([units[name] for name in orders.scatter], record)
        if naive:
            for name in orders.scatter:
                made[name].under_way.wait()
            for name in orders.work:
                wire.spend(name, mine.units[name].seconds)
            for name in orders.work:
                made[name].start(mine.units[name].returns)
        else:
            work_in_order([units[name] for name in orders.work], 1.0, record)
        axis.begin("finish", metadata=[0]).metadata.wait()
        for part in dict.fromkeys(map(part_of, mine.units)):
            for name, one in made.items():
                if part_of(name) == part:
                    one.under_way.wait()
            wire.spend(f"commit: {part}", mine.committed.get(part, 0.0))

    return float(world.run(program).elapsed)
