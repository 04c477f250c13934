"""Orders that are found, not guessed: tried in virtual time, the best of them measured."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from weft.comm import Axis
from weft.comm.arguments import show
from weft.comm.metadata import gather_text
from weft.optim.step.orders import Orders, Unit
from weft.optim.step.record import StepRecord
from weft.optim.step.replay import Profile, World, replay
from weft.parallel.dtensor import has_process_group

_MEASURED = 3  # times


@dataclass(frozen=True)
class Tried:
    """One pair of orders: what it is called, the seconds it takes in virtual time, and those measured, if it was."""

    name: str
    orders: Orders
    predicted: float
    measured: float | None = None


@dataclass(frozen=True)
class Tuning:
    """What `OverlappedStep.tune` found: the best first. ``work`` and ``link`` are the seconds of the busiest rank's
    work and of the busiest link: no order takes less than the longer of them."""

    tried: list[Tried]
    work: float
    link: float

    @property
    def orders(self) -> Orders:
        """Those that are kept."""
        return self.tried[0].orders

    @property
    def bound(self) -> float:
        return max(self.work, self.link)

    def show(self, rows: int = 8) -> None:
        """Print the table: order, predicted step, exposed communication."""
        from rich.console import Console
        from rich.table import Table

        table = Table(title=f"orders of a step (work {1e3 * self.work:.3f} ms, link {1e3 * self.link:.3f} ms)")
        for head in ("order", "predicted ms", "exposed ms", "x bound", "measured ms", "work order"):
            table.add_column(head, justify="left" if head in ("order", "work order") else "right")
        for one in self.tried[:rows]:
            exposed = one.predicted - self.work
            table.add_row(
                one.name, f"{1e3 * one.predicted:.3f}", f"{1e3 * exposed:.3f}", f"{one.predicted / self.bound:.3f}",
                "" if one.measured is None else f"{1e3 * one.measured:.3f}", " ".join(one.orders.work),
            )  # fmt: skip
        Console().print(table)


class Tunable(Protocol):
    """What is tuned: an `OverlappedStep`."""

    axes: list[Axis]
    units: list[Unit]

    @property
    def orders(self) -> Orders:
        """The present ones."""
        ...

    def dry_run(self, orders: Orders) -> StepRecord:
        """A step whose results are dropped."""
        ...


def tune(step: Tunable, world: World, tries: int, measure: int) -> Tuning:
    """See `OverlappedStep.tune`. One rank searches and sends the others what it found."""
    if tries < 1 or measure < 1:
        raise ValueError(f"OverlappedStep: tries and measure must be at least 1, got {tries} and {measure}")
    axes = step.axes
    profiles = gather_profiles(axes, Profile.of(step.dry_run(step.orders), axes))
    _check_world(world, len(profiles))
    found = ""
    if _own_number(axes) == min(profiles):
        fixed = {unit.name for unit in step.units if not unit.part.sends_in_step}
        found = _write(search(world, profiles, step.orders, fixed, tries))
    for axis in axes:
        found = next((text for text in gather_text(axis, "OverlappedStep.tune", found) if text), "")
    tried = _read(found)
    if axes and all(has_process_group(axis) for axis in axes):
        tried = _measure(step, tried, measure)
    link = max(profile.bytes_sent for profile in profiles.values()) / world.machine.bandwidth
    return Tuning(tried, max(profile.work for profile in profiles.values()), link)


def _check_world(world: object, size: int) -> None:
    """What is no virtual world with a machine, of as many ranks as take part."""
    fix = f"pass weft.world.VirtualWorld({size}, machine)"
    if not isinstance(world, World):
        raise TypeError(f"OverlappedStep: tune() takes a virtual world, got {show(world)}; {fix}")
    if world.size != size or world.machine is None:
        raise ValueError(
            f"OverlappedStep: tune() needs a virtual world with a machine and {size} ranks, got {world.size} ranks and "
            f"machine={world.machine}; {fix}"
        )


def _own_number(axes: Sequence[Axis]) -> int:
    return axes[0].wire.numbers[axes[0].wire.rank] if axes else 0


def gather_profiles(axes: Sequence[Axis], mine: Profile) -> dict[int, Profile]:
    """Every rank's profile, by its number: gathered along one axis after the other."""
    known: dict[str, Any] = {str(_own_number(axes)): asdict(mine)}
    for axis in axes:
        for text in gather_text(axis, "OverlappedStep.tune", json.dumps(known)):
            known.update(json.loads(text))
    return {int(number): Profile.read(saved) for number, saved in known.items()}


def search(world: World, profiles: dict[int, Profile], present: Orders, fixed: set[str], tries: int) -> list[Tried]:
    """Orders by their time in virtual time, the best first: some by rules, then changes of the best so far.

    ``fixed``: units that are sent first, or last, in any case.
    """
    tried: dict[Orders, Tried] = {}

    def attempt(name: str, orders: Orders) -> None:
        if orders not in tried:
            tried[orders] = Tried(name, orders, replay(world, profiles, orders))

    for name, orders in _by_rules(world, profiles, present, fixed).items():
        if len(tried) < tries:
            attempt(name, orders)
    draw, stuck = random.Random(0), 0
    while len(tried) < tries and stuck < 4 * tries:
        least = min(one.predicted for one in tried.values())
        best = draw.choice([one for one in tried.values() if one.predicted <= 1.001 * least])  # to leave a plateau
        before = len(tried)
        attempt("searched", _change(best.orders, fixed, draw))
        stuck = 0 if len(tried) > before else stuck + 1
    return sorted(tried.values(), key=lambda one: one.predicted)


def _write(tried: list[Tried]) -> str:
    return json.dumps([[one.name, one.orders.scatter, one.orders.work, one.predicted] for one in tried])


def _read(text: str) -> list[Tried]:
    return [
        Tried(name, Orders(tuple(scatter), tuple(work)), seconds) for name, scatter, work, seconds in json.loads(text)
    ]


def _by_rules(world: World, profiles: dict[int, Profile], present: Orders, fixed: set[str]) -> dict[str, Orders]:
    """Orders by rules of thumb, by name."""
    names = list(present.work)

    def over_ranks(value: Any) -> dict[str, float]:
        return {name: max(value(profile.units[name]) for profile in profiles.values()) for name in names}

    def seconds(hops: Any) -> float:
        return sum(size for hop in hops for _, size in hop.sends) / world.machine.bandwidth

    out = over_ranks(lambda unit: seconds(unit.sends))
    work = over_ranks(lambda unit: unit.seconds)
    back = over_ranks(lambda unit: seconds(unit.returns))

    def both(order: list[str]) -> Orders:
        return Orders(_with_fixed([name for name in order if name not in fixed], present, fixed), tuple(order))

    # Johnson's rule for two machines in a row, the link and then the processor, or the processor and then the link.
    first = sorted((n for n in names if out[n] < work[n]), key=lambda n: out[n])
    last = sorted((n for n in names if out[n] >= work[n]), key=lambda n: -work[n])
    early = sorted((n for n in names if work[n] < back[n]), key=lambda n: work[n])
    late = sorted((n for n in names if work[n] >= back[n]), key=lambda n: -back[n])
    # Work enough to wait for long messages, these, and the rest under which their results travel.
    heavy = sorted((n for n in names if work[n] > out[n] + back[n]), key=lambda n: out[n])
    light = [n for n in names if n not in heavy]
    between = {
        f"messages after {count} of {len(heavy)}": both(heavy[:count] + light + heavy[count:])
        for count in sorted({max(1, len(heavy) * share // 8) for share in (1, 2, 3, 4, 6)} if heavy else ())
    }
    return {
        "present": present,
        "as listed": both(names),
        "Johnson, out and work": both(first + last),
        "Johnson, work and back": both(early + late),
        "little to send first": both(sorted(names, key=lambda n: out[n])),
        "most to return first": both(sorted(names, key=lambda n: -back[n])),
        "most work first": both(sorted(names, key=lambda n: -work[n])),
        **between,
    }


def _change(orders: Orders, fixed: set[str], draw: random.Random) -> Orders:
    """One unit at another place: in the order of work, of sends, or in both."""
    kind = draw.randrange(3)
    work, scatter = list(orders.work), [name for name in orders.scatter if name not in fixed]
    moved = draw.choice(work)
    if kind != 1 or moved in fixed:
        work.remove(moved)
        work.insert(draw.randrange(len(work) + 1), moved)
    if kind != 0 and moved not in fixed:
        scatter.remove(moved)
        scatter.insert(draw.randrange(len(scatter) + 1), moved)
    return Orders(_with_fixed(scatter, orders, fixed), tuple(work))


def _with_fixed(scatter: list[str], orders: Orders, fixed: set[str]) -> tuple[str, ...]:
    """An order of sends with the fixed units where they stand in ``orders``: first or last."""
    kept = [name for name in orders.scatter if name in fixed]
    return (*kept, *scatter) if orders.scatter[: len(kept)] == tuple(kept) else (*scatter, *kept)


def _measure(step: Tunable, tried: list[Tried], measure: int) -> list[Tried]:
    """Dry runs of the best few and of the present orders, in turn; by the slowest rank's median, the fastest first."""
    chosen = tried[:measure] + [one for one in tried[measure:] if one.name == "present"]
    seconds: list[list[float]] = [[] for _ in chosen]
    for _ in range(_MEASURED):
        for place, one in enumerate(chosen):
            _slowest(step.axes, 0)  # line up
            seconds[place].append(_slowest(step.axes, int(1e9 * step.dry_run(one.orders).seconds)) / 1e9)
    measured = [replace(one, measured=statistics.median(some)) for one, some in zip(chosen, seconds, strict=True)]
    measured.sort(key=lambda one: one.measured or 0.0)
    return measured + [one for one in tried if one not in chosen]


def _slowest(axes: Sequence[Axis], nanoseconds: int) -> int:
    for axis in axes:
        rows = axis.begin("OverlappedStep.tune", metadata=[nanoseconds]).metadata.wait()
        nanoseconds = max(value for (value,) in rows)
    return nanoseconds
