"""Gather: everybody's keys and values, a few heads at a time, while the heads before them are computed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from weft.comm import Pending
from weft.ops.attention.kv_exchange import GradReturn, KVBlock, KVExchange, take
from weft.ops.attention.plan import KeySpan, count, unite


def gather(kv: KVExchange) -> Iterator[KVBlock]:
    """The own block, then one for each step of ``kv.strides`` with all the others' keys that are needed here.

    Two steps are under way before the first computation, and each later one is sent for when the buffers of the
    step two before it are free. In the backward the gradients of a step travel while the next is computed, and the
    second half of the own block comes last.
    """
    plan, rank = kv.plan, kv.rank
    wanted = {other: plan.visible_to(rank, other) for other in kv.call.others}  # of this rank's keys
    needed = {other: plan.visible_to(other, rank) for other in kv.call.others}  # of theirs
    packed = unite(wanted.values())
    spans: list[KeySpan] = []
    begins: dict[int, int] = {}
    tokens = 0
    for owner, ranges in needed.items():
        begins[owner] = tokens
        spans += plan.place(owner, ranges, tokens)
        tokens += count(ranges)
    ends = list(accumulate(kv.strides))
    steps = [slice(end - width, end) for end, width in zip(ends, kv.strides, strict=True)]
    widest = max(kv.strides)
    slots = range(min(2, len(steps)))
    inboxes = [kv.room(tokens, widest) for _ in slots]
    outboxes = [kv.room(count(packed), widest) for _ in slots]

    def send_for(step: int) -> Pending[None]:
        heads = steps[step]
        inbox = kv.shape(inboxes[step % 2], tokens, heads.stop - heads.start)
        coming = kv.call.expect(
            [(owner, inbox[begins[owner] : begins[owner] + count(ranges)]) for owner, ranges in needed.items()]
        )
        outbox = kv.pack(outboxes[step % 2], packed, heads)
        return kv.call.exchange([(other, take(outbox, ranges, packed)) for other, ranges in wanted.items()], coming)

    grads = None
    if kv.is_backward:
        grads = GradReturn(kv, tokens, sum(count(ranges) for ranges in wanted.values()), widest)
    flying = {step: send_for(step) for step in slots}
    yield from kv.own_first()
    for step, heads in enumerate(steps):
        width = heads.stop - heads.start
        flying.pop(step).wait()
        sums = None if grads is None else grads.blank(tokens, width)
        yield kv.block(kv.shape(inboxes[step % 2], tokens, width), spans, heads, sums)
        if grads is not None and sums is not None:
            owners = [(owner, ranges, ranges, begins[owner]) for owner, ranges in needed.items()]
            grads.send(sums, owners, list(wanted.items()), heads)
        if step + 2 < len(steps):
            flying[step + 2] = send_for(step + 2)
    yield from kv.own_last()
    if grads is not None:
        grads.flush()
