"""A tensor-parallel MLP trained by REKLS beside the same one in one process: python examples/rekls.py."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import weft


class Model(nn.Module):
    """Two matrices, two vectors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The same on all ranks of a tensor-parallel group; something smooth to learn."""
    x = torch.randn(128, 16, generator=torch.Generator().manual_seed(step))
    return x, torch.sin(x.sum(1, keepdim=True) / 4)


def train(axis: weft.Axis, steps: int = 60) -> list[float]:
    """The loop; one rank or many, it is the same."""
    model = Model()
    if axis.size > 1:
        mesh = init_device_mesh("cpu", (axis.size,))
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    # Matrices by REKLS, biases by AdamW. Each matrix is decomposed by one rank: who, and over which mesh, is found out
    # from the parameters. "stable": ranks that sum in another order than one process would still follow it.
    optimizer = weft.optim.REKLS(model.parameters(), lr=0.01, variant="stable")
    losses = []
    for step in range(steps):
        x, y = batch(step)
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    alone = weft.launch(train, 1)[0]
    for rank, losses in enumerate(weft.launch(train, 2)):
        apart = max(abs(one - other) for one, other in zip(losses, alone, strict=True))
        print(f"rank {rank}: loss {losses[0]:.3f} -> {losses[-1]:.5f}, at most {apart:.0e} from one process")
