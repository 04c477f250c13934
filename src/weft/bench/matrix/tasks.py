"""Two small training tasks for `weft bench matrix --quality`, each made anew from a seed.

- teacher-student: an MLP 16-32-32-8 with tanh learns another one of its shape; squared error on 2,048 other inputs.
- language model: bytes of Python's standard library; 2 layers of width 64 with 4 heads, context 64, batch 16; every
  tenth file is held out, and the loss is in nats for each byte of it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, LAYERS, HEADS, CONTEXT, BATCH = 64, 2, 4, 64, 16


@dataclass(frozen=True)
class Task:
    """A model to train. ``loss()`` is that of the next batch, ``validation()`` that of held-out data.

    ``matrices`` are the weights between hidden layers; ``others`` the rest: embeddings, head, norms, biases.
    """

    matrices: list[nn.Parameter]
    others: list[nn.Parameter]
    loss: Callable[[], Tensor]
    validation: Callable[[], Tensor]


def teacher_student(seed: int) -> Task:
    """An MLP that learns what another one does, from 128 inputs in a step."""
    torch.manual_seed(seed)
    sizes = (16, 32, 32, 8)

    def mlp() -> nn.Sequential:
        layers = [nn.Linear(one, other) for one, other in itertools.pairwise(sizes)]
        return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])

    teacher, student = mlp().requires_grad_(False), mlp()
    for weight in teacher.parameters():
        weight.mul_(2)  # not nearly linear
    held_out = torch.randn(2048, sizes[0])

    def loss(inputs: Tensor) -> Tensor:
        return F.mse_loss(student(inputs), teacher(inputs))

    return Task(
        [weight for weight in student.parameters() if weight.ndim == 2],
        [weight for weight in student.parameters() if weight.ndim == 1],
        lambda: loss(torch.randn(128, sizes[0])),
        lambda: loss(held_out),
    )


class Block(nn.Module):
    """A transformer block: attention over the bytes before, then an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.projection = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class ByteModel(nn.Module):
    """Logits of the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        for table in (self.bytes, self.places):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.bytes(tokens) + self.places.weight[: tokens.shape[1]])))


def language_model(seed: int) -> Task:
    """A byte-level language model."""
    torch.manual_seed(seed)
    model, (train, held_out) = ByteModel(), _text()

    def loss(windows: Tensor) -> Tensor:
        logits = model(windows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())

    validation = _windows(held_out, 32 * BATCH, torch.Generator().manual_seed(0))
    matrices = [weight for weight in model.blocks.parameters() if weight.ndim == 2]
    inside = {id(weight) for weight in matrices}
    return Task(
        matrices,
        [weight for weight in model.parameters() if id(weight) not in inside],
        lambda: loss(_windows(train, BATCH, None)),
        lambda: loss(validation),
    )


def _windows(text: Tensor, count: int, make: torch.Generator | None) -> Tensor:
    """Some places of the text, each CONTEXT bytes and the one after them."""
    starts = torch.randint(0, len(text) - CONTEXT, (count, 1), generator=make)
    return text[starts + torch.arange(CONTEXT + 1)].long()


@cache
def _text() -> tuple[Tensor, Tensor]:
    """Bytes of the modules of the standard library: to train on, and of every tenth file to validate."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    parts = [torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8) for file in files if file.stat().st_size]
    return torch.cat([part for at, part in enumerate(parts) if at % 10]), torch.cat(parts[::10])


TASKS: dict[str, Callable[[int], Task]] = {"teacher-student": teacher_student, "language model": language_model}
