"""Embedding tables whose rows travel only where a batch touches them."""

from weft.embedding.bigram import BigramHashEmbedding
from weft.embedding.exchange import RowExchange
from weft.embedding.sharded import ShardedEmbedding
from weft.embedding.table import RowTable

__all__ = ["BigramHashEmbedding", "RowExchange", "RowTable", "ShardedEmbedding"]
