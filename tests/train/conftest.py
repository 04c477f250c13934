from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from weft import cli


@pytest.fixture
def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    """Run the command here; (exit status, what it printed, what it said)."""
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["weft", *arguments])
        status = 0
        try:
            cli.main()
        except SystemExit as end:
            status = int(end.code or 0)
        out = capsys.readouterr()
        torch.set_num_threads(threads)
        return status, out.out, out.err

    return run
