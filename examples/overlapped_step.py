"""A bigram model whose table, matrices and vectors are one overlapped step: python examples/overlapped_step.py."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import weft

TOKENS = 64


class Model(nn.Module):
    """Predicts the next token from a hashed bigram's row."""

    def __init__(self, axis: weft.Axis) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bigrams = weft.BigramHashEmbedding(5003, 32, group=axis)
        self.net = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, TOKENS))

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.net(self.bigrams(tokens[:, :-1]))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def batch(step: int, rank: int) -> Tensor:
    """Another on every rank: sequences in which each token follows from the two before it."""
    tokens = torch.randint(0, TOKENS, (8, 17), generator=torch.Generator().manual_seed(100 * step + rank))
    for at in range(2, 17):
        tokens[:, at] = (3 * tokens[:, at - 1] + tokens[:, at - 2]) % TOKENS
    return tokens


def train(axis: weft.Axis, steps: int = 80) -> tuple[list[float], str]:
    """The loop, without DDP: the step averages."""
    model, alone = Model(axis), axis.subset([axis.rank])  # no tensor-parallel ranks
    matrices, vectors = ([weight for weight in model.net.parameters() if weight.ndim == ndim] for ndim in (2, 1))
    parts = [
        weft.optim.REKLS(matrices, lr=0.02, variant="stable", group=alone, data_group=axis),
        weft.optim.ShardedAdamW(vectors, lr=0.01, group=axis),
        weft.optim.RowAdam(model.bigrams.parameters(), lr=0.05),
    ]
    step = weft.optim.OverlappedStep(parts, clip=1.0, overlap_backward=True)
    losses = []
    for number in range(steps):
        loss = model(batch(number, axis.rank))
        losses.append(loss.item())
        loss.backward()
        step.step()
        step.zero_grad()
    return losses, str(step.explain())


if __name__ == "__main__":
    for rank, (losses, explained) in enumerate(weft.launch(train, 2)):
        print(f"rank {rank}: loss {losses[0]:.3f} -> {losses[-1]:.3f}\n{explained}")
