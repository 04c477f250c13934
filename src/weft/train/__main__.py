"""``torchrun ... -m weft.train``: the ranks that torchrun started train."""

from __future__ import annotations

import sys

import tyro

from weft.cli import make_train

if __name__ == "__main__":
    tyro.cli(make_train(sys.argv[1:]), prog="weft train")
