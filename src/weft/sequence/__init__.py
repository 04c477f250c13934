"""How the tokens of a batch lie on the ranks: layouts, lengths and documents; `shard` and `unshard`."""

from weft.sequence.layout import LAYOUTS
from weft.sequence.loss import mean_loss
from weft.sequence.sequence import Sequence, sequence
from weft.sequence.shard import shard, unshard

__all__ = ["LAYOUTS", "Sequence", "mean_loss", "sequence", "shard", "unshard"]
