"""Which samples a rank reads: the same within a context group, others in the next; and the parts a loader gives."""

from __future__ import annotations

import pickle
import re

import pytest
import torch
from torch import Tensor
from trained import SAMPLES, Texts, collate
from worlds import virtual_world

import weft
from weft.integrations.transformers import ContextParallel


def two_by_three(axis: weft.Axis) -> tuple[ContextParallel, weft.Axis]:
    """(context group of 3, data group of 2) of 6 ranks."""
    row, column = divmod(axis.rank, 3)
    return ContextParallel(axis.subset([3 * row + i for i in range(3)])), axis.subset([column, column + 3])


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_samples_by_data_rank(shuffle: bool, drop_last: bool) -> None:
    def run(axis: weft.Axis) -> list[list[int]]:
        cp, data = two_by_three(axis)
        sampler = cp.sampler(range(9), data=data, shuffle=shuffle, drop_last=drop_last, seed=4)
        orders = []
        for epoch in range(2):
            sampler.set_epoch(epoch)
            orders.append(list(sampler))
            assert len(sampler) == len(orders[-1])
        return orders

    found = virtual_world(6).run(run).results
    assert found[0] == found[1] == found[2] and found[3] == found[4] == found[5]
    assert (found[0][0] != found[0][1]) == shuffle
    for epoch in range(2):
        mine, other = found[0][epoch], found[3][epoch]
        assert len(mine) == len(other) == (4 if drop_last else 5)
        assert set(mine) | set(other) == set(range(9)) or drop_last
        assert len({*mine, *other}) == (8 if drop_last else 9)
        if not shuffle:
            assert mine[:4] == [0, 2, 4, 6] and other[:4] == [1, 3, 5, 7]


def test_several_data_ranks_must_be_named() -> None:
    def run(axis: weft.Axis) -> str:
        cp, _ = two_by_three(axis)
        try:
            cp.sampler(range(9))
        except ValueError as error:
            return str(error)
        return "nothing"

    for words in virtual_world(6).run(run).results:
        assert "of 6 ranks 3 are one context group" in words and "pass data=mesh['dp']" in words


def test_too_few_samples_and_a_collator_that_does_not_cut() -> None:
    def run(axis: weft.Axis) -> str:
        cp, data = two_by_three(axis)
        with pytest.raises(ValueError, match="1 samples are too few for 2 data ranks"):
            cp.sampler(range(1), data=data, drop_last=True)
        with pytest.raises(TypeError, match=re.escape("must be what cp.collator(inner) returns, got function")):
            cp.loader(Texts(), 2, collate, data=data)
        with pytest.raises(TypeError, match="a generator has no length"):
            cp.loader((text for text in Texts()), 2, cp.collator(collate), data=data)  # type: ignore[attr-defined]
        return "done"

    assert virtual_world(6).run(run).results == ["done"] * 6


def test_parts_of_a_loader_are_the_whole_together() -> None:
    """Also read by other processes, to which the collator travels."""
    cp = ContextParallel(layout="zigzag")
    wanted = [collate([Texts()[index] for index in pair]) for pair in ((0, 1), (2, 3))]
    loader = cp.loader(Texts(), 2, cp.collator(collate), shuffle=False, num_workers=1)
    found = [batch for batch, _ in zip(loader, wanted, strict=False)]
    for part, whole in zip(found, wanted, strict=True):
        assert torch.equal(part["input_ids"], whole["input_ids"]) and part["weft"].length == whole["labels"].shape[1]
    assert pickle.loads(pickle.dumps(found[0]["weft"])) == found[0]["weft"]
    assert len(loader) == SAMPLES // 2

    def run(axis: weft.Axis) -> tuple[Tensor, Tensor]:
        ranks = ContextParallel(axis)
        part = next(iter(ranks.loader(Texts(), 2, ranks.collator(collate), shuffle=False)))
        sequence = ranks.sequence(part)
        return tuple(weft.unshard(part[name], 1, sequence=sequence) for name in ("input_ids", "shift_labels"))  # type: ignore

    for ids, targets in virtual_world(3).run(run).results:
        assert torch.equal(ids, wanted[0]["input_ids"])
        assert torch.equal(targets[:, :-1], wanted[0]["labels"][:, 1:]) and bool((targets[:, -1] == -100).all())


def test_a_loader_passes_the_epoch_on() -> None:
    cp = ContextParallel()
    loader = cp.loader(Texts(), 1, cp.collator(collate))
    first = [part["input_ids"].tolist() for part in loader]
    loader.set_epoch(1)
    assert [part["input_ids"].tolist() for part in loader] != first
    loader.set_epoch(0)
    assert [part["input_ids"].tolist() for part in loader] == first


def test_a_sequence_needs_a_part_with_one() -> None:
    cp, batch = ContextParallel(), collate([Texts()[0], Texts()[1]])
    assert cp.sequence(cp.shard(batch)).bounds is None
    with pytest.raises(ValueError, match=re.escape("no part from cp.shard")):
        cp.sequence(batch)
    packed = {"input_ids": batch["input_ids"], "position_ids": torch.arange(batch["input_ids"].shape[1])[None] % 3}
    with pytest.raises(ValueError, match="2 rows with packed documents have no one sequence"):
        cp.sequence(cp.shard(packed))
