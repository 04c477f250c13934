"""Ring: keys and values of one rank after the other, handed from neighbour to neighbour."""

from __future__ import annotations

from collections.abc import Iterator

from weft.attention.geometry import Ranges, count, unite
from weft.attention.stage import Returns, Stage, Trip, messages
from weft.comm import Pending


def ring(trip: Trip) -> Iterator[Stage]:
    """The own block, then a stage for each other rank's keys as they come by, all heads at once.

    A hop carries only tokens that the next rank or one behind it on the ring still needs; a block that nobody needs
    any more stops. In the backward the keys go round again and a block's gradients go straight to its owner, where
    they are summed: fewer bytes than with the sums going round, and no sum is rounded on the way.
    """
    geometry, rank, size = trip.geometry, trip.rank, trip.call.size
    heads = slice(0, trip.kv_heads)

    def carried(owner: int, at: int) -> Ranges:
        """What rank ``at`` gets of the owner's tokens: what it and the ranks after it need."""
        ahead = (owner - at) % size
        return unite(geometry.lent(owner, (at + hop) % size) for hop in range(ahead))

    cargos = [carried((rank - hop) % size, rank) for hop in range(1, size)]
    largest = max((count(cargo) for cargo in cargos), default=0)
    boxes = [trip.room(largest, trip.kv_heads) for _ in range(min(2, size - 1))]
    gift = carried(rank, (rank + 1) % size)
    current = trip.pack(trip.room(count(gift), trip.kv_heads), gift, heads)
    present = gift
    borrowers = [geometry.lent(rank, (rank + hop) % size) for hop in range(1, size)]
    returns = None
    if trip.is_backward:
        returns = Returns(trip, largest, max(map(count, borrowers), default=0), trip.kv_heads)

    def pass_on(hop: int) -> Pending[None]:
        """Hop ``hop``: hand on what is here, take what comes."""
        owner, after = (rank - hop + 1) % size, (rank + 1) % size
        outgoing = messages(after, current, carried(owner, after), present)
        cargo = cargos[hop - 1]
        inbox = trip.shape(boxes[hop % len(boxes)], count(cargo), trip.kv_heads)
        return trip.call.exchange(outgoing, messages((rank - 1) % size, inbox, cargo, cargo))

    before, after = trip.split_own()
    flying = pass_on(1) if size > 1 else None
    yield from trip.own(before)
    for hop in range(1, size):
        assert flying is not None
        flying.wait()
        owner, present = (rank - hop) % size, cargos[hop - 1]
        current = trip.shape(boxes[hop % len(boxes)], count(present), trip.kv_heads)
        flying = pass_on(hop + 1) if hop + 1 < size else None
        sums = None if returns is None else returns.blank(count(present), trip.kv_heads)
        yield trip.stage(current, geometry.place(owner, present), heads, sums)
        if returns is not None and sums is not None:
            owners = [(owner, geometry.lent(owner, rank), present, 0)]
            returns.send(sums, owners, [((rank + hop) % size, borrowers[hop - 1])], heads)
    yield from trip.own(after)
    if returns is not None:
        returns.settle()
