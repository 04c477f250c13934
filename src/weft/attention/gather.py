"""Gather: everybody's keys and values, a few heads at a time, while the heads before them are computed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from weft.attention.geometry import Held, count, unite
from weft.attention.stage import Returns, Stage, Trip, messages
from weft.comm import Pending


def gather(trip: Trip) -> Iterator[Stage]:
    """The own block, then a stage for each step of ``trip.strides`` with all the others' keys that are needed here.

    Two steps are under way before the first computation, and each later one is sent for when the buffers of the
    step two before it are free. In the backward the gradients of a step travel while the next is computed, and the
    second half of the own block comes last.
    """
    geometry, rank = trip.geometry, trip.rank
    lent = {other: geometry.lent(rank, other) for other in trip.others}
    borrowed = {other: geometry.lent(other, rank) for other in trip.others}
    packed = unite(lent.values())
    held: list[Held] = []
    begins: dict[int, int] = {}
    tokens = 0
    for owner, ranges in borrowed.items():
        begins[owner] = tokens
        held += geometry.place(owner, ranges, tokens)
        tokens += count(ranges)
    ends = list(accumulate(trip.strides))
    steps = [slice(end - width, end) for end, width in zip(ends, trip.strides, strict=True)]
    widest = max(trip.strides)
    slots = range(min(2, len(steps)))
    inboxes = [trip.room(tokens, widest) for _ in slots]
    outboxes = [trip.room(count(packed), widest) for _ in slots]

    def send_for(step: int) -> Pending[None]:
        heads = steps[step]
        outbox = trip.pack(outboxes[step % 2], packed, heads)
        inbox = trip.shape(inboxes[step % 2], tokens, heads.stop - heads.start)
        outgoing = [m for other, ranges in lent.items() for m in messages(other, outbox, ranges, packed)]
        incoming = [
            m for owner, ranges in borrowed.items() for m in messages(owner, inbox, ranges, ranges, begins[owner])
        ]
        return trip.call.exchange(outgoing, incoming)

    returns = None
    if trip.is_backward:
        returns = Returns(trip, tokens, sum(count(ranges) for ranges in lent.values()), widest)
    before, after = trip.split_own()
    flying = {step: send_for(step) for step in slots}
    yield from trip.own(before)
    for step, heads in enumerate(steps):
        width = heads.stop - heads.start
        flying.pop(step).wait()
        sums = None if returns is None else returns.blank(tokens, width)
        yield trip.stage(trip.shape(inboxes[step % 2], tokens, width), held, heads, sums)
        if returns is not None and sums is not None:
            owners = [(owner, ranges, ranges, begins[owner]) for owner, ranges in borrowed.items()]
            returns.send(sums, owners, list(lent.items()), heads)
        if step + 2 < len(steps):
            flying[step + 2] = send_for(step + 2)
    yield from trip.own(after)
    if returns is not None:
        returns.settle()
