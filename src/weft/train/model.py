"""The hybrid language model: token and bigram embeddings, blocks of linear and softmax attention, a head."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import weft
from weft.parallel.mesh import ParallelMesh
from weft.train.config import TrainConfig
from weft.train.mixers import Block, Cache, DecodeState, Place

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.float32}


class LanguageModel(nn.Module):
    """Tokens in, logits out; the same weights on any mesh.

    | part                  | on the ranks                                  | stepped by   |
    |-----------------------|-----------------------------------------------|--------------|
    | ``tokens``, ``head``  | whole on every rank                           | AdamW        |
    | norms                 | whole on every rank                           | AdamW        |
    | ``bigrams``           | rows over all ranks                           | RowAdam      |
    | matrices of blocks    | cut over tensor ranks, else whole             | REKLS        |
    """

    def __init__(self, config: TrainConfig, vocabulary: int, mesh: ParallelMesh) -> None:
        super().__init__()
        self.config, self.vocabulary, self.mesh = config, vocabulary, mesh
        dtype = DTYPES[config.dtype]
        self.tokens = nn.Embedding(vocabulary, config.width, dtype=dtype)
        self.bigrams = weft.BigramHashEmbedding(config.table_rows, config.width, group=mesh.world, dtype=dtype)
        self.blocks = nn.ModuleList(Block(kind, config, mesh, dtype) for kind in config.kinds)
        self.norm = nn.RMSNorm(config.width, dtype=dtype)
        self.head = nn.Linear(config.width, vocabulary, bias=False, dtype=dtype)
        self._fill(config)
        for block in self.blocks:
            block.cut(mesh)  # type: ignore[operator]

    @torch.no_grad()
    def _fill(self, config: TrainConfig) -> None:
        """Whole weights on every rank, from the seed alone; then they are cut."""
        source = torch.Generator().manual_seed(config.seed)
        for name, weight in self.named_parameters():
            if weight.ndim == 2 and not name.startswith("bigrams"):
                scale = weight.shape[1] ** -0.5 if not name.startswith("tokens") else 0.5
                if name.endswith(("out.weight", "down.weight")):
                    scale *= (2 * config.layers) ** -0.5
                weight.copy_(torch.randn(weight.shape, dtype=weight.dtype, generator=source) * scale)

    def forward(self, tokens: Tensor, rows: Tensor, place: Place, state: DecodeState | None = None) -> Tensor:
        """Logits ``[1, T, vocabulary]`` of this rank's tokens ``[1, T]``; ``rows`` are their hashed bigrams."""
        x = self.tokens(tokens) + self.bigrams(rows=rows)
        for number, block in enumerate(self.blocks):
            x = block(x, place, None if state is None else state.caches[number])
        return self.head(self.norm(x))

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The sum of the losses of this rank's tokens."""
        wide = torch.promote_types(logits.dtype, torch.float32)
        return F.cross_entropy(logits.flatten(0, 1).to(wide), targets.flatten(), reduction="sum")

    def start_decoding(self) -> DecodeState:
        """Empty caches, before the first token of a document."""
        return DecodeState([Cache() for _ in self.blocks])

    @torch.no_grad()
    def decode(self, tokens: Tensor, state: DecodeState) -> Tensor:
        """Logits of ``tokens`` ``[1, T]`` that follow those decoded before, in one process; caches move on."""
        before = tokens if state.last is None else torch.cat([state.last, tokens], 1)
        rows = self.bigrams.rows_of(before)[:, -tokens.shape[1] :]
        positions = state.tokens + torch.arange(tokens.shape[1])[None]
        place = Place(weft.sequence(tokens.shape[1], group=self.mesh.context), positions)
        logits = self(tokens, rows, place, state)
        state.tokens, state.last = state.tokens + tokens.shape[1], tokens[:, -1:]
        return logits
