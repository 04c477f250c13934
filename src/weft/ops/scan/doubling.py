"""doubling: exclusive recursive doubling, the fewest rounds a scan can have."""

from __future__ import annotations

from torch import Tensor

from weft.comm.rounds import Expect, Path, Round, Schedule
from weft.ops.scan.affine import Affine, Form


def doubling(path: Path, form: Form) -> Schedule[Tensor | None]:
    """ceil(log2 P) rounds, exact for maps that do not commute, no shift at the end.

    A rank keeps two windows of maps: ``window`` ends with its own, ``before`` ends just ahead of it. In round
    s it sends ``window`` to r+s, receives that of r-s and puts it in front of both. Decays do not travel in
    the last round.
    """
    rank, size = path.rank, path.size
    steps = [1 << number for number in range((size - 1).bit_length())]
    earlier = {step: form.empty() for step in steps if rank >= step}

    def message(window: Affine, step: int) -> Tensor:
        return window.state_flat if 2 * step >= size else window.flat

    local: Affine = yield Expect(
        [(number, rank - step, message(earlier[step], step)) for number, step in enumerate(steps) if rank >= step]
    )
    window, before = local, None
    for number, step in enumerate(steps):
        yield Round(number, [(rank + step, message(window, step))] if rank + step < size else [])
        if rank >= step and 2 * step >= size:
            return before.apply(earlier[step].state) if before else earlier[step].state
        if rank >= step:
            before = earlier[step].then(before) if before else earlier[step]
            window = earlier[step].then(window)
    return before.state if before else None
