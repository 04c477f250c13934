from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

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
    with pytest.raises(TypeError, match="launch: ranks must be an int, got '2'"):
        weft.launch(plain, "2")  # type: ignore[arg-type]


class Odd:
    """Pickled as something that is nowhere."""

    def __reduce__(self) -> tuple[object, ...]:
        return getattr, (str, "no such name")


def test_what_cannot_be_sent_is_told_before_anything_starts() -> None:
    sent = "and its arguments are sent to the ranks by pickle: .*; functions must be defined at the top level of a file"
    with pytest.raises(TypeError, match=f"launch: .*<lambda> {sent}"):
        weft.launch(lambda axis: 1, 2)
    with pytest.raises(TypeError, match=f"launch: plain {sent}"):
        weft.launch(plain, 2, (number for number in ()))


def test_what_ranks_cannot_import_is_told(pool: ProcessWorld) -> None:
    with pytest.raises(TypeError, match=r"launch: a rank cannot import what it was sent: .*'no such name'; functions"):
        pool.run(plain, Odd())
    assert pool.run(plain, 1) == list(range(1, 8))


PROGRAM = """
import weft

def rank(axis):
    return axis.rank

weft.launch(rank, 2)
"""
NO_FILE = "TypeError: launch: rank is called from a notebook or from standard input, which ranks cannot import; .*"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("script", "RuntimeError: launch: ranks import the script that starts them, .*; put the call under `if .*`"),
        pytest.param("-c", NO_FILE, marks=pytest.mark.slow),
        ("-", NO_FILE),
    ],
)
def test_programs_that_ranks_cannot_import(tmp_path: Path, how: str, words: str) -> None:
    """One line says what to change; ranks say nothing."""
    (tmp_path / "script.py").write_text(PROGRAM)
    command = {"script": [str(tmp_path / "script.py")], "-c": ["-c", PROGRAM], "-": ["-"]}[how]
    done = subprocess.run(
        [sys.executable, *command], input=PROGRAM, capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert done.returncode == 1 and done.stderr.count("Traceback") == 1, done.stderr
    assert re.fullmatch(words, done.stderr.strip().splitlines()[-1]), done.stderr
