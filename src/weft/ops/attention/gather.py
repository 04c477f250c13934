"""Gather: everybody's keys and values, a few heads at a time, while the heads before them are computed.

How many at a time are the *strides*: a tuple that sums to the number of key/value heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from weft.comm import Pending
from weft.comm.arguments import find_integer_fault, show
from weft.ops.attention.kv_exchange import GradReturn, KVBlock, KVExchange, rearrange, take
from weft.ops.attention.plan import AttentionPlan, KeySpan, count, unite

_MOST_HEADS = 1 << 16


def gather(kv: KVExchange) -> Iterator[KVBlock]:
    """The own block, then one for each step of the strides with all the others' keys that are needed here.

    Keys arrive owner by owner. Where a kernel is then called less often, they are put in the order of the sequence.

    Two steps are under way before the first computation, and each later one is sent for when the buffers of the
    step two before it are free. In the backward the gradients of a step travel while the next is computed, and the
    second half of the own block comes last.
    """
    plan, rank = kv.plan, kv.rank
    wanted = {other: plan.visible_to(rank, other) for other in kv.call.others}  # of this rank's keys
    needed = {other: plan.visible_to(other, rank) for other in kv.call.others}  # of theirs
    packed = unite(wanted.values())
    arrived: list[KeySpan] = []  # how they lie when they arrive
    begins: dict[int, int] = {}
    tokens = 0
    for owner, ranges in needed.items():
        begins[owner] = tokens
        arrived += plan.place(owner, ranges, tokens)
        tokens += count(ranges)
    spans = order_keys(plan, rank, tuple(arrived))  # how they are computed
    strides = kv.strides or choose_strides(kv.kv_heads, kv.call.size)
    steps = [slice(end - width, end) for end, width in zip(accumulate(strides), strides, strict=True)]
    widest = max(strides)
    slots = range(min(2, len(steps)))
    receive_buffers = [kv.buffer(tokens, widest) for _ in slots]
    ordered = kv.buffer(tokens, widest) if spans != tuple(arrived) else None
    send_buffers = [kv.buffer(count(packed), widest) for _ in slots]

    def send_for(step: int) -> Pending[None]:
        heads = steps[step]
        received = kv.view(receive_buffers[step % 2], tokens, heads.stop - heads.start)
        expected = kv.call.expect(
            [(owner, received[begins[owner] : begins[owner] + count(ranges)]) for owner, ranges in needed.items()]
        )
        sent = kv.pack(send_buffers[step % 2], packed, heads)
        return kv.call.exchange([(other, take(sent, ranges, packed)) for other, ranges in wanted.items()], expected)

    grads = None
    if kv.is_backward:
        own_tokens = sum(count(ranges) for ranges in wanted.values())
        grads = GradReturn(kv, tokens, own_tokens, widest, None if ordered is None else (spans, arrived))
    pending = {step: send_for(step) for step in slots}
    yield from kv.own_first()
    for step, heads in enumerate(steps):
        width = heads.stop - heads.start
        pending.pop(step).wait()
        sums = None if grads is None else grads.zeros(tokens, width)
        keys = kv.view(receive_buffers[step % 2], tokens, width)
        if ordered is not None:
            keys = rearrange(keys, arrived, spans, kv.view(ordered, tokens, width))
        yield kv.block(keys, spans, heads, sums)
        if grads is not None and sums is not None:
            owners = [(owner, ranges, ranges, begins[owner]) for owner, ranges in needed.items()]
            grads.send(sums, owners, list(wanted.items()), heads)
        if step + 2 < len(steps):
            pending[step + 2] = send_for(step + 2)
    yield from kv.own_last()
    if grads is not None:
        grads.flush()


def order_keys(plan: AttentionPlan, rank: int, arrived: tuple[KeySpan, ...]) -> tuple[KeySpan, ...]:
    """The keys one after the other in the order of the sequence, if the rank then has fewer blocks, else as given."""
    ordered, at = [], 0
    for span in sorted(arrived, key=lambda span: span.offset):
        ordered.append(KeySpan(at, span.length, span.offset))
        at += span.length
    spans = tuple(ordered)
    before, after = (sum(len(blocks) for _, blocks in plan.blocks(rank, each)) for each in (arrived, spans))
    return spans if after < before else arrived


def head_strides(kv_heads: int, stride: int, first: int | None = None, last: int | None = None) -> tuple[int, ...]:
    """Steps of ``stride`` heads with a small first and a small last step: (first, stride - first, stride, ...,
    stride - last, last). A split is left out where ``first`` or ``last`` is None.

    >>> head_strides(8, 4, first=1, last=1)
    (1, 3, 3, 1)
    >>> head_strides(6, 2)
    (2, 2, 2)
    """
    for name, value in (("kv_heads", kv_heads), ("stride", stride), ("first", first), ("last", last)):
        if name in ("first", "last") and value is None:
            continue
        if fault := find_integer_fault("head_strides", name, value, None):
            raise fault
    if kv_heads > _MOST_HEADS:
        raise ValueError(f"head_strides: {kv_heads} key/value heads are more than {_MOST_HEADS}")
    if kv_heads < 1 or stride < 1 or kv_heads % stride:
        raise ValueError(
            f"head_strides: {kv_heads} key/value heads are not a multiple of a stride of {stride}; "
            f"choose a stride that divides {kv_heads}"
        )
    for name, part in (("first", first), ("last", last)):
        if part is not None and not 0 < part < stride:
            raise ValueError(f"head_strides: {name} must be between 1 and stride - 1 = {stride - 1}, got {part}")
    head = [] if first is None else [first, stride - first]
    tail = [] if last is None else [stride - last, last]
    whole = kv_heads - sum(head) - sum(tail)
    if whole < 0:
        raise ValueError(
            f"head_strides: {kv_heads} key/value heads are too few to split a first and a last stride of {stride}; "
            f"at least {2 * stride} are needed"
        )
    return (*head, *[stride] * (whole // stride), *tail)


def choose_strides(kv_heads: int, size: int) -> tuple[int, ...]:
    """Steps that double from a P-th of the heads to a quarter of them and back.

    The own block is about a P-th of a rank's work, so it hides the first (and the last) P-th of the heads. Buffers
    are two of the largest step.

    >>> choose_strides(8, 2), choose_strides(8, 4), choose_strides(32, 16)
    ((4, 4), (2, 2, 2, 2), (2, 4, 7, 7, 6, 4, 2))
    """
    first = max(1, kv_heads // size)
    largest = max(first, kv_heads // 4)
    ramp: list[int] = []
    while (step := first * 2 ** len(ramp)) < largest:
        ramp.append(step)
    middle = kv_heads - 2 * sum(ramp)
    steps = -(-middle // largest)
    even = [middle // steps + (index < middle % steps) for index in range(steps)]
    return (*ramp, *even, *reversed(ramp))


def find_strides_fault(name: str, kv_heads: int, strides: object, rank: int) -> Exception | None:
    """The error for a pattern that does not cover the heads."""
    if not isinstance(strides, tuple | list) or any(
        find_integer_fault("attention", name, stride, rank, least=1) for stride in strides
    ):
        words = f"must be a tuple of positive integers, got {show(strides)}"
        return ValueError(f"attention: {name} {words} (rank {rank})")
    if sum(strides) != kv_heads:
        return ValueError(
            f"attention: {kv_heads} key/value heads cannot be split into {name} {tuple(strides)} (rank {rank}); "
            f"{name} must sum to {kv_heads}"
        )
    return None
