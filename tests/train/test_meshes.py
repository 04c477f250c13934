"""The loss of every mesh follows that of one process."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from small_run import SMALL, furthest, losses_of, train_alone, train_on_mesh, virtual_mesh
from worlds import use_rules, virtual_world

import weft
from weft.train.trainer import Trainer
from weft.world.launch import ProcessWorld


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


TOLERANCE = {"fp64": 1e-6, "fp32": 1e-3}


@cache
def alone(**changes: Any) -> list[float]:
    return train_alone(**changes)


def train_virtually(dp: int, cp: int, **changes: Any) -> list[list[float]]:
    config = replace(SMALL, dp=dp, cp=cp, **changes)
    return virtual_world(dp * cp).run(lambda axis: losses_of(Trainer(config, virtual_mesh(axis, dp, cp)))).results


@pytest.mark.parametrize("dtype", ["fp64", slow("fp32")])
@pytest.mark.parametrize(("dp", "cp"), [slow(2, 1), (1, 2), (2, 2), slow(1, 4), slow(3, 1), slow(2, 3)])
def test_data_and_context_ranks(dp: int, cp: int, dtype: str) -> None:
    """Sequences of 31 tokens do not divide by the ranks; every rank reports the same loss, to the bit."""
    found = train_virtually(dp, cp, dtype=dtype)
    assert all(losses == found[0] for losses in found)
    assert furthest(found[0], alone(dtype=dtype)) < TOLERANCE[dtype]
    assert found[0][-1] < 0.9 * found[0][0]


@pytest.mark.parametrize("steps", [3, slow(20)])
def test_by_nccls_rules(steps: int) -> None:
    """All messages of a group in one line, no tags: nothing hangs, mismatches or is overwritten."""
    use_rules("nccl")
    try:
        found = train_virtually(2, 2, steps=steps)
    finally:
        use_rules("ideal")
    assert furthest(found[3], alone(steps=steps)) < 1e-6


@pytest.mark.parametrize(
    "changes",
    [
        {"layout": "contiguous"}, slow({"pattern": "l"}), {"pattern": "s", "kv_heads": 1}, slow({"pattern": "d"}),
        slow({"pattern": "sd", "layout": "contiguous"}), {"pattern": "lsd", "layout": "balanced"},
    ],
)  # fmt: skip
def test_other_settings(changes: dict[str, Any]) -> None:
    assert furthest(train_virtually(1, 3, steps=6, **changes)[0], alone(steps=6, **changes)) < 1e-6


@pytest.mark.slow
def test_the_published_variant_trains_too() -> None:
    """It does not follow one process: see docs/matrix_optimizers.md."""
    assert train_virtually(1, 2, variant="exact")[0][-1] < 0.9 * alone()[0]


MESHES = {2: [(1, 1, 2)], 4: [(1, 2, 2), (2, 1, 2)]}  # without tensor ranks: above, and in test_checkpoints.py


@pytest.mark.processes
@pytest.mark.parametrize("dtype", ["fp64", slow("fp32")])
@pytest.mark.parametrize("shape", [shape for some in MESHES.values() for shape in some], ids=str)
def test_real_meshes(two: ProcessWorld, four: ProcessWorld, shape: tuple[int, int, int], dtype: str) -> None:
    world = two if shape in MESHES[2] else four
    found = world.run(train_on_mesh, shape, replace(SMALL, dtype=dtype))
    assert all(losses == found[0] for losses in found)
    assert furthest(found[0], alone(dtype=dtype)) < TOLERANCE[dtype]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("wrap", "shape", "pattern"),
    [
        ("ddp", (2, 2, 1), "ls"), slow("fsdp2", (2, 2, 1), "ls"), ("fsdp2", (2, 1, 2), "ls"),
        ("weft", (1, 2, 2), "ds"), slow("ddp", (2, 2, 1), "ds"), slow("fsdp2", (2, 2, 1), "ds"),
        slow("fsdp2", (2, 1, 2), "ds"),
    ],
    ids=str,
)  # fmt: skip
def test_the_same_model_in_torchs_wrappers(
    four: ProcessWorld, wrap: Any, shape: tuple[int, int, int], pattern: str
) -> None:
    found = four.run(train_on_mesh, shape, replace(SMALL, steps=8, wrap=wrap, pattern=pattern))
    assert all(losses == found[0] for losses in found)
    assert furthest(found[0], alone(steps=8, pattern=pattern)) < 1e-6


@pytest.mark.slow
@pytest.mark.processes
def test_products_in_bf16(two: ProcessWorld) -> None:
    """Weights and sums stay fp32, so that it follows fp32 roughly and learns."""
    found = two.run(train_on_mesh, (1, 2, 1), replace(SMALL, dtype="bf16"))
    assert furthest(found[0], alone(dtype="fp32")) < 0.05 and found[0][-1] < 0.9 * found[0][0]


def test_a_mesh_that_differs_between_ranks() -> None:
    def program(axis: weft.Axis) -> str:
        try:
            Trainer(replace(SMALL, lr=0.1 if axis.rank == 1 else 0.2), virtual_mesh(axis, 1, 2))
        except ValueError as error:
            return str(error)
        return ""

    found = virtual_world(2).run(program).results
    assert found[0] and found[0].partition("raised on")[0] == found[1].partition("raised on")[0]
    assert "lr" in found[0]


def test_data_that_differ_between_ranks(tmp_path: Path) -> None:
    """Other text on another host, or a path that one rank cannot read: the same error on all."""
    (tmp_path / "a.txt").write_text("one " * 500)
    (tmp_path / "b.txt").write_text("two " * 500)

    def refused(names: tuple[str, str]) -> list[str]:
        def program(axis: weft.Axis) -> str:
            try:
                Trainer(replace(SMALL, data=tmp_path / names[axis.rank]), virtual_mesh(axis, 1, 2))
            except ValueError as error:
                return str(error).partition("raised on")[0]
            return ""

        return virtual_world(2).run(program).results

    differ, unreadable = refused(("a.txt", "b.txt")), refused(("a.txt", "nowhere.txt"))
    assert "data" in differ[0] and differ[0] == differ[1]
    assert "nowhere.txt does not exist" in unreadable[0] and unreadable[0] == unreadable[1]
