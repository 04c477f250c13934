"""The flags of `weft train`. torch is imported when there is something to do, not to show them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import tyro

from weft.train.config import TrainConfig


def make_command(arguments: Sequence[str]) -> Callable[..., None]:
    """The command for tyro; its defaults are what ``arguments`` say of a config file and of a run to resume."""
    defaults = TrainConfig()
    if "-h" not in arguments and "--help" not in arguments:
        from weft.train.command import or_exit, read_defaults

        defaults = or_exit(lambda: read_defaults(arguments))

    def train(
        config: Annotated[Path | None, tyro.conf.Positional] = None,
        settings: Annotated[TrainConfig, tyro.conf.arg(name="")] = defaults,
    ) -> None:
        """Train a hybrid language model with all four families at once.

        It starts dp x cp x tp local ranks; `torchrun ... -m weft.train` joins the ranks there are.

        Args:
            config: Settings in a .json or .toml file, by their names below with underscores; flags come after it.
            settings: Every one of them.
        """
        from weft.train.command import or_exit, start

        or_exit(lambda: start(settings, arguments))

    return train
