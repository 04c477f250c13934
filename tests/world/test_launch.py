from __future__ import annotations

import pytest

import weft
from weft.world.launch import ProcessWorld


def fail_on_two(axis: weft.Axis) -> int:
    if axis.rank == 2:
        raise KeyError("the reason")
    return axis.rank * 10


def test_the_first_failing_rank_is_raised_with_its_traceback(pool: ProcessWorld) -> None:
    with pytest.raises(KeyError, match="the reason") as caught:
        pool.run(fail_on_two)
    assert caught.value.__notes__ == ["raised on rank 2 of 7"]
    assert "in fail_on_two" in str(caught.value.__cause__)


def plain(axis: weft.Axis, offset: int) -> int:
    return axis.rank + offset


def test_launch_gives_results_in_rank_order() -> None:
    assert weft.launch(plain, 3, 100) == [100, 101, 102]
    with pytest.raises(ValueError, match="ranks must be at least 1"):
        weft.launch(plain, 0)
