"""Tensors to and from a folder by torch.distributed.checkpoint, in safetensors files: no pickle is read.

A folder is written under another name, by all ranks, in a thread beside the training. When every rank has written its
part, rank 0 lists the files, their sizes and digests, and gives the folder its name: there is no moment at which a
folder of that name is not whole. Only files that are listed are read.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem

logger = logging.getLogger(__name__)
MANIFEST = "checkpoint.json"
_DIGEST = "sha256"  # in the manifest: of the rest of it, and of each file


class _Writer(HuggingFaceStorageWriter):
    """Writes into ``folder``.partial; rank 0 renames it when all have written."""

    def __init__(self, folder: Path, facts: Mapping[str, Any], written: Callable[[], None]) -> None:
        self._partial, self._folder = partial_name(folder), folder
        super().__init__(path=str(self._partial), save_distributed=True)
        self._facts, self._written = facts, written

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator:  # what a killed write has left; nobody writes before all have been here
            shutil.rmtree(self._partial, ignore_errors=True)
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    def finish(self, metadata: Any, results: Any) -> None:
        super().finish(metadata, results)
        files = {
            path.name: {"bytes": path.stat().st_size, _DIGEST: _digest_file(path)}
            for path in sorted(self._partial.glob("*.safetensors"))
        }
        manifest = {"files": files, **self._facts}
        with (self._partial / MANIFEST).open("w") as out:
            json.dump({**manifest, _DIGEST: _digest_facts(manifest)}, out)
            out.flush()
            os.fsync(out.fileno())
        _sync_folder(self._partial)
        self._partial.rename(self._folder)
        _sync_folder(self._folder.parent)
        self._written()


class _ListedFiles(FileSystem):
    """What a reader sees of a folder: the files of its manifest."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._paths = [str(folder / name) for name in _read_listed(folder)[1]]

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        return list(self._paths)


class _Reader(HuggingFaceStorageReader):
    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self.fs = _ListedFiles(folder)


def partial_name(folder: Path) -> Path:
    """Where a checkpoint is written before it is whole."""
    return folder.with_name(folder.name + ".partial")


def start_saving(
    folder: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], written: Callable[[], None], group: Any
) -> Future[Any]:
    """Begin to write ``tensors`` (each rank its part of DTensors) and ``facts`` (JSON) as ``folder``.

    Tensors are copied now, so that training may go on. ``written`` is called on rank 0 once the folder has its name.
    ``group``: a process group with a CPU side that nobody else uses meanwhile; None in a world of one.
    """
    copies = {name: value.detach().clone() for name, value in tensors.items()}
    _silence_warning()
    writer = _Writer(folder, facts, written)
    found = dcp.async_save(copies, storage_writer=writer, process_group=group, no_dist=group is None)
    assert isinstance(found, Future)
    return found


def why_not_saved(error: BaseException) -> str:
    """What went wrong on which ranks, in a line."""
    if not isinstance(error, CheckpointException):
        return f"{error}"
    shown: dict[str, list[int]] = {}
    for rank, (failure, _) in error.failures.items():
        root: BaseException = failure
        while (cause := root.__cause__ or root.__context__) is not None:
            root = cause
        shown.setdefault(f"{root}" or type(root).__name__, []).append(rank)
    return "; ".join(f"{words} (rank {', '.join(map(str, ranks))})" for words, ranks in shown.items())


def read_manifest(folder: Path, digests: bool = False) -> dict[str, Any]:
    """What is said of a checkpoint, if it is whole; a ValueError that names it if it is not.

    Looks at the sizes of its files, and with ``digests`` at all they hold. One that was written without digests (by
    an older weft) is warned of: damage that keeps the sizes cannot be seen.
    """
    manifest, files = _read_listed(folder)
    for name, (size, digest) in files.items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            what = "is missing" if found is None else f"has {found} bytes"
            raise ValueError(f"the checkpoint {folder} is damaged: {name} {what}, {size} were written")
        if digests and digest is not None and _digest_file(path) != digest:
            raise ValueError(f"the checkpoint {folder} is damaged: {name} holds other bytes than were written")
    if digests and any(digest is None for _, digest in files.values()):
        logger.warning("the checkpoint %s has no digests (an older weft wrote it): damage may not be seen", folder)
    return manifest


def _read_listed(folder: Path) -> tuple[dict[str, Any], dict[str, tuple[int, str | None]]]:
    """(the manifest, size and digest of each file it lists)."""
    path = folder / MANIFEST
    if not path.exists():
        raise ValueError(f"{folder} is no checkpoint: it has no {MANIFEST}")
    try:
        if not path.is_file():
            raise ValueError("not a file")
        manifest = json.loads(path.read_text())
        digest = manifest.pop(_DIGEST, None)
        if digest is not None and digest != _digest_facts(manifest):
            raise ValueError("it holds other bytes than were written")
        files: dict[str, tuple[int, str | None]] = {}
        for name, entry in manifest["files"].items():
            if not re.fullmatch(r"[\w-]+\.safetensors", name):
                raise ValueError(f"{name!r} is no file of a checkpoint")
            files[name] = (entry, None) if isinstance(entry, int) else (int(entry["bytes"]), str(entry[_DIGEST]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"the checkpoint {folder} is damaged: {MANIFEST} cannot be read: {error!r}") from None
    return manifest, files


def load_tensors(folder: Path, tensors: dict[str, Tensor], group: Any) -> None:
    """Fill ``tensors``, which may lie on the ranks in another way than they were saved. All ranks must call it.

    What goes wrong on any rank is raised on all.
    """
    _silence_warning()
    try:
        dcp.load(tensors, storage_reader=_Reader(folder), process_group=group, no_dist=group is None)
    except CheckpointException as error:  # not an Exception
        raise RuntimeError(f"{folder} cannot be loaded: {why_not_saved(error)}") from error


def saved_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The tensors in a checkpoint, by name; a ValueError that names it if its files are none of tensors."""
    try:
        known = _Reader(folder).read_metadata().state_dict_metadata
    except Exception as error:  # safetensors has errors of its own
        raise ValueError(f"the checkpoint {folder} is damaged: {error}") from error
    return {name: tuple(getattr(one, "size", ())) for name, one in known.items()}


def check_format() -> None:
    """Raise if what writes and reads checkpoints is missing."""
    if importlib.util.find_spec("safetensors") is None:
        raise ValueError("checkpoints are safetensors files, which need a package: pip install 'weft-torch[train]'")


def new_group() -> Any:
    """A group of all ranks for checkpoints alone, on the CPU; None in a world of one. All ranks must ask."""
    return dist.new_group(backend="gloo") if dist.is_initialized() else None


def _digest_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, _DIGEST).hexdigest()


def _digest_facts(manifest: Mapping[str, Any]) -> str:
    """Of what a manifest says, however it is written."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _silence_warning() -> None:
    """torch warns, in a thread, that there is one process only, which is so on purpose."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
