"""Optimizers whose work is shared among the ranks, and clipping over them."""

from weft.optim.broadcast import broadcast_parameters
from weft.optim.clip import clip_grad_norm_
from weft.optim.overlapped_step import OverlappedStep
from weft.optim.part import StepPart
from weft.optim.rekls import REKLS
from weft.optim.row_adam import RowAdam
from weft.optim.sharded_adamw import ShardedAdamW

__all__ = ["REKLS", "OverlappedStep", "RowAdam", "ShardedAdamW", "StepPart", "broadcast_parameters", "clip_grad_norm_"]
