"""`weft train` in a process that kills itself: torchrun runs this file in place of `-m weft.train`.

KILL=WHERE,RANK,STEP,SECONDS: in the first life of the ranks, RANK is killed SECONDS after it begins STEP ("step"), or
when the checkpoint of STEP is half written ("write"), or just before it gets its name ("name", rank 0).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

import tyro

from weft.cli import make_train
from weft.parallel import checkpoint
from weft.train.trainer import Trainer


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    where, rank, step, seconds = os.environ["KILL"].split(",")
    if os.environ["RANK"] == rank and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        take_step, write, finish = Trainer.take_step, checkpoint._Writer.write_data, checkpoint._Writer.finish

        def doomed_step(self: Trainer) -> Any:
            if self.done + 1 == int(step):
                threading.Timer(float(seconds), die).start()
            return take_step(self)

        def doomed_write(self: Any, *args: Any) -> Any:
            if self._folder.name == f"step-{int(step):08d}":
                (self._partial / "shard-00009-model-00001-of-00001.safetensors").write_bytes(b"half of it")
                die()
            return write(self, *args)

        def doomed_finish(self: Any, **both: Any) -> None:
            if self._folder.name == f"step-{int(step):08d}":
                die()
            finish(self, **both)

        if where == "step":
            Trainer.take_step = doomed_step  # type: ignore[method-assign]
        elif where == "write":
            checkpoint._Writer.write_data = doomed_write  # type: ignore[method-assign]
        else:
            checkpoint._Writer.finish = doomed_finish  # type: ignore[method-assign]
    tyro.cli(make_train(sys.argv[1:]), prog="weft train")


if __name__ == "__main__":
    main()
