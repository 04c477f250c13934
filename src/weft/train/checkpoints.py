"""Checkpoints of a run: its state as tensors with names, written beside the training, and gone on from."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import weft
from weft.comm import Axis
from weft.comm.rounds import gather_text
from weft.errors import CommError
from weft.parallel import checkpoint
from weft.train.config import MODEL, TrainConfig, flag, take_settings
from weft.train.model import LanguageModel
from weft.train.run_folder import list_checkpoints, read_facts, say_what_is_whole, step_folder, whole_checkpoints

logger = logging.getLogger(__name__)
FIXED = (*MODEL, "length", "seed", "variant")  # weights, the place in the data and the optimizer's state rest on them
_END_OF_WRITE = 10.0  # seconds that `close` waits for a checkpoint that is being written


class Saver:
    """Writes checkpoints of a run beside its training, one at a time."""

    def __init__(self, run: Path, keep: int) -> None:
        self._run, self._keep, self.group = run, keep, checkpoint.new_group()
        self._under_way: tuple[Future[Any], Path] | None = None

    def start(self, model: LanguageModel, step: weft.optim.OverlappedStep, facts: Mapping[str, Any]) -> None:
        """Begin to write the checkpoint of ``facts["step"]``; all ranks must call it."""
        tensors, saved = _tensors_of(model, step)
        groups = [  # as JSON holds them: without the parameters, which have names
            {name: float(value) if isinstance(value, Tensor) else value for name, value in group.items()
             if name not in ("params", "param_names")}
            for group in saved["param_groups"]
        ]  # fmt: skip
        self.wait()
        folder = step_folder(self._run, facts["step"])
        begun = checkpoint.start_saving(folder, tensors, {**facts, "groups": groups}, self._remove_old, self.group)
        self._under_way = begun, folder

    def wait(self) -> None:
        """Until the last one is written. Raises on every rank if it could not be; those before it are as they were."""
        error, folder = self._end(None)
        if error is not None:
            why = checkpoint.why_not_saved(error)
            words = f"train: the checkpoint {folder} could not be written: {why}; {say_what_is_whole(self._run)}"
            raise RuntimeError(words) from error

    def close(self) -> None:
        """After training has failed: what is half written is not left behind."""
        self._end(_END_OF_WRITE)

    def _end(self, seconds: float | None) -> tuple[BaseException | None, Path]:
        """Wait that long for what is under way; (why it failed, its folder)."""
        if self._under_way is None:
            return None, self._run
        (future, folder), self._under_way = self._under_way, None
        wait([future], seconds)
        error = future.exception() if future.done() else None
        if error is not None:
            shutil.rmtree(checkpoint.partial_name(folder), ignore_errors=True)
        return error, folder

    def _remove_old(self) -> None:
        for folder in list_checkpoints(self._run)[self._keep :]:
            gone = checkpoint.partial_name(folder)
            try:
                folder.rename(gone)  # at once, so that nobody takes half of it for a checkpoint
            except OSError as error:
                logger.warning("train: the old checkpoint %s could not be removed: %s", folder, error.strerror)
                continue
            shutil.rmtree(gone, ignore_errors=True)


def _tensors_of(model: LanguageModel, step: weft.optim.OverlappedStep) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors by name, parameter groups) of a run's state; all ranks must ask."""
    saved = step.state_dict()  # first: it brings rows up to date
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for name, state in zip(_names(model, step), _states(saved), strict=True):
        tensors.update({f"optimizer.{name}.{key}": value for key, value in state.items()})
    return tensors, saved


class StateToLoad:
    """Weights and optimizer state that a checkpoint of any mesh is read into, and taken over once all ranks have it."""

    def __init__(self, model: LanguageModel, step: weft.optim.OverlappedStep) -> None:
        """All ranks must make one."""
        self._model, self._step = model, step
        tensors, self._saved = _tensors_of(model, step)
        self.tensors = {name: value.detach().clone() for name, value in tensors.items()}

    def check(self, folder: Path) -> None:
        """Raise if the checkpoint holds other tensors."""
        there, wanted = checkpoint.saved_shapes(folder), {name: tuple(t.shape) for name, t in self.tensors.items()}
        if there == wanted:
            return
        if set(there) != set(wanted):
            lacking, more = sorted(set(wanted) - set(there)), sorted(set(there) - set(wanted))
            words = f"it lacks {lacking[:3]}, and has besides {more[:3]}"
        else:
            name = next(name for name in wanted if there[name] != wanted[name])
            words = f"its {name} is {list(there[name])}, not {list(wanted[name])}"
        raise ValueError(
            f"train: the checkpoint {folder} is of another model or optimizer: {words}; resume with the settings it "
            f"was made with"
        )

    def take_over(self, groups: list[dict[str, Any]]) -> None:
        """Make the tensors that were read those of the run. Of ``groups``, options of the optimizers are not taken.

        They are the settings of this run; what else a group holds is state.
        """
        model, step, tensors = self._model, self._step, self.tensors
        model.load_state_dict({name: tensors[f"model.{name}"] for name in model.state_dict()})
        prefixes = [f"optimizer.{name}." for name in _names(model, step)]
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
    by_settings = f"the checkpoint {folder} is damaged: by its settings"
    for name, shape in wanted.items():
        if (held := shapes.get(name)) != shape:
            raise ValueError(
                f"{by_settings} {name} is {list(shape)}, but it holds {'none' if held is None else list(held)}"
            )
    if len(blocks) != config.layers:
        raise ValueError(f"{by_settings} it has {config.layers} blocks, but it holds {len(blocks)}")


def _names(model: LanguageModel, step: weft.optim.OverlappedStep) -> list[str]:
    """The name of each parameter, in the order in which the step numbers them."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [names[parameter] for group in step.param_groups for parameter in group["params"]]


def _states(saved: Mapping[str, Any]) -> list[dict[str, Any]]:
    count = sum(len(group["params"]) for group in saved["param_groups"])
    states = [dict(saved["state"].get(number, {})) for number in range(count)]
    for state in states:
        for key, value in state.items():
            state[key] = value if isinstance(value, Tensor) else torch.tensor(float(value))
    return states


class Resumption:
    """The checkpoint that a run goes on from: rank 0 says which, all ranks read it.

    ``facts`` is what the checkpoint says of itself; None where there is none and the run begins. A checkpoint that
    cannot be loaded is named, and the one before it taken, unless it was asked for itself.
    """

    def __init__(self, world: Axis, config: TrainConfig) -> None:
        """All ranks must make one."""
        assert config.resume is not None
        self._world, self._config = world, config
        self._path = config.out if config.resume == "auto" else config.resume
        own = self._path.resolve() == config.out.resolve()
        # A run that has none ended before its first checkpoint, or has never begun.
        none_yet = own and not list_checkpoints(self._path)
        self._candidates = iter(()) if none_yet else whole_checkpoints(self._path)
        self.folder, self.facts = Path(), None  # type: tuple[Path, dict[str, Any] | None]
        self._choose_next()

    def _choose_next(self) -> None:
        fault, chosen = None, ""
        if self._world.rank == 0:  # alone: it reads every byte
            try:
                chosen = str(next(self._candidates, ("",))[0])
            except ValueError as error:
                fault = error
        self._world.begin("train.resume", metadata=[], fault=fault).metadata.wait()
        chosen = gather_text(self._world, "train.resume", chosen)[0]
        if not chosen:
            return
        self.folder = Path(chosen)
        try:
            self.facts = read_facts(self.folder)
            self._check_settings(self.facts)
        except ValueError as error:
            fault = error
        self._world.begin("train.resume.settings", metadata=[], fault=fault).metadata.wait()

    def _check_settings(self, facts: dict[str, Any]) -> None:
        """Every setting that is not as it was takes effect from here on, or is refused by name."""
        now, folder, step = self._config, self.folder, facts["step"]
        before = take_settings(facts["config"], f"{folder}")
        for name in FIXED:
            if getattr(before, name) != getattr(now, name):
                raise ValueError(
                    f"train: --resume {folder} was made with {flag(name)} {getattr(before, name)}, not "
                    f"{getattr(now, name)}; leave it as it was"
                )
        if now.timeline_step != before.timeline_step and 0 < now.timeline_step <= step:
            raise ValueError(
                f"train: --resume {folder} is after step {step}: it is too late for --timeline-step {now.timeline_step}"
            )
        if now.steps < step:
            raise ValueError(f"train: --resume {folder} is after step {step}: --steps {now.steps} cannot be applied")

    def check_data(self, digest: str, vocabulary: int) -> None:
        """Other data are taken from the place on that was reached; they must have the same vocabulary."""
        assert self.facts is not None
        before = self.facts["vocabulary"]
        if before != vocabulary:
            raise ValueError(
                f"train: --resume {self.folder} was made with a vocabulary of {before}, but --data and --vocabulary "
                f"give {vocabulary}; leave them as they were"
            )
        if self.facts["data"] != digest and self._world.rank == 0:
            logger.warning("train: --resume %s was made with other data; its place is kept", self.folder)

    def load(self, state: StateToLoad, group: Any) -> dict[str, Any]:
        """Fill the run's state; what the checkpoint that was loaded says of itself."""
        while True:
            assert self.facts is not None
            read = partial(checkpoint.load_tensors, self.folder, state.tensors, group)  # nothing of the run is changed
            why = self._try(partial(state.check, self.folder)) or self._try(read)
            why = why or self._try(partial(state.take_over, self.facts["groups"]))
            if not why:
                return self.facts
            if self.folder == self._path:
                raise ValueError(f"train: --resume {self.folder} cannot be loaded: {why}")
            if self._world.rank == 0:
                logger.warning("the checkpoint %s cannot be loaded: %s; the one before it is used", self.folder, why)
            self._choose_next()

    def _try(self, action: Callable[[], None]) -> str:
        """Do it; what went wrong on any rank, the same words on all."""
        words = ""
        try:
            action()
        except CommError:
            raise
        except Exception as error:  # whatever is in the files, the one before is as good as ever
            words = f"{error}".removeprefix("train: ") or type(error).__name__
        failed = self._world.begin("train.load", metadata=[int(bool(words))]).metadata.wait()
        if not any(number for (number,) in failed):
            return ""
        return next(text for text in gather_text(self._world, "train.load", words) if text).splitlines()[0]
