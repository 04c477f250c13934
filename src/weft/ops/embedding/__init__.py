"""Embedding tables whose rows travel only where a batch touches them."""

from weft.ops.embedding.bigram import BigramHashEmbedding
from weft.ops.embedding.exchange import RowExchange
from weft.ops.embedding.sharded import ShardedEmbedding
from weft.ops.embedding.table import RowTable

__all__ = ["BigramHashEmbedding", "RowExchange", "RowTable", "ShardedEmbedding"]
