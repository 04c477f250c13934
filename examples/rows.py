"""A tiny language model with two sharded tables in a plain training loop: python examples/rows.py."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import weft


class Model(nn.Module):
    """Tokens and hashed bigrams in, logits out. The tables lie on all ranks, the rest is replicated."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.tokens = weft.ShardedEmbedding(vocabulary, width)
        self.bigrams = weft.BigramHashEmbedding(100_003, width)
        self.head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, vocabulary))

    def forward(self, ids: Tensor, rows: Tensor) -> Tensor:
        return self.head(self.tokens(ids) + self.bigrams(rows=rows))


def batch(rank: int, step: int) -> Tensor:
    """Each rank has its own: digits that count up, so that there is something to learn."""
    start = torch.randint(0, 10, (8, 1), generator=torch.Generator().manual_seed(100 * step + rank))
    return (start + torch.arange(33)) % 10


def train(axis: weft.Axis, steps: int = 30) -> list[float]:
    """The loop; returns this rank's losses."""
    torch.manual_seed(0)
    model = Model(vocabulary=10, width=32)
    # The one line that keeps DDP off the tables; FSDP2: fully_shard(model, ignored_params={...weights}).
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["tokens.weight", "bigrams.weight"])
    wrapped = DistributedDataParallel(model) if dist.is_initialized() else model
    tables = [model.tokens.weight, model.bigrams.weight]
    rows = weft.optim.RowAdam(tables, lr=0.01)
    dense = torch.optim.AdamW(model.head.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        ids = batch(axis.rank, step)
        logits = wrapped(ids[:, :-1], model.bigrams.rows_of(ids[:, :-1]))
        model.tokens.prefetch(batch(axis.rank, step + 1)[:, :-1])  # the next batch's rows travel under this backward
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        weft.clip_grad_norm_([*tables, *model.head.parameters()], 1.0)
        for optimizer in (rows, dense):
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    for rank, losses in enumerate(weft.launch(train, 2)):
        print(f"rank {rank}: loss {losses[0]:.2f} -> {losses[-1]:.2f}")
