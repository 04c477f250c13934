"""Flags that benchmarks share, and their faults, which are found before anything starts."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

Ranks = Annotated[int | None, arg(help="Local processes to start (4 if left out). Leave it out under torchrun.")]
RankCount = Annotated[int, arg(help="Local processes to start. Under torchrun, the number it started.")]
Json = Annotated[Path | None, arg(help="Write the rows here, with a header of machine, versions and commit.")]
Repeats = Annotated[int, arg(help="Samples of each case.")]


def check_at_least(least: int, **values: int | tuple[int, ...] | None) -> None:
    """Numbers by the names of their flags; what was left out (None) is fine.

    >>> check_at_least(1, warm_steps=0)
    Traceback (most recent call last):
    ValueError: --warm-steps must be at least 1, got 0
    """
    for name, value in values.items():
        for number in value if isinstance(value, tuple) else (value,):
            if number is not None and number < least:
                raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {number}")


def check_file(flag: str, path: Path | None) -> None:
    """Can a file be written there (by rank 0)? Nothing is left behind, and what is there stays as it is."""
    if path is None or os.environ.get("RANK", "0") != "0":
        return
    try:
        if path.exists() and not path.is_file():
            raise ValueError(f"{flag} {path} is {'a folder' if path.is_dir() else 'no regular file'}; give a file")
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.name}."):
            pass
        if path.exists():
            with path.open("ab"):
                pass
    except OSError as error:
        raise ValueError(f"{flag} {path} cannot be written: {error.strerror}") from None
