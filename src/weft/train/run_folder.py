"""The folder of a run: what is in it, who may write to it, and which checkpoint comes after which.

All checkpoints beside one another belong to one line of training: the newest is the one with the highest number. A run
that goes back moves what came later aside, into ``checkpoints/abandoned-N``. Only names that weft writes are touched.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from weft.parallel import checkpoint
from weft.train.config import TrainConfig, read_config, take_settings

logger = logging.getLogger(__name__)
CHECKPOINTS, CONFIG, LOCK = "checkpoints", "config.json", "run.lock"
# What a run's folder may hold. One that holds anything else and no checkpoint is somebody's.
WRITTEN = {
    CHECKPOINTS, CONFIG, LOCK, "metrics.jsonl", "timeline.json", "plain.json", "report.html", "tensorboard",
    ".config.json.partial", ".metrics.jsonl.partial", ".timeline.json.partial",
}  # fmt: skip
_STEP = re.compile(r"step-(\d{8})")
_FACTS = {"step": int, "position": int, "groups": list, "data": str, "vocabulary": int, "config": dict}


# Names.


def step_folder(run: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return run / CHECKPOINTS / f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """The step of a checkpoint, by its name; None if weft does not name folders so.

    >>> step_of(Path("step-00000060")), step_of(Path("step-00000060-best"))
    (60, None)
    """
    found = _STEP.fullmatch(folder.name)
    return int(found[1]) if found else None


def list_checkpoints(run: Path) -> list[Path]:
    """Checkpoints of a run, the newest first; whether they are whole is not looked at."""
    folder = run / CHECKPOINTS
    found = folder.iterdir() if folder.is_dir() else iter(())
    return sorted((path for path in found if step_of(path) is not None and path.is_dir()), reverse=True)


def run_of(path: Path) -> Path:
    """The folder of a run, of which ``path`` may be a checkpoint."""
    return path.parent.parent if path.parent.name == CHECKPOINTS else path


def is_run(folder: Path) -> bool:
    """Whether a run of weft is there, begun or ended."""
    if not folder.is_dir():
        return False
    names = set(os.listdir(folder))
    return bool(list_checkpoints(folder)) or LOCK in names or (CONFIG in names and names <= WRITTEN)


def check_new(out: Path) -> None:
    """Raise if a new run cannot begin in ``out``: it must not be there, or be empty."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"train: --out {out} is a file; give another folder")
    if is_run(out):
        raise ValueError(
            f"train: --out {out} holds a run already; --resume {out} goes on with it, another --out leaves it alone"
        )
    if out.is_dir() and any(out.iterdir()):
        raise ValueError(f"train: --out {out} is not empty and not a run; give another folder, or an empty one")


# Its small files, whole or as they were before.


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


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The steps of a metrics file. Lines that are none, as where a run was killed, are passed over."""
    found = split_lines(path.read_bytes()) if os.path.isfile(path) else []
    return [line for _, line in found if line is not None]


def split_lines(content: bytes) -> list[tuple[bytes, dict[str, Any] | None]]:
    """(text, its step) of each line of a metrics file; None where something broke it."""
    found: list[tuple[bytes, dict[str, Any] | None]] = []
    for text in content.split(b"\n"):
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            line = None
        if text.strip():
            found.append((text, line if isinstance(line, dict) and type(line.get("step")) is int else None))
    return found


# One run at a time.


class RunLock:
    """The right to write to a run's folder; a process that ends, however it does, has it no longer."""

    def __init__(self, run: Path) -> None:
        self._run, self._new = run, not (run / LOCK).exists()
        try:
            self._made = [folder for folder in (run, *run.parents) if not folder.exists()]
            run.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(run / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ValueError(f"train: --out {run} cannot be written ({error.strerror}); give another folder") from None
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(self._handle, 100).decode(errors="replace").strip()
            os.close(self._handle)
            raise ValueError(
                f"train: --out {run} is being written by another run ({holder or 'unknown'}); wait for its end, or "
                f"give another --out"
            ) from None
        except OSError as error:
            logger.warning("train: %s cannot be locked (%s): start no other run there", run, error.strerror)
        with suppress(OSError):  # a full disk; the lock holds without it
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, f"process {os.getpid()} on {os.uname().nodename}, job {job_name()}\n".encode(), 0)

    def undo(self) -> None:
        """Leave no trace of a run that could not begin."""
        if self._new:
            (self._run / LOCK).unlink(missing_ok=True)
        with suppress(OSError):
            for folder in self._made:
                folder.rmdir()

    def close(self) -> None:
        """Let others write."""
        os.close(self._handle)


def job_name() -> str:
    """What all lives of a rank that torchrun starts again have in common."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return name if name != "none" else f"{os.uname().nodename} {os.getppid()}"


def was_begun_by_this_job(run: Path) -> bool:
    """Whether an earlier life of this process has written there."""
    lock = run / LOCK
    return os.path.isfile(lock) and lock.read_text(errors="replace").strip().endswith(f", job {job_name()}")


# Checkpoints.


def remove_partial(run: Path) -> None:
    """Remove what killed writes have left."""
    for folder in (run / CHECKPOINTS).glob("step-*.partial"):
        if step_of(folder.with_suffix("")) is not None:
            shutil.rmtree(folder, ignore_errors=True)


def move_later_aside(run: Path, step: int) -> None:
    """Before training goes on after ``step``: move later checkpoints aside, with the metrics of their steps."""
    later = [folder for folder in list_checkpoints(run) if (step_of(folder) or 0) > step]
    if not later:
        return
    places = (run / CHECKPOINTS / f"abandoned-{number}" for number in itertools.count(1))
    aside = next(place for place in places if not place.exists())
    aside.mkdir()
    metrics = run / "metrics.jsonl"
    if os.path.isfile(metrics):
        lines = [text for text, line in split_lines(metrics.read_bytes()) if line is not None and line["step"] > step]
        write_whole(aside / metrics.name, b"".join(text + b"\n" for text in lines))
    for folder in later:
        folder.rename(aside / folder.name)
    names = ", ".join(folder.name for folder in later)
    logger.warning("train: going on after step %d; what came later (%s) is kept in %s", step, names, aside)


def read_facts(folder: Path, digests: bool = False) -> dict[str, Any]:
    """What a checkpoint says of itself; a ValueError that names it if it is damaged. ``digests``: read all of it."""
    facts = checkpoint.read_manifest(folder, digests)
    for name, kind in _FACTS.items():
        value = facts.get(name)
        if type(value) is not kind or (isinstance(value, int) and value < 0):
            raise ValueError(
                f"the checkpoint {folder} is damaged: {checkpoint.MANIFEST} must have {name!r}, {kind.__name__}, but "
                f"has {value!r:.40}"
            )
    return facts


def whole_checkpoints(path: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """(folder, what it says of itself) of the whole checkpoints of a run, the newest first, or of checkpoint ``path``.

    Damaged ones are named in the log. Raises if there is none at all, or none that is whole.
    """
    if os.path.isfile(path / checkpoint.MANIFEST) or step_of(path) is not None:
        yield path, read_facts(path, digests=True)
        return
    check_resumable(path)
    found = list_checkpoints(path)
    for folder in found:
        try:
            yield folder, read_facts(folder, digests=True)
        except ValueError as error:
            logger.warning("%s; the one before it is used", error)
    raise ValueError(f"train: --resume {path} has no whole checkpoint; its newest, {found[0]}, is damaged")


def check_resumable(path: Path) -> None:
    """Raise if there is no checkpoint at ``path``, nor a run that has one; whether they are whole is not looked at."""
    if not list_checkpoints(path) and not os.path.isfile(path / checkpoint.MANIFEST):
        raise ValueError(f"train: --resume {path} is neither a run with a checkpoint nor a checkpoint")


def say_what_is_whole(run: Path) -> str:
    """The newest checkpoint whose files are there with their sizes, from which training can go on."""
    for folder in list_checkpoints(run):
        try:
            checkpoint.read_manifest(folder)
        except ValueError:
            continue
        return f"{folder} is whole"
    return "there is no whole checkpoint before it"


def saved_settings(path: Path) -> TrainConfig | None:
    """The settings of the run at ``path`` (or of the checkpoint ``path``): its config.json, or a checkpoint's."""
    run, fault = run_of(path), None
    if (run / CONFIG).exists():
        try:
            return read_config(run / CONFIG)
        except ValueError as error:
            fault = error
            logger.warning("%s; the settings of a checkpoint are used, if there is one", error)
    for folder in [path] if os.path.isfile(path / checkpoint.MANIFEST) else list_checkpoints(run):
        try:
            facts = read_facts(folder)
        except ValueError:
            continue
        return take_settings(facts["config"], f"{folder / checkpoint.MANIFEST}")
    if fault is not None and list_checkpoints(run):
        raise fault
    return None
