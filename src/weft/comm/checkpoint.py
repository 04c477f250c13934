"""Tensors to and from a folder by torch.distributed.checkpoint, in safetensors files: no pickle is read.

A folder is written under another name, by all ranks, in a thread beside the training. When every rank has written its
part, rank 0 lists the files and their sizes and gives the folder its name: there is no moment at which a folder of
that name is not whole.
"""

from __future__ import annotations

import importlib.util
import json
import os
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

MANIFEST = "checkpoint.json"


class _Writer(HuggingFaceStorageWriter):
    """Writes into ``folder``.partial; the rank that hears of all others' ends renames it."""

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
        files = {path.name: path.stat().st_size for path in sorted(self._partial.glob("*.safetensors"))}
        manifest = self._partial / MANIFEST
        with manifest.open("w") as out:
            json.dump({"files": files, **self._facts}, out)
            out.flush()
            os.fsync(out.fileno())
        _sync_folder(self._partial)
        old = self._folder.with_name(f"{self._folder.name}.replaced.partial")
        shutil.rmtree(old, ignore_errors=True)
        if self._folder.exists():  # a damaged one of the same step, which was passed over
            self._folder.rename(old)
        self._partial.rename(self._folder)
        _sync_folder(self._folder.parent)
        shutil.rmtree(old, ignore_errors=True)
        self._written()


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
    _calm()
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


def read_manifest(folder: Path) -> dict[str, Any]:
    """What is said of a checkpoint, if it is whole; a ValueError that names it if it is not."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text())
        sizes = dict(manifest["files"])
    except FileNotFoundError:
        raise ValueError(f"{folder} is no checkpoint: it has no {MANIFEST}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"the checkpoint {folder} is damaged: {MANIFEST} cannot be read: {error!r}") from None
    for name, size in sizes.items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else None
        if found != size:
            what = "is missing" if found is None else f"has {found} bytes"
            raise ValueError(f"the checkpoint {folder} is damaged: {name} {what}, {size} were written")
    return manifest


def load_tensors(folder: Path, tensors: dict[str, Tensor], group: Any) -> None:
    """Fill ``tensors``, which may lie on the ranks in another way than they were saved. All ranks must call it."""
    _calm()
    reader = HuggingFaceStorageReader(str(folder))
    dcp.load(tensors, storage_reader=reader, process_group=group, no_dist=group is None)


def saved_names(folder: Path) -> set[str]:
    """Names of the tensors in a checkpoint."""
    return set(HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata)


def find_format_fault() -> Exception | None:
    """What is missing to write and read checkpoints, if anything."""
    if importlib.util.find_spec("safetensors") is None:
        return ValueError("checkpoints are safetensors files, which need a package: pip install 'weft-torch[train]'")
    return None


def new_group() -> Any:
    """A group of all ranks for checkpoints alone, on the CPU; None in a world of one. All ranks must ask."""
    return dist.new_group(backend="gloo") if dist.is_initialized() else None


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _calm() -> None:
    """torch warns, in a thread, that there is one process only, which is so on purpose."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
