"""Ring: keys and values of one rank after the other, handed from neighbour to neighbour."""

from __future__ import annotations

from collections.abc import Iterator

from weft.comm.call import Expected
from weft.ops.attention.kv_exchange import GradReturn, KVBlock, KVExchange, take
from weft.ops.attention.plan import Ranges, count, unite


def ring(kv: KVExchange) -> Iterator[KVBlock]:
    """The own block, then one for each other rank's keys as they come by, all heads at once.

    A hop carries only tokens that the next rank or one behind it on the ring still needs; a block that nobody needs
    any more stops. In the backward the keys go round again and a block's gradients go straight to its owner, where
    they are summed: fewer bytes than with the sums going round, and no sum is rounded on the way.
    """
    plan, rank, size = kv.plan, kv.rank, kv.call.size
    heads = slice(0, kv.kv_heads)
    after, before = (rank + 1) % size, (rank - 1) % size

    def carried(owner: int, at: int) -> Ranges:
        """What rank ``at`` gets of the owner's tokens: what it and the ranks after it need."""
        ahead = (owner - at) % size
        return unite(plan.visible_to(owner, (at + hop) % size) for hop in range(ahead))

    arriving = [carried((rank - hop) % size, rank) for hop in range(1, size)]
    largest = max(map(count, arriving), default=0)
    buffers = [kv.buffer(largest, kv.kv_heads) for _ in range(min(2, size - 1))]

    def expect(hop: int) -> Expected:
        """Say what hop ``hop`` will bring, as soon as its memory is free."""
        tokens = count(arriving[hop - 1])
        return kv.call.expect([(before, kv.view(buffers[hop % len(buffers)], tokens, kv.kv_heads))])

    expected = {hop: expect(hop) for hop in range(1, min(3, size))}
    present = carried(rank, after)
    current = kv.pack(kv.buffer(count(present), kv.kv_heads), present, heads)
    readers = [plan.visible_to(rank, (rank + hop) % size) for hop in range(1, size)]
    grads = None
    if kv.is_backward:
        grads = GradReturn(kv, largest, max(map(count, readers), default=0), kv.kv_heads)

    pending = kv.call.exchange([(after, current)], expected.pop(1)) if size > 1 else None
    yield from kv.own_first()
    for hop in range(1, size):
        assert pending is not None
        pending.wait()
        owner, present = (rank - hop) % size, arriving[hop - 1]
        current = kv.view(buffers[hop % len(buffers)], count(present), kv.kv_heads)
        sent = None
        if hop + 1 < size:
            if hop + 1 not in expected:
                expected[hop + 1] = expect(hop + 1)
            sent = kv.call.exchange([(after, take(current, carried(owner, after), present))], expected.pop(hop + 1))
        sums = None if grads is None else grads.zeros(count(present), kv.kv_heads)
        yield kv.block(current, plan.place(owner, present), heads, sums)
        if grads is not None and sums is not None:
            owners = [(owner, plan.visible_to(owner, rank), present, 0)]
            grads.send(sums, owners, [((rank + hop) % size, readers[hop - 1])], heads)
        pending = sent
    yield from kv.own_last()
    if grads is not None:
        grads.flush()
