"""Second owners: ranks that decompose one factor of a very large matrix while its owner decomposes the other.

With fewer matrices than ranks the largest one is the least a step takes. Where both of its factors are always due in
the same steps (``root_every=1``), R goes ``[n, n]`` to a rank with less to do, and what is made of it comes back. The
second owner keeps nothing: state, checkpoints and bits are those without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from weft.optim.matrix.plan import Plan
from weft.optim.matrix.rule import EigenError, Rule, RuleRun, State
from weft.optim.owners import Held, Role, Route, Sharded, Transfer

T = TypeVar("T")


class Lent(NamedTuple):
    """The factor that a second owner decomposes, of a bucket's ``at``-th matrix, of the ``number``-th parameter."""

    at: int
    number: int
    plan: Plan
    side: str

    @property
    def factor_route(self) -> Route:
        """From its owner to the second one."""
        return self._route(*self.plan.layout[self.side])

    @property
    def made_routes(self) -> dict[str, Route]:
        """Of what is made of it: the same ranks, to be taken back."""
        return {name: self._route(*kind) for name, kind in self.plan.kept.items() if name.endswith(f"_{self.side}")}

    def _route(self, shape: tuple[int, ...], dtype: torch.dtype) -> Route:
        owners, owner = self.plan.owners, self.plan.route.owner
        roles: list[Role] = []
        for level, axis in enumerate(owners.axes):
            # The owner has all of it. Ranks in other rows than its have nothing, and send nothing on.
            in_row = owners.here[level + 1 :] == owner[level + 1 :]
            rows = (shape[0] if in_row and rank == owner[level] else 0 for rank in range(axis.size))
            roles.append(Sharded(0, tuple(rows)))
        return Route(shape, tuple(roles), self.plan.second[self.side], dtype, self.plan.route.device)


class Engine(Protocol):
    """Where matrices are stepped, and what fails is noted, so that the step is made on no rank."""

    label: str

    def run(self, run: RuleRun) -> Tensor:
        """The update of a matrix of which this rank does all the work."""

    def attempt(self, number: int | None, work: Callable[[], T], instead: Callable[[], T]) -> T:
        """What ``work()`` gives, or if it raises ``instead()``."""

    def fail(self, number: int) -> None:
        """The step of a parameter cannot be made."""


class SecondOwners:
    """The work on a bucket of which second owners decompose some factors. Every rank takes part, in this order."""

    def __init__(self, engine: Engine, lent: Sequence[Lent], runs: Mapping[int, RuleRun]) -> None:
        """``runs``: of this rank's matrices, by their places in the bucket."""
        self._engine, self._lent, self._runs, self._owners = engine, lent, runs, lent[0].plan.owners

    def work(self) -> dict[int, Tensor]:
        """The updates of this rank's matrices."""
        shared = [(one, self._runs[one.at]) for one in self._lent if one.at in self._runs]
        factors = {one.at: self._go_on(run, None) for one, run in shared}
        back = self._decompose(self._send({at: found for at, found in factors.items() if isinstance(found, dict)}))
        made = {one.at: self._derive_rest(one, factors[one.at]) for one, _ in shared}
        updates = {at: self._engine.run(run) for at, run in self._runs.items() if at not in factors}
        taken = self._take(back)
        for one, run in shared:
            found = factors[one.at]
            if isinstance(found, dict) and (own := made[one.at]) is not None:
                found = self._go_on(run, own | taken[one.at])
            updates[one.at] = found if isinstance(found, Tensor) else torch.zeros_like(run.grad)
        return updates

    def _go_on(self, run: RuleRun, derived: State | None) -> State | Tensor:
        """A rule's factors; or its update, if it has come to that; zeros where it fails."""

        def work() -> State | Tensor:
            try:
                return next(run.work) if derived is None else run.work.send(derived)
            except StopIteration as end:
                return end.value

        return self._engine.attempt(run.number, work, lambda: torch.zeros_like(run.grad))

    def _derive(self, number: int, rule: Rule, factors: State) -> State | None:
        """What a rule makes of factors; None, and noted, if that fails."""

        def work() -> State | None:
            try:
                return rule.made_of(factors)
            except EigenError:
                self._engine.fail(number)
                return None

        return self._engine.attempt(number, work, lambda: None)

    def _send(self, shared: Mapping[int, State]) -> Transfer:
        """Factors leave for their second owners: zeros of a rule that has stopped before them."""
        pieces: Held = []
        for at, _, plan, side in self._lent:
            shape, dtype = plan.layout[side]
            mine = shape if plan.is_mine else (0, *shape[1:])
            factor = shared.get(at, {}).get(side)
            pieces.append(torch.zeros(mine, dtype=dtype, device=plan.route.device) if factor is None else factor)
        return self._owners.gather(f"{self._engine.label}.factors", [one.factor_route for one in self._lent], pieces)

    def _decompose(self, coming: Transfer) -> Transfer:
        """Work on what has come here; what is made of it leaves."""
        routes: list[Route] = []
        made: Held = []
        for one, factor in zip(self._lent, coming.wait(), strict=True):
            found = None
            if factor is not None:
                found = self._derive(one.number, one.plan.rule, {one.side: factor}) or {}
            for name, route in one.made_routes.items():
                routes.append(route)
                made.append(None if found is None else found.get(name))
                if found is not None and name not in found:
                    made[-1] = torch.zeros(route.whole, dtype=route.dtype, device=route.device)
        return self._owners.scatter(f"{self._engine.label}.roots", routes, made)

    def _derive_rest(self, lent: Lent, factors: State | Tensor) -> State | None:
        """What is made of the factor that stays with the owner, if the rule has come to it."""
        if not isinstance(factors, dict):
            return None
        rest = {side: factor for side, factor in factors.items() if side != lent.side}
        return self._derive(lent.number, lent.plan.rule, rest)

    def _take(self, coming: Transfer) -> dict[int, State]:
        """What second owners have made of this rank's factors, by matrix."""
        arrived, found = iter(coming.wait()), dict[int, State]()
        for one in self._lent:
            for name in one.made_routes:
                tensor = next(arrived)
                if one.at in self._runs:
                    assert tensor is not None
                    found.setdefault(one.at, {})[name] = one.plan.rule.laid_out(name, tensor)
        return found
