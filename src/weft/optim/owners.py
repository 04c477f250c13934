"""Owners: gradients go to the rank that owns a matrix or a slice, the owner works, results come back.

A parameter lies on the ranks of one or several axes. On each of them its pieces are

- `Averaged`: as large as the whole, different on every rank, to be averaged (gradients over a data axis);
- `Sharded`: one after the other along a dimension (over a tensor axis, or a mesh axis of a DTensor);
- `Replicated`: the same everywhere.

Going to an owner, pieces move along one axis after the other to the owner's place on it, so a sum is made by many
ranks and not by one. Coming back, they take the axes in the opposite order. All pieces that move along an axis at one
time are one exchange, with one message for each peer. `OwnedPart`: what optimizers do alike with them.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from weft.comm import Axis, Pending
from weft.comm.call import exchange_coalesced
from weft.comm.device import runs_behind
from weft.optim.step.part import StepPart

Place = tuple[int, ...]  # a rank on each axis


class Role:
    """How pieces lie on an axis."""

    def shape_on(self, rank: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of a rank's piece of what has ``shape``."""
        return shape


@dataclass(frozen=True)
class Averaged(Role):
    """Every rank has its own, of the same shape. The mean is taken in rank order, at least in fp32."""


@dataclass(frozen=True)
class Replicated(Role):
    """Every rank has the same."""


@dataclass(frozen=True)
class Sharded(Role):
    """Rank r has ``sizes[r]`` of the elements along ``dim``, in rank order."""

    dim: int
    sizes: tuple[int, ...]

    def shape_on(self, rank: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[: self.dim], self.sizes[rank], *shape[self.dim + 1 :])


@dataclass(frozen=True)
class Route:
    """How the pieces of one tensor of shape ``whole`` lie on each axis, and where its owner is.

    ``dtype`` and ``device`` are those of what comes back.
    """

    whole: tuple[int, ...]
    roles: tuple[Role, ...]
    owner: Place
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class _Options:
    level: int
    tensors: int


Held = list[Tensor | None]
Hop = Callable[[Held], Pending[Held]]


class Transfer:
    """Tensors on their way along several axes; the first part is under way once this is made."""

    def __init__(self, hops: Iterable[Hop], held: Held) -> None:
        self._hops = deque(hops)
        self._pending = self._hops.popleft()(held) if self._hops else Pending(lambda: held)

    def wait_sent(self) -> None:
        """End the part under way, and start nothing."""
        self._pending.wait()

    def advance(self) -> None:
        """End the part under way and start the next, if there is one."""
        if self._hops:
            held = self._pending.wait()
            self._pending = self._hops[0](held)
            self._hops.popleft()  # not before: where a part could not be started, what came so far is not the end

    def wait(self) -> Held:
        """End all of it."""
        while self._hops:
            self.advance()
        return self._pending.wait()


class Owners:
    """The ranks of some axes as owners. Each is given work by its cost, the least loaded first.

    >>> owners = Owners([])                    # a world of one
    >>> owners.assign(1.0)
    ()
    """

    def __init__(self, axes: Sequence[Axis]) -> None:
        self.axes = tuple(axes)
        # Gradients may leave in a backward, at another point of it on a rank that lacks one.
        self._lines = tuple(axis.apart("owners") for axis in axes)
        self.here: Place = tuple(axis.rank for axis in axes)
        self._loads = dict.fromkeys(itertools.product(*(range(axis.size) for axis in axes)), 0.0)

    def assign(self, cost: float) -> Place:
        """The owner of the next piece of work. Ask for the longest first: no owner then has much more than others."""
        place = min(self._loads, key=self._loads.__getitem__)
        self._loads[place] += cost
        return place

    def gather(self, name: str, routes: Sequence[Route], pieces: Sequence[Tensor | None]) -> Transfer:
        """Start this rank's ``pieces`` to their owners; ``wait()`` gives whole tensors here, None for those of others.

        None for a piece that is not here. Pieces must not be changed until then.
        """
        asked = [piece if self._is_asked(route) else None for route, piece in zip(routes, pieces, strict=True)]
        return Transfer([partial(self._hop_to, name, level, routes) for level in range(len(self.axes))], asked)

    def scatter(self, name: str, routes: Sequence[Route], wholes: Sequence[Tensor | None]) -> Transfer:
        """Start whole tensors (None: of another owner) from their owners; ``wait()`` gives this rank's pieces."""
        levels = reversed(range(len(self.axes)))
        return Transfer([partial(self._hop_from, name, level, routes) for level in levels], list(wholes))

    def _is_asked(self, route: Route) -> bool:
        """Of ranks that have the same, only the one in the owner's row sends it."""
        return all(
            here == owner
            for here, owner, role in zip(self.here, route.owner, route.roles, strict=True)
            if isinstance(role, Replicated)
        )

    def _hop_to(self, name: str, level: int, routes: Sequence[Route], held: Held) -> Pending[Held]:
        """Move pieces along one axis to the owners' place on it, where they are joined."""
        axis = self.axes[level]
        sends: dict[int, list[Tensor]] = defaultdict(list)
        receives: dict[int, list[Tensor]] = defaultdict(list)
        parts: dict[int, list[Tensor]] = {}
        for index, (route, piece) in enumerate(zip(routes, held, strict=True)):
            role, owner = route.roles[level], route.owner[level]
            if piece is None or isinstance(role, Replicated):
                continue
            if owner != axis.rank:
                sends[owner].append(piece.contiguous())
                continue
            shapes = [role.shape_on(rank, tuple(piece.shape)) for rank in range(axis.size)]
            parts[index] = [piece if r == axis.rank else piece.new_empty(shape) for r, shape in enumerate(shapes)]
            for rank, part in enumerate(parts[index]):
                if rank != axis.rank:
                    receives[rank].append(part)
        call = self._lines[level].begin(f"{name}.to_owners", _Options(level, len(routes)))
        pending = exchange_coalesced(call, _filled(sends), _filled(receives))

        def finish() -> Held:
            pending.wait()
            return [
                _joined(route.roles[level], parts[index]) if index in parts
                else piece if isinstance(route.roles[level], Replicated) else None
                for index, (route, piece) in enumerate(zip(routes, held, strict=True))
            ]  # fmt: skip

        return Pending(finish)

    def _hop_from(self, name: str, level: int, routes: Sequence[Route], held: Held) -> Pending[Held]:
        """Move what owners have along one axis to all of its ranks, cut where it is sharded over them."""
        axis = self.axes[level]
        sends: dict[int, list[Tensor]] = defaultdict(list)
        receives: dict[int, list[Tensor]] = defaultdict(list)
        pieces: Held = [None] * len(routes)
        for index, (route, whole) in enumerate(zip(routes, held, strict=True)):
            if self.here[:level] != route.owner[:level]:
                continue
            role, owner = route.roles[level], route.owner[level]
            if whole is None:
                shape = route.whole
                for at in (*range(level + 1, len(self.axes)), level):
                    shape = route.roles[at].shape_on(self.here[at], shape)
                pieces[index] = piece = torch.empty(shape, dtype=route.dtype, device=route.device)
                receives[owner].append(piece)
                continue
            cut = whole.split(role.sizes, role.dim) if isinstance(role, Sharded) else [whole] * axis.size
            pieces[index] = cut[axis.rank]
            for rank, piece in enumerate(cut):
                if rank != axis.rank:
                    sends[rank].append(piece.contiguous())
        call = self._lines[level].begin(f"{name}.from_owners", _Options(level, len(routes)))
        pending = exchange_coalesced(call, _filled(sends), _filled(receives))

        def finish() -> Held:
            pending.wait()
            return pieces

        return Pending(finish)


@dataclass
class Bucket:
    """What travels together in the step under way: gradients to their owners, then results from them."""

    gradients: Transfer | None = None
    arrived: Held | None = None
    results: Transfer | None = None

    def arrive(self) -> Held:
        """The gradients this rank owns, waited for, at least in fp32; None for others'."""
        if self.arrived is None:
            found = [] if self.gradients is None else self.gradients.wait()
            self.arrived, self.gradients = [None if one is None else _wide(one).contiguous() for one in found], None
        return self.arrived

    def drain(self) -> Held:
        """Wait for all that is under way: the results, if there are any."""
        if self.gradients is not None:
            self.gradients.wait()
        return [] if self.results is None else self.results.wait()


class OwnedPart(StepPart):
    """A part whose gradients go to owners and whose results come back."""

    _under_way: list[Any]  # buckets

    def _accept(self, one: Any, results: Held) -> None:
        """Change weights and state by what came back in a bucket."""
        raise NotImplementedError

    def _counts(self, one: Any, place: int) -> bool:
        """Whether a gradient that this rank owns counts in the norm here."""
        return True

    def advance(self, bucket: int) -> None:
        """Over data x tensor ranks gradients and results travel in two hops."""
        moving = self._under_way[bucket].results or self._under_way[bucket].gradients
        if moving is not None:
            moving.advance()

    def wait_sent(self, bucket: int) -> None:
        if (moving := self._under_way[bucket].gradients) is not None:
            moving.wait_sent()  # a message of one gradient carries the gradient itself

    def squared_norm(self, bucket: int) -> Tensor:
        """Of the whole gradients this rank owns, each element once."""
        one = self._under_way[bucket]
        if not (grads := [x for at, x in enumerate(one.arrive()) if x is not None and self._counts(one, at)]):
            return torch.zeros((), dtype=torch.float64)
        squares = torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float64)).square_()
        return squares.sum() if runs_behind(squares.device) else squares.cumsum(0)[-1]  # in their order

    def commit(self, accepted: bool) -> None:
        """Take the results that come back."""
        under_way, self._under_way = self._under_way, []
        for one in under_way:
            results = one.drain()
            if accepted:
                self._accept(one, results)


def _filled(by_rank: dict[int, list[Tensor]]) -> list[tuple[int, list[Tensor]]]:
    """What is not empty, in rank order."""
    kept = ((rank, [tensor for tensor in tensors if tensor.numel()]) for rank, tensors in sorted(by_rank.items()))
    return [(rank, tensors) for rank, tensors in kept if tensors]


def _joined(role: Role, parts: list[Tensor]) -> Tensor:
    """The pieces of all ranks of an axis as one tensor: side by side, or their mean."""
    if isinstance(role, Sharded):
        return torch.cat(parts, role.dim)
    # The sum of parts over a power of two fits wherever the mean does, and nobody need look whether it did. That rounds
    # nothing but numbers next to the smallest there are.
    power = 2.0 ** -math.ceil(math.log2(len(parts)))
    total = _wide(parts[0]) * power
    for part in parts[1:]:
        total.add_(part, alpha=power)
    return total.div_(len(parts) * power)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
