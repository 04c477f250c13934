"""Small files of a run: whole or as they were before, and never read from what is not a file."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Write under another name, then rename: whatever happens, ``path`` has the old or the new content.

    An OSError names ``path``, and what was written under the other name is gone.
    """
    partial = path.with_name(f".{path.name}.partial")
    data = content.encode() if isinstance(content, str) else content
    try:
        with partial.open("wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None


def is_plain_file(path: Path) -> bool:
    """Whether there is a regular file: opening a pipe, a socket or a device may wait for ever or do something.

    >>> is_plain_file(Path("/dev/null"))
    False
    """
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (OSError, ValueError):
        return False
