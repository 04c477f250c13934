"""Going on: all ranks agree on a checkpoint, on settings that it allows, and on its state."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from weft.comm import Axis
from weft.comm.metadata import gather_text
from weft.errors import CommError
from weft.train.config import MODEL, TrainConfig, flag, take_settings
from weft.train.run_folder import list_checkpoints, read_facts, whole_checkpoints
from weft.train.run_state import StateToLoad

logger = logging.getLogger(__name__)
FIXED = (*MODEL, "length", "seed", "variant")  # weights, the place in the data and the optimizer's state rest on them
AT_STEPS = ("tune", "timeline_step")  # what is done once, at a step


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
        self._candidates = self._find_candidates()
        self.folder, self.facts = Path(), None  # type: tuple[Path, dict[str, Any] | None]
        self._choose_next()

    def _find_candidates(self) -> Iterator[tuple[Path, dict[str, Any]]]:
        own = self._path.resolve() == self._config.out.resolve()
        if own and not list_checkpoints(self._path):
            return iter(())  # it ended before its first checkpoint, or has never begun
        return whole_checkpoints(self._path)

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
        for name in AT_STEPS:
            value = getattr(now, name)
            if value != getattr(before, name) and 0 < value <= step:
                raise ValueError(
                    f"train: --resume {folder} is after step {step}: it is too late for {flag(name)} {value}"
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
            why = self._try(partial(state.check, self.folder)) or self._try(partial(state.read, self.folder, group))
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
