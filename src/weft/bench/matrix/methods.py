"""The matrix optimizers that `weft bench matrix` measures, by the names of its tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from weft.optim import REKLS, SOAP, Muon, NorMuon

# Decay as the others'; rates of Muon's kind are AdamW's where its scale is that of AdamW's entries.
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "Muon": partial(Muon, weight_decay=0.01, scale="rms"),
    "NorMuon": partial(NorMuon, weight_decay=0.01),
    "SOAP": SOAP,
    "exact": partial(REKLS, variant="exact"),
    "stable, every step": partial(REKLS, root_every=1),
    "stable": REKLS,
}


def begins_so(names: Iterable[str], beginnings: tuple[str, ...]) -> list[str]:
    """Those of ``names`` that begin with one of ``beginnings``; all, if there is none.

    >>> begins_so(["Muon", "exact", "stable"], ("M", "st"))
    ['Muon', 'stable']
    """
    found = [name for name in names if not beginnings or name.startswith(beginnings)]
    if not found:
        raise ValueError(f"no method's name begins with {' or '.join(beginnings)}; there are {', '.join(names)}")
    return found
