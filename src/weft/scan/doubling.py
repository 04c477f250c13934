"""doubling: exclusive recursive doubling, the fewest rounds a scan can have."""

from __future__ import annotations

from torch import Tensor

from weft.comm import Axis
from weft.scan.affine import Affine


def doubling(axis: Axis, local: Affine, blocks: int | None) -> Tensor | None:
    """ceil(log2 P) rounds, exact for maps that do not commute, no shift at the end.

    A rank keeps two windows of maps: ``window`` ends with its own, ``before`` ends just ahead of it. In round
    s it sends ``window`` to r+s, receives that of r-s and puts it in front of both. Decays do not travel in
    the last round.
    """
    rank, size = axis.rank, axis.size
    window, before = local, None
    step = 1
    while step < size:
        last = 2 * step >= size
        earlier = local.empty_like() if rank >= step else None
        axis.exchange(
            sends=[(rank + step, window.state_flat if last else window.flat)] if rank + step < size else [],
            receives=[(rank - step, earlier.state_flat if last else earlier.flat)] if earlier else [],
        ).wait()
        if earlier and last:
            return before.apply(earlier.state) if before else earlier.state
        if earlier:
            before = earlier.then(before) if before else earlier
            window = earlier.then(window)
        step *= 2
    return before.state if before else None
