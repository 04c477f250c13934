from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from worlds import virtual_world

import weft
from weft.ops.sequence.layout import ANY_LENGTHS, LAYOUTS, lay_out, shard_lengths

pytestmark = pytest.mark.usefixtures("every_network")


@given(st.integers(0, 40), st.integers(1, 9), st.sampled_from(LAYOUTS), st.integers(0, 2))
def test_unshard_undoes_shard(total: int, size: int, layout: str, dim: int) -> None:
    shape = [2, 3, 4]
    shape[dim] = total
    x = torch.randn(shape)

    def program(axis: weft.Axis) -> torch.Tensor:
        mine = weft.shard(x, dim, layout=layout, group=axis)
        assert mine.shape[dim] == shard_lengths(total, layout, size)[axis.rank]
        return weft.unshard(mine, dim, layout=layout, group=axis)

    for whole in virtual_world(size).run(program).results:
        assert torch.equal(whole, x)


@given(st.lists(st.integers(0, 7), min_size=1, max_size=6), st.sampled_from(ANY_LENGTHS))
def test_slices_of_any_lengths_make_one_sequence(lengths: list[int], layout: str) -> None:
    runs = lay_out(tuple(lengths), layout)
    assert [run.offset for run in runs] == [sum(r.length for r in runs[:i]) for i in range(len(runs))]
    numbers = torch.arange(sum(lengths))

    def program(axis: weft.Axis) -> torch.Tensor:
        mine = torch.cat([numbers[r.offset : r.offset + r.length] for r in runs if r.rank == axis.rank])
        assert len(mine) == lengths[axis.rank]
        return weft.unshard(mine, 0, layout=layout)

    assert all(torch.equal(whole, numbers) for whole in virtual_world(len(lengths)).run(program).results)


def test_zigzag_gives_rank_r_the_parts_r_and_its_mirror() -> None:
    run = virtual_world(3).run(lambda axis: weft.shard(torch.arange(12), 0, layout="zigzag").tolist())
    assert run.results == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    uneven = virtual_world(2).run(lambda axis: weft.shard(torch.arange(7), 0, layout="zigzag").tolist())
    assert uneven.results == [[0, 1, 6], [2, 3, 4, 5]]  # parts of 2, 2, 2 and 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_add_up_over_the_ranks_that_used_the_whole(layout: str) -> None:
    weights = [torch.randn(7, 2, dtype=torch.float64) for _ in range(3)]

    def program(axis: weft.Axis) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.ones(7, 2, dtype=torch.float64).requires_grad_()
        mine = weft.shard(x, 0, layout=layout)
        whole = weft.unshard(mine, 0, layout=layout)
        (whole * weights[axis.rank]).sum().backward()
        return weft.shard(sum(weights), 0, layout=layout), weft.shard(x.grad, 0, layout=layout)

    for wanted, got in virtual_world(3).run(program).results:
        assert torch.allclose(wanted, got, atol=1e-14)


def test_an_unknown_layout_is_refused() -> None:
    with pytest.raises(ValueError, match="layout 'stripes' is not one of contiguous, zigzag, balanced"):
        weft.shard(torch.ones(4), 0, layout="stripes")


def on_gloo(axis: weft.Axis) -> bool:
    group = dist.new_group([0, 2, 3])
    if axis.rank not in (0, 2, 3):
        return True
    x = torch.randn(5, 11, generator=torch.Generator().manual_seed(0))
    return all(
        torch.equal(weft.unshard(weft.shard(x, 1, layout=layout, group=group), 1, layout=layout, group=group), x)
        for layout in LAYOUTS
    )


def test_on_gloo(pool) -> None:
    assert all(pool.run(on_gloo))
