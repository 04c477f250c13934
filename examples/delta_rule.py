"""Gated delta nets over a sequence on two ranks, in a plain training loop: python examples/delta_rule.py."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import weft


class Model(nn.Module):
    """Two gated delta net layers. All weights are on every rank; x is its part of the sequence."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads, self.embed, self.head = heads, nn.Embedding(10, width), nn.Linear(width, 10)
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.rates = nn.ModuleList(nn.Linear(width, 2 * heads) for _ in range(2))
        self.conv = nn.ParameterList(torch.randn(3 * width, 4) / 2 for _ in range(2))

    def forward(self, ids: Tensor, sequence: weft.Sequence) -> Tensor:
        x = self.embed(ids)
        for qkv, rates, conv in zip(self.qkv, self.rates, self.conv, strict=True):
            mixed, _ = weft.short_conv(qkv(x), conv, activation="silu", sequence=sequence)  # over the last 4 tokens
            q, k, v = mixed.unflatten(-1, (3, self.heads, -1)).unbind(2)  # [B, T, H, D], T tokens of this rank
            q, k = nn.functional.normalize(q, dim=-1), nn.functional.normalize(k, dim=-1)
            forget, write = rates(x).chunk(2, dim=-1)  # [B, T, H] each
            g = nn.functional.logsigmoid(forget + 2)
            o, _ = weft.delta_rule(q, k, v, write.sigmoid(), g, sequence=sequence)
            x = x + nn.functional.rms_norm(o.flatten(2), x.shape[-1:])
        return self.head(x)


def train(axis: weft.Axis, steps: int = 30) -> list[float]:
    """The loop; returns the losses, the same on every rank."""
    model = Model()
    optimizer = weft.optim.ShardedAdamW(model.parameters(), lr=0.01, clip=1.0, group=axis)  # takes the gradients' mean
    losses = []
    for step in range(steps):
        start, stride = torch.randint(1, 10, (2, 8, 1), generator=torch.Generator().manual_seed(step))
        whole = (start + stride * torch.arange(52)) % 10  # each row counts in steps of its own
        ids, targets = (weft.shard(x, 1, group=axis) for x in (whole[:, :-1], whole[:, 1:]))  # shifted, then cut
        sequence = weft.sequence(ids.shape[1], group=axis)  # once for each batch: every layer knows all lengths
        logits = model(ids, sequence).flatten(0, 1)
        loss_sum = nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum")
        (loss := weft.mean_loss(loss_sum, targets.numel(), group=axis)).backward()  # over all ranks' tokens
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    alone, ranks = train(weft.Axis.of(None)), weft.launch(train, 2)
    assert all(abs(loss - one) < 1e-3 for *losses, one in zip(*ranks, alone, strict=True) for loss in losses)
    print(f"loss {alone[0]:.3f} -> {alone[-1]:.3f}, the same on two ranks as in one process")
