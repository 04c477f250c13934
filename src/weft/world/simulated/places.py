"""Where in the program something happened, and what the simulated device has to say about it."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import torch

_C: Any = torch._C  # private: _current_autograd_node
_NOT_THE_PROGRAM = (torch.__path__[0], str(Path(__file__).parent), threading.__file__, contextlib.__file__)
_DEPTH = 4

Place = tuple[tuple[CodeType, int] | str, ...]


class SimulatedDeviceError(RuntimeError):
    """A race, memory given back too early, or a host synchronisation where it is forbidden."""


class Reports:
    """What was found. ``raising``: raise it where it is found; otherwise it is only kept in ``texts``."""

    def __init__(self) -> None:
        self.raising, self.texts = True, list[str]()

    def add(self, text: str) -> None:
        """Keep ``text``, and raise it if that is wanted."""
        self.texts.append(text)
        if self.raising:
            raise SimulatedDeviceError(text)


reports = Reports()
_skipped: dict[CodeType, bool] = {}


def place() -> Place:
    """The innermost frames of the program, outside torch and this package; in C++'s backward, the name of the node.

    Only code objects and line numbers are kept: no text is made before there is something to report, no frame lives on.
    """
    frame = sys._getframe(1)
    found: list[tuple[CodeType, int] | str] = []
    while frame is not None and len(found) < _DEPTH:
        code = frame.f_code
        skipped = _skipped.get(code)
        if skipped is None:
            inside = code.co_filename.startswith(_NOT_THE_PROGRAM) or code.co_name == "__torch_function__"
            skipped = _skipped[code] = inside
        if not skipped:
            found.append((code, frame.f_lineno))
        frame = frame.f_back  # type: ignore[assignment]
    if not found and (node := _C._current_autograd_node()) is not None:
        found.append(node.name())
    return tuple(found)


def describe(where: Place) -> str:
    """``file:line function < file:line function``, the innermost first."""
    words = [w if isinstance(w, str) else f"{Path(w[0].co_filename).name}:{w[1]} {w[0].co_name}" for w in where]
    return " < ".join(words) or "an unknown place"


@contextlib.contextmanager
def collect_reports() -> Iterator[list[str]]:
    """Within it reports are collected, for all threads, in the list this gives; nothing is raised for them."""
    before = reports.raising, reports.texts
    reports.raising, reports.texts = False, []
    try:
        yield reports.texts
    finally:
        reports.raising, reports.texts = before
