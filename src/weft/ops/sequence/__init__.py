"""How the tokens of a batch lie on the ranks: layouts, lengths and documents; `shard` and `unshard`;
`Mask`, who sees whom."""

from weft.ops.sequence.layout import LAYOUTS, Sequence
from weft.ops.sequence.loss import mean_loss
from weft.ops.sequence.mask import Mask
from weft.ops.sequence.operation import sequence, shard, unshard

__all__ = ["LAYOUTS", "Mask", "Sequence", "mean_loss", "sequence", "shard", "unshard"]
