"""``torchrun ... -m weft.train``: the ranks that torchrun started train."""

from __future__ import annotations

import sys

import tyro

from weft.train.config import make_command

if __name__ == "__main__":
    tyro.cli(make_command(sys.argv[1:]), prog="weft train")
