"""Softmax attention over packed documents on two ranks, in a plain training loop: python examples/attention.py."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import weft

BOUNDS = torch.tensor([0, 37, 50, 101])  # three documents in one sequence


class Model(nn.Module):
    """One attention layer, 4 heads over 2 KV heads. All weights are on every rank; x is its part of the sequence."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.places, self.head = nn.Embedding(10, width), nn.Embedding(64, width), nn.Linear(width, 10)
        self.qkv = nn.Linear(width, 64)

    def forward(self, ids: Tensor, sequence: weft.Sequence) -> Tensor:
        x = self.embed(ids) + self.places(sequence.positions())  # positions within documents, wherever a token lies
        q, k, v = self.qkv(x).unflatten(-1, (8, 8)).split([4, 2, 2], 2)  # [B, S, H, D], twice [B, S, Hk, D]
        return self.head(x + weft.attention(q, k, v, causal=True, sequence=sequence).flatten(2))


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Ids and targets ``[1, 101]``, the same on all ranks: each document counts in steps of its own."""
    stride = torch.randint(1, 10, (3,), generator=torch.Generator().manual_seed(step)).repeat_interleave(BOUNDS.diff())
    ids = (stride * torch.arange(101)).remainder(10)[None]
    return ids, ids.roll(-1).index_fill(1, BOUNDS[1:] - 1, -100)  # the last token of a document predicts nothing


def train(axis: weft.Axis, steps: int = 60) -> list[float]:
    """The loop; returns the losses, the same on every rank."""
    model = Model()
    wrapped = DistributedDataParallel(model) if dist.is_initialized() else model  # takes the mean of gradients
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for step in range(steps):
        ids, targets = (weft.shard(x, 1, layout="zigzag", group=axis) for x in batch(step))  # zigzag: equal work
        sequence = weft.sequence(ids.shape[1], layout="zigzag", cu_seqlens=BOUNDS, group=axis)  # once for each batch
        logits = wrapped(ids, sequence).mT  # [B, 10, S]
        loss_sum = nn.functional.cross_entropy(logits, targets, reduction="sum")
        (loss := weft.mean_loss(loss_sum, (targets != -100).sum(), group=axis)).backward()  # over all ranks' tokens
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    alone, ranks = train(weft.Axis.of(None)), weft.launch(train, 2)
    assert all(abs(loss - one) < 1e-4 for *losses, one in zip(*ranks, alone, strict=True) for loss in losses)
    print(f"loss {alone[0]:.3f} -> {alone[-1]:.3f}, the same on two ranks as in one process")
