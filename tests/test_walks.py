"""The walks of CONTRIBUTING.md: the files that a value passes through are those that run, no more and no fewer."""

from __future__ import annotations

import inspect
import os
import re
import sys
import threading
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import weft
from weft.world.launch import ProcessWorld

SOURCE = Path(weft.__file__).parent
PAGE = Path(__file__).parents[1] / "CONTRIBUTING.md"
ROW = re.compile(r"^\| `(?P<file>[\w/]+\.py)` \| (?P<functions>[^|]+) \|")
OF_TRAINING = ("cli.py", "train/", "report/", "parallel/", "world/")  # the rest of it are the other four walks


class FilesThatRun:
    """The functions of weft that are entered, by file, in this thread and in those that were started since the first.

    Threads that wait for work outlive a walk and are used by the next, so what they enter is noted in one place.
    """

    entered: dict[str, set[str]] | None = None

    @classmethod
    def _enter(cls, frame: FrameType, event: str, argument: Any) -> None:
        path, entered = frame.f_code.co_filename, cls.entered
        if entered is None or event != "call" or not path.startswith(str(SOURCE)):
            return
        if frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # not a module or the body of a class
            entered.setdefault(os.path.relpath(path, SOURCE), set()).add(frame.f_code.co_name)

    def __enter__(self) -> dict[str, set[str]]:
        FilesThatRun.entered = entered = {}
        threading.setprofile(self._enter)
        sys.setprofile(self._enter)
        return entered

    def __exit__(self, *reason: object) -> None:
        sys.setprofile(None)
        FilesThatRun.entered = None


def key(axis: weft.Axis) -> dict[str, set[str]]:
    x, g = torch.randn(1, 20, 2, 4, requires_grad=True), torch.full((1, 20, 2), -0.1)
    operation = weft.linear_attention  # the first use of a name imports its package
    with FilesThatRun() as walk:
        operation(x, x, x, g, layout="zigzag")[0].sum().backward()
    return walk


def kv_head(axis: weft.Axis) -> dict[str, set[str]]:
    x = torch.randn(1, 20, 2, 4, requires_grad=True)
    operation = weft.attention
    with FilesThatRun() as walk:
        operation(x, x, x, causal=True, layout="zigzag", method="gather").sum().backward()
    return walk


def embedding_id(axis: weft.Axis) -> dict[str, set[str]]:
    table = weft.BigramHashEmbedding(100, 8)
    optimizer = weft.optim.RowAdam(table.parameters(), lr=0.1)
    tokens = torch.arange(20).view(2, 10)
    with FilesThatRun() as walk:
        table.prefetch(tokens)
        table(tokens).sum().backward()
        optimizer.step()
    return walk


def gradient(axis: weft.Axis) -> dict[str, set[str]]:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    parts = [weft.optim.REKLS([model.weight], lr=0.1, data_group=axis), weft.optim.ShardedAdamW([model.bias])]
    step = weft.optim.OverlappedStep(parts, clip=1.0)
    with FilesThatRun() as walk:
        model(torch.ones(2, 8)).sum().backward()
        step.step()
    return walk


def train(folder: Path) -> dict[str, set[str]]:
    """In one process; what is imported for it has run nothing yet."""
    from weft.cli import main

    text = folder / "text.txt"
    text.write_text("so much depends upon a red wheel barrow " * 200)
    flags = "--steps 2 --batch 2 --length 64 --width 32 --heads 2 --layers 2 --checkpoint-every 2 --table-rows 257"
    sys.argv = ["weft", "train", "--data", str(text), "--out", str(folder / "run"), *flags.split()]
    with FilesThatRun() as walk:
        main()
    others = {file for title in ("A call on an axis", *WALKS) for file in written(title)}
    # Where an earlier test has installed the simulated device, torch's factories pass through it.
    return {
        file: names
        for file, names in walk.items()
        if file.startswith(OF_TRAINING) and file not in others and not file.startswith("world/simulated/")
    }


def written(title: str) -> dict[str, list[str]]:
    """The functions that the table under a heading names, by file."""
    section = PAGE.read_text().partition(f"### {title}\n")[2].partition("\n### ")[0].partition("\n## ")[0]
    rows = [found for line in section.splitlines() if (found := ROW.match(line))]
    assert rows, f"CONTRIBUTING.md has no table under {title!r}"
    return {row["file"]: re.findall(r"`([\w.]+)`", row["functions"]) for row in rows}


def compare(table: dict[str, list[str]], found: dict[str, set[str]]) -> None:
    assert set(table) == set(found), f"missing {set(found) - set(table)}, not entered {set(table) - set(found)}"
    for file, functions in table.items():
        assert functions, f"{file}: no function is named"
        unknown = [name for name in functions if name.rpartition(".")[2] not in found[file]]
        assert not unknown, f"{file}: {unknown} did not run; these did: {sorted(found[file])}"


WALKS = {
    "A key of linear attention": key,
    "A KV head of softmax attention": kv_head,
    "An embedding id": embedding_id,
    "A gradient": gradient,
}
MOST = {key: 20, kv_head: 18, embedding_id: 20, gradient: 24, train: 19}  # files; a walk may become shorter, not longer


@pytest.mark.processes
def test_a_value_passes_through_the_files_that_are_written_down() -> None:
    """Each table has the files of its own; those of a call, which all four pass through, are one table.

    On new processes: lanes that earlier tests started would not be seen.
    """
    with ProcessWorld(2, timeout=timedelta(seconds=60)) as world:
        found = {title: world.run(walk)[0] for title, walk in WALKS.items()}
    shared = set.intersection(*(set(files) for files in found.values()))
    common: dict[str, set[str]] = {file: set().union(*(files[file] for files in found.values())) for file in shared}
    compare(written("A call on an axis"), common)
    for title, files in found.items():
        assert len(files) <= MOST[WALKS[title]], f"{title} passes through {len(files)} files"
        compare(written(title), {file: names for file, names in files.items() if file not in shared})


def test_training_passes_through_the_files_that_are_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [])
    try:
        walk = train(tmp_path)
        compare(written("A run of `weft train`"), walk)
        assert len(walk) <= MOST[train]
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
