"""``python -m weft``, and so ``torchrun ... -m weft``: the command line."""

from __future__ import annotations

from weft.cli import main

if __name__ == "__main__":
    main()
