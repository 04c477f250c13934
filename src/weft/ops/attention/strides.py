"""How many key/value heads travel at a time."""

from __future__ import annotations

from weft.comm.arguments import find_integer_fault, show

_MOST_HEADS = 1 << 16


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
