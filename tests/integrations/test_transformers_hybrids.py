"""Hybrid models on virtual ranks: the loss and every gradient are those of one process with each document alone."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hybrids import HYBRIDS, each_alone, make_hybrid
from tiny import Result, distance, packed_batch, padded_batch, plain_batch, shared, sum_of
from torch import Tensor
from worlds import virtual_world

import weft
from weft.integrations.transformers import ContextParallel
from weft.integrations.transformers.mixers import FAMILIES
from weft.ops.sequence.layout import LAYOUTS

transformers = pytest.importorskip("transformers", reason="the extra weft-torch[transformers] is not installed")
VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
pytestmark = pytest.mark.skipif(VERSION < (5, 15), reason="hybrid models need transformers 5.15")

# Models in fp64 whose gates, norms and scans transformers computes in fp32; Olmo's rates up to 2 and
# Bailing's gates of 1 make the rounding grow. A state or a halo that is lost is an error of 0.1 and more.
ROUNDING = {name: 1e-4 if name in ("olmo_hybrid", "bailing_hybrid") else 2e-5 for name in HYBRIDS}


def packed_rows() -> dict[str, Tensor]:
    """Rows with different documents, some of which end where a shard of 2 or 3 ranks does."""
    rows = [packed_batch(36, cuts, seed) for seed, cuts in enumerate([(12, 13, 24), (9,), (18, 30)])]
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


BATCHES = {"plain": plain_batch, "packed": packed_batch, "packed rows": packed_rows, "padded": padded_batch}


def on_ranks(
    size: int, name: str, batch: dict[str, Tensor], layout: str = "zigzag", *, prepare: Any = None,
    dtype: torch.dtype = torch.float64, **changes: Any,
) -> Result:  # fmt: skip
    def run(axis: weft.Axis) -> Result:
        cp, model = ContextParallel(axis, layout=layout), make_hybrid(name, dtype, **changes)
        if prepare is not None:
            prepare(model)
        cp.enable(model)
        return shared(cp, model, batch, own_loss=False)

    return sum_of(virtual_world(size).run(run).results)


def test_every_family_has_a_model_here() -> None:
    assert HYBRIDS.keys() == FAMILIES.keys()


@pytest.mark.parametrize("name", HYBRIDS)
def test_every_family_has_the_gradients_of_one_process(name: str) -> None:
    """Three ranks: two would hide a shift."""
    for layout, kind in zip(LAYOUTS, ("plain", "packed"), strict=True):
        batch = BATCHES[kind]()
        assert distance(on_ranks(3, name, batch, layout), each_alone(make_hybrid(name), batch)) < ROUNDING[name], kind


@pytest.mark.slow
@pytest.mark.parametrize("name", HYBRIDS)
def test_every_combination(name: str) -> None:
    for kind, layout, size in itertools.product(BATCHES, LAYOUTS, (1, 2, 3, 4)):
        batch = BATCHES[kind]()
        wanted = each_alone(make_hybrid(name), batch)
        assert distance(on_ranks(size, name, batch, layout), wanted) < ROUNDING[name], (kind, layout, size)
