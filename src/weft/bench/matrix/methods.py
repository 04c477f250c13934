"""The matrix optimizers that `weft bench matrix` measures, by the names of its tables."""

from __future__ import annotations

from collections.abc import Callable
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
