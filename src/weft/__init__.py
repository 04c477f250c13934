"""weft: distributed training operations for PyTorch whose communication runs under the computation."""

from weft.attention import attention, head_strides
from weft.comm import Axis, record
from weft.embedding import BigramHashEmbedding, RowExchange, ShardedEmbedding
from weft.linear_attention import linear_attention
from weft.optim import REKLS, OverlappedStep, RowAdam, ShardedAdamW, StepPart, broadcast_parameters, clip_grad_norm_
from weft.scan import exclusive_scan
from weft.sequence import mean_loss, sequence, shard, unshard
from weft.world import Machine, VirtualWorld, launch

__all__ = [
    "REKLS",
    "Axis",
    "BigramHashEmbedding",
    "Machine",
    "OverlappedStep",
    "RowAdam",
    "RowExchange",
    "ShardedAdamW",
    "ShardedEmbedding",
    "StepPart",
    "VirtualWorld",
    "attention",
    "broadcast_parameters",
    "clip_grad_norm_",
    "exclusive_scan",
    "head_strides",
    "launch",
    "linear_attention",
    "mean_loss",
    "record",
    "sequence",
    "shard",
    "unshard",
]
__version__ = "0.1.0"
