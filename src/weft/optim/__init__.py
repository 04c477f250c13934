"""Optimizers whose work is shared among the ranks, and clipping over them."""

from weft.optim.broadcast import broadcast_parameters
from weft.optim.clip import clip_grad_norm_
from weft.optim.matrix.muon import Muon
from weft.optim.matrix.normuon import NorMuon
from weft.optim.matrix.rekls import REKLS
from weft.optim.matrix.soap import SOAP
from weft.optim.rows.adam import RowAdam
from weft.optim.slices.adamw import ShardedAdamW
from weft.optim.step.overlapped import OverlappedStep
from weft.optim.step.part import StepPart

__all__ = [
    "REKLS", "SOAP", "Muon", "NorMuon", "OverlappedStep", "RowAdam", "ShardedAdamW", "StepPart", "broadcast_parameters",
    "clip_grad_norm_",
]  # fmt: skip
