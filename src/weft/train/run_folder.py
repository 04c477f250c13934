"""The folder of a run: its checkpoints by step, which of them is the newest whole one, and the state they hold."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import weft
from weft.comm import checkpoint
from weft.train.model import LanguageModel
from weft.train.optimizer import names_of

logger = logging.getLogger(__name__)
CHECKPOINTS = "checkpoints"


def step_folder(run: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return run / CHECKPOINTS / f"step-{step:08d}"


def list_checkpoints(run: Path) -> list[Path]:
    """Checkpoints of a run, the newest first; whether they are whole is not looked at."""
    found = (run / CHECKPOINTS).glob("step-*") if (run / CHECKPOINTS).is_dir() else ()
    return sorted((path for path in found if path.is_dir() and path.suffix != ".partial"), reverse=True)


def forget_halves(run: Path) -> None:
    """Remove what killed writes have left."""
    for folder in (run / CHECKPOINTS).glob("*.partial"):
        shutil.rmtree(folder, ignore_errors=True)


def find_checkpoint(path: Path) -> tuple[Path, dict[str, Any]]:
    """(folder, what it says of itself) of the newest whole checkpoint of a run, or of the checkpoint ``path`` itself.

    A damaged one is named in the log, and the one before it taken.
    """
    if (path / checkpoint.MANIFEST).exists() or path.name.startswith("step-"):
        return path, checkpoint.read_manifest(path)
    found = list_checkpoints(path)
    if not found:
        raise ValueError(f"train: --resume {path} is neither a run with a checkpoint nor a checkpoint")
    for folder in found:
        try:
            return folder, checkpoint.read_manifest(folder)
        except ValueError as error:
            logger.warning("%s; the one before it is used", error)
    raise ValueError(f"train: --resume {path} has no whole checkpoint; its newest, {found[0]}, is damaged")


class Saver:
    """Writes checkpoints of a run beside its training, one at a time."""

    def __init__(self, run: Path, keep: int) -> None:
        self._run, self._keep, self.group = run, keep, checkpoint.new_group()
        self._under_way: tuple[Future[Any], Path] | None = None

    def start(self, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Begin to write the checkpoint of a step; all ranks must call it."""
        self.wait()
        folder = step_folder(self._run, step)
        begun = checkpoint.start_saving(folder, tensors, {"step": step, **facts}, self._forget_old, self.group)
        self._under_way = begun, folder

    def wait(self) -> None:
        """Until the last one is written. Raises on every rank if it could not be; those before it are as they were."""
        if self._under_way is None:
            return
        (future, folder), self._under_way = self._under_way, None
        error = future.exception()
        if error is None:
            return
        shutil.rmtree(checkpoint.partial_name(folder), ignore_errors=True)
        before = next(iter(list_checkpoints(self._run)), None)
        kept = f"{before} is whole" if before is not None else "there is none before it"
        raise RuntimeError(
            f"train: the checkpoint {folder} could not be written: {checkpoint.why_not_saved(error)}; {kept}"
        ) from error

    def _forget_old(self) -> None:
        for folder in list_checkpoints(self._run)[self._keep :]:
            gone = checkpoint.partial_name(folder)
            folder.rename(gone)  # at once, so that nobody takes half of it for a checkpoint
            shutil.rmtree(gone, ignore_errors=True)


def tensors_of(model: LanguageModel, step: weft.OverlappedStep) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors by name, parameter groups) of a run's state; all ranks must ask."""
    saved = step.state_dict()  # first: it brings rows up to date
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for name, state in zip(names_of(model, step), _states(saved), strict=True):
        tensors.update({f"optimizer.{name}.{key}": value for key, value in state.items()})
    return tensors, saved


def load_state(folder: Path, model: LanguageModel, step: weft.OverlappedStep, groups: list[dict[str, Any]],
               group: Any) -> None:  # fmt: skip
    """Take weights and optimizer state from a checkpoint of any mesh; all ranks must call it."""
    tensors, saved = tensors_of(model, step)
    there = checkpoint.saved_names(folder)
    if set(tensors) != there:
        lacking, more = sorted(set(tensors) - there), sorted(there - set(tensors))
        raise ValueError(
            f"train: the checkpoint {folder} is of another model or optimizer: it lacks {lacking[:3]}, and has besides "
            f"{more[:3]}; resume with the settings it was made with"
        )
    tensors = {name: value.detach().clone() for name, value in tensors.items()}
    checkpoint.load_tensors(folder, tensors, group)
    model.load_state_dict({name: tensors[f"model.{name}"] for name in model.state_dict()})
    prefixes = [f"optimizer.{name}." for name in names_of(model, step)]
    states = {
        number: {key: tensors[prefix + key] for key in state}
        for number, (prefix, state) in enumerate(zip(prefixes, _states(saved), strict=True))
    }
    merged = [{**now, **before, "params": now["params"]} for now, before in
              zip(saved["param_groups"], groups, strict=True)]  # fmt: skip
    step.load_state_dict({"state": states, "param_groups": merged})


def groups_to_save(saved: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Parameter groups as JSON holds them: without the parameters, which have names."""
    return [
        {name: float(value) if isinstance(value, Tensor) else value for name, value in group.items()
         if name not in ("params", "param_names")}
        for group in saved["param_groups"]
    ]  # fmt: skip


def _states(saved: Mapping[str, Any]) -> list[dict[str, Any]]:
    count = sum(len(group["params"]) for group in saved["param_groups"])
    states = [dict(saved["state"].get(number, {})) for number in range(count)]
    for state in states:
        for key, value in state.items():
            state[key] = value if isinstance(value, Tensor) else torch.tensor(float(value))
    return states
