"""tree (Blelloch, as Brent and Kung lay it out): up-sweep, down-sweep, then a shift by one rank."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.comm import Axis
from weft.scan.affine import Affine


def tree(axis: Axis, local: Affine, blocks: int | None) -> Tensor | None:
    """At most 2 ceil(log2 P) + 1 rounds, for any P.

    Up: at step s the ranks with r % 2s == 2s-1 take in the map of r-s. Down, from the largest step: the same
    ranks, who now hold the prefix 0..r, send its state to r+s, who lacks just that. Decays travel up only.
    """
    rank, size = axis.rank, axis.size
    window, step = local, 1
    while step < size:
        if rank % (2 * step) == 2 * step - 1:
            earlier = window.empty_like()
            axis.receive(earlier.flat, rank - step).wait()
            window = earlier.then(window)
        elif rank % (2 * step) == step - 1 and rank + step < size:
            axis.send(window.flat, rank + step).wait()
        step *= 2
    prefix = window.state  # complete on ranks 0, 1, 3, 7, ...
    while step > 1:
        step //= 2
        if rank % (2 * step) == 2 * step - 1 and rank + step < size:
            axis.send(prefix.view(-1), rank + step).wait()
        elif rank % (2 * step) == step - 1 and rank >= step:
            earlier_state = torch.empty_like(local.state)
            axis.receive(earlier_state, rank - step).wait()
            prefix = window.apply(earlier_state)
    entering = torch.empty_like(local.state)
    axis.exchange(
        sends=[(rank + 1, prefix.view(-1))] if rank + 1 < size else [],
        receives=[(rank - 1, entering)] if rank > 0 else [],
    ).wait()
    return entering if rank > 0 else None
