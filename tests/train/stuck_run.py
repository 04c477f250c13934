"""`weft train` whose second step does not end: it says when it has begun, and when a signal has been noted."""

from __future__ import annotations

import sys
import time
from typing import Any

import tyro

from weft.cli import make_train
from weft.train import command
from weft.train.trainer import Trainer


def main() -> None:
    take_step = Trainer.take_step
    command.TOGETHER = 0.0

    def stuck(self: Trainer) -> Any:
        if self.done < 1:
            return take_step(self)
        print("stuck", flush=True)
        while not self._signal():
            time.sleep(0.01)
        print("noted", flush=True)
        time.sleep(600)

    Trainer.take_step = stuck  # type: ignore[method-assign]
    tyro.cli(make_train(sys.argv[1:]), prog="weft train")


if __name__ == "__main__":
    main()
