"""tree (Blelloch, as Brent and Kung lay it out): up-sweep, down-sweep, then a shift by one rank."""

from __future__ import annotations

from torch import Tensor

from weft.comm.rounds import Expect, Path, Round, Schedule
from weft.ops.scan.affine import Affine, Form


def tree(path: Path, form: Form) -> Schedule[Tensor | None]:
    """At most 2 ceil(log2 P) + 1 rounds, for any P.

    Up: at step s the ranks with r % 2s == 2s-1 take in the map of r-s. Down, from the largest step: the same
    ranks, who now hold the prefix 0..r, send its state to r+s, who lacks just that. Decays travel up only.
    """
    rank, size = path.rank, path.size
    levels = (size - 1).bit_length()
    up = [(number, 1 << number) for number in range(levels)]
    down = [(2 * levels - 1 - number, step) for number, step in reversed(up)]
    shift = 2 * levels
    earlier = {number: form.empty() for number, step in up if rank % (2 * step) == 2 * step - 1}
    above = {
        number: form.new_empty(*form.shape) for number, step in down if rank % (2 * step) == step - 1 and rank >= step
    }
    entering = form.new_empty(*form.shape) if rank else None

    local: Affine = yield Expect(
        [(number, rank - step, earlier[number].flat) for number, step in up if number in earlier]
        + [(number, rank - step, above[number]) for number, step in down if number in above]
        + ([] if entering is None else [(shift, rank - 1, entering)])
    )
    window = local
    for number, step in up:
        if number in earlier:
            yield Round(number)
            window = earlier[number].then(window)
        elif rank % (2 * step) == step - 1 and rank + step < size:
            yield Round(number, [(rank + step, window.flat)])
    prefix = window.state  # complete on ranks 0, 1, 3, 7, ...
    for number, step in down:
        if number in above:
            yield Round(number)
            prefix = window.apply(above[number])
        elif rank % (2 * step) == 2 * step - 1 and rank + step < size:
            yield Round(number, [(rank + step, prefix.view(-1))])
    yield Round(shift, [(rank + 1, prefix.view(-1))] if rank + 1 < size else [])
    return entering
