"""How the tokens of a batch lie on the ranks: layouts, lengths and documents; `shard` and `unshard`."""

from weft.ops.sequence.layout import LAYOUTS, Sequence
from weft.ops.sequence.loss import mean_loss
from weft.ops.sequence.operation import sequence, shard, unshard

__all__ = ["LAYOUTS", "Sequence", "mean_loss", "sequence", "shard", "unshard"]
