"""Layouts for tests of operations over a sequence."""

from __future__ import annotations

import pytest

from weft.ops.sequence.layout import ANY_LENGTHS, LAYOUTS, lay_out, shard_runs
from weft.ops.sequence.runs import Runs

# Where layouts are one axis of a large matrix, `make soak` runs it for "balanced".
EVERY_LAYOUT = [*ANY_LENGTHS, *(pytest.param(one, marks=pytest.mark.slow) for one in LAYOUTS if one not in ANY_LENGTHS)]


def runs_of(lengths: tuple[int, ...], layout: str, bounds: tuple[int, ...] | None = None) -> Runs:
    """The runs of ranks that hold these many tokens, or of so many ranks that are dealt as many together."""
    if layout in ANY_LENGTHS:
        return lay_out(lengths, layout)
    return shard_runs(sum(lengths), layout, len(lengths), bounds)
