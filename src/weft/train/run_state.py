"""The state of a run as tensors with names, to and from checkpoints."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import weft
from weft.parallel import checkpoint
from weft.train.config import TrainConfig
from weft.train.model import LanguageModel
from weft.train.optimizer import names_of
from weft.train.run_folder import list_checkpoints, newest_whole, step_folder

logger = logging.getLogger(__name__)
_END_OF_WRITE = 10.0  # seconds that `close` waits for a checkpoint that is being written


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
        raise RuntimeError(
            f"train: the checkpoint {folder} could not be written: {checkpoint.why_not_saved(error)}; "
            f"{say_what_is_whole(self._run)}"
        ) from error

    def close(self) -> None:
        """After training has failed: what is half written is not left behind."""
        if self._under_way is None:
            return
        (future, folder), self._under_way = self._under_way, None
        wait([future], _END_OF_WRITE)
        if future.done() and future.exception() is not None:
            shutil.rmtree(checkpoint.partial_name(folder), ignore_errors=True)

    def _forget_old(self) -> None:
        for folder in list_checkpoints(self._run)[self._keep :]:
            gone = checkpoint.partial_name(folder)
            try:
                folder.rename(gone)  # at once, so that nobody takes half of it for a checkpoint
            except OSError as error:
                logger.warning("train: the old checkpoint %s could not be removed: %s", folder, error.strerror)
                continue
            shutil.rmtree(gone, ignore_errors=True)


def say_what_is_whole(run: Path) -> str:
    """Which checkpoint training can go on from."""
    before = newest_whole(run)
    return f"{before} is whole" if before is not None else "there is no whole checkpoint before it"


def tensors_of(model: LanguageModel, step: weft.optim.OverlappedStep) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors by name, parameter groups) of a run's state; all ranks must ask."""
    saved = step.state_dict()  # first: it brings rows up to date
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for name, state in zip(names_of(model, step), _states(saved), strict=True):
        tensors.update({f"optimizer.{name}.{key}": value for key, value in state.items()})
    return tensors, saved


class StateToLoad:
    """Weights and optimizer state that a checkpoint of any mesh is read into, and taken over once all ranks have it."""

    def __init__(self, model: LanguageModel, step: weft.optim.OverlappedStep) -> None:
        """All ranks must make one."""
        self._model, self._step = model, step
        tensors, self._saved = tensors_of(model, step)
        self._tensors = {name: value.detach().clone() for name, value in tensors.items()}

    def check(self, folder: Path) -> None:
        """Raise if the checkpoint holds other tensors."""
        there = checkpoint.saved_shapes(folder)
        if set(self._tensors) != set(there):
            lacking, more = sorted(set(self._tensors) - set(there)), sorted(set(there) - set(self._tensors))
            raise ValueError(
                f"train: the checkpoint {folder} is of another model or optimizer: it lacks {lacking[:3]}, and has "
                f"besides {more[:3]}; resume with the settings it was made with"
            )
        for name, value in self._tensors.items():
            if tuple(value.shape) != there[name]:
                raise ValueError(
                    f"train: the checkpoint {folder} is of another model or optimizer: its {name} is "
                    f"{list(there[name])}, not {list(value.shape)}; resume with the settings it was made with"
                )

    def read(self, folder: Path, group: Any) -> None:
        """All ranks must call it; nothing of the run is changed."""
        checkpoint.load_tensors(folder, self._tensors, group)

    def take_over(self, groups: list[dict[str, Any]]) -> None:
        """Make the tensors that were read those of the run. Of ``groups``, options of the optimizers are not taken.

        They are the settings of this run; what else a group holds (orders that tune() found) is state.
        """
        model, step, tensors = self._model, self._step, self._tensors
        model.load_state_dict({name: tensors[f"model.{name}"] for name in model.state_dict()})
        prefixes = [f"optimizer.{name}." for name in names_of(model, step)]
        states = {
            number: {key: tensors[prefix + key] for key in state}
            for number, (prefix, state) in enumerate(zip(prefixes, _states(self._saved), strict=True))
        }
        options = [part.defaults for part in step.parts.values() for _ in part.param_groups]
        merged = [
            {**now, **{name: value for name, value in old.items() if name not in own}}
            for now, old, own in zip(self._saved["param_groups"], groups, options, strict=True)
        ]
        step.load_state_dict({"state": states, "param_groups": merged})


def check_sizes(folder: Path, config: TrainConfig, vocabulary: int) -> None:
    """Raise if the settings a checkpoint names are not those of its tensors: before a model of that size is made."""
    shapes = checkpoint.saved_shapes(folder)
    blocks = {name.split(".")[2] for name in shapes if name.startswith("model.blocks.")}
    wanted = {
        "model.tokens.weight": (vocabulary, config.width),
        "model.bigrams.weight": (config.table_rows, config.width),
        "model.blocks.0.mlp.up.weight": (config.hidden, config.width),
    }
    for name, shape in wanted.items():
        if shapes.get(name) != shape:
            raise ValueError(
                f"the checkpoint {folder} is damaged: by its settings {name} is {list(shape)}, but it holds "
                f"{list(shapes[name]) if name in shapes else 'none'}"
            )
    if len(blocks) != config.layers:
        raise ValueError(
            f"the checkpoint {folder} is damaged: by its settings it has {config.layers} blocks, but it holds "
            f"{len(blocks)}"
        )


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
