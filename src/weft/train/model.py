"""The hybrid language model: token and bigram embeddings, blocks of several kinds of attention, a head.

And its optimizer: REKLS on matrices, AdamW on the rest, exact Adam on rows, as one overlapped step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import weft
from weft.comm.device import copy_to_device
from weft.ops.sequence import Sequence
from weft.parallel.mesh import ParallelMesh, cut_over_tensor_ranks
from weft.train.config import TrainConfig
from weft.train.delta_block import DeltaMixer

ADAMW: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8}
DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.float32}


@dataclass
class Place:
    """Where the tokens of a call stand: on the ranks, and in their documents (``positions`` ``[1, T]``)."""

    sequence: Sequence
    positions: Tensor


@dataclass
class Cache:
    """What a block remembers, when text is sampled: a state and a convolution's last tokens, or keys and values."""

    state: Tensor | None = None
    window: Tensor | None = None
    keys: Tensor | None = None
    values: Tensor | None = None


@dataclass
class DecodeState:
    """What a model remembers between calls: how many tokens, the last one, and a cache for each block."""

    caches: list[Cache]
    tokens: int = 0
    last: Tensor | None = None


def attend_linear(q: Tensor, k: Tensor, v: Tensor, g: Tensor, where: Sequence) -> Tensor:
    """Linear attention over a sharded sequence."""
    return weft.linear_attention(q, k, v, g, scale=1.0, sequence=where)[0]


def attend_softmax(q: Tensor, k: Tensor, v: Tensor, where: Sequence) -> Tensor:
    """Causal softmax attention over a sharded sequence."""
    return weft.attention(q, k, v, causal=True, sequence=where)


class LinearMixer(nn.Module):
    """Linear attention with a gate for each head: one state per head crosses context-parallel ranks.

    x ``[1, T, width]`` in and out; q, k, v, gate and out are matrices width x width, cut by heads over tensor ranks.
    ``attend`` is how ranks share the work of training; `weft bench train` sets others.
    """

    def __init__(self, config: TrainConfig, mesh: ParallelMesh, dtype: torch.dtype) -> None:
        super().__init__()
        self.attend: Callable[[Tensor, Tensor, Tensor, Tensor, Sequence], Tensor] = attend_linear
        self.head_dim = config.width // config.heads
        self.q, self.k, self.v, self.gate, self.out = (
            nn.Linear(config.width, config.width, bias=False, dtype=dtype) for _ in range(5)
        )
        self.decay = nn.Linear(config.width, config.heads, bias=False, dtype=dtype)
        # Heads begin with memories of different lengths: decays from 0.73 to 0.998.
        offsets = torch.linspace(1.0, 6.0, config.heads, dtype=dtype)
        self.register_buffer("offset", offsets.chunk(mesh.tensor.size)[mesh.tensor.rank].clone(), persistent=False)

    def forward(self, x: Tensor, place: Place, cache: Cache | None) -> Tensor:
        q, k, v, gate = (part(x).unflatten(-1, (-1, self.head_dim)) for part in (self.q, self.k, self.v, self.gate))
        q, k = (F.normalize(F.silu(part), dim=-1).to(v.dtype) for part in (q, k))  # autocast may norm in fp32
        g = F.logsigmoid(self.decay(x).to(self.offset.dtype) + self.offset)
        if cache is None:
            o = self.attend(q, k, v, g, place.sequence)
        else:
            o, cache.state = weft.linear_attention(
                q, k, v, g, scale=1.0, initial_state=cache.state, output_final_state=True, sequence=place.sequence
            )
        o = F.rms_norm(o, (self.head_dim,)) * F.silu(gate)
        return self.out(o.flatten(2))


class SoftmaxMixer(nn.Module):
    """Causal softmax attention within documents, with rotary positions: keys and values cross context ranks.

    x ``[1, T, width]`` in and out; matrices are cut by heads over tensor-parallel ranks. ``attend`` as above.
    """

    def __init__(self, config: TrainConfig, mesh: ParallelMesh, dtype: torch.dtype) -> None:
        super().__init__()
        self.attend: Callable[[Tensor, Tensor, Tensor, Sequence], Tensor] = attend_softmax
        self.head_dim = config.width // config.heads
        narrow = config.kv_heads * self.head_dim
        self.q, self.out = (nn.Linear(config.width, config.width, bias=False, dtype=dtype) for _ in range(2))
        self.k, self.v = (nn.Linear(config.width, narrow, bias=False, dtype=dtype) for _ in range(2))

    def forward(self, x: Tensor, place: Place, cache: Cache | None) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.head_dim)) for part in (self.q, self.k, self.v))
        q, k = (rotate(F.rms_norm(part, (self.head_dim,)), place.positions).to(v.dtype) for part in (q, k))
        if cache is None:
            return self.out(self.attend(q, k, v, place.sequence).flatten(2))
        cache.keys = k if cache.keys is None else torch.cat([cache.keys, k], 1)
        cache.values = v if cache.values is None else torch.cat([cache.values, v], 1)
        new, seen = q.shape[1], cache.keys.shape[1]
        mask = torch.ones(new, seen, dtype=torch.bool, device=q.device).tril(seen - new)
        q, keys, values = (part.transpose(1, 2) for part in (q, cache.keys, cache.values))
        o = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)
        return self.out(o.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two matrices; hidden units are cut over tensor-parallel ranks."""

    def __init__(self, config: TrainConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, config.hidden, bias=False, dtype=dtype)
        self.down = nn.Linear(config.hidden, config.width, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


MIXERS: dict[str, Callable[[TrainConfig, ParallelMesh, torch.dtype], nn.Module]] = {
    "l": LinearMixer, "s": SoftmaxMixer, "d": DeltaMixer,
}  # fmt: skip


class Block(nn.Module):
    """Attention of one kind, then an MLP, each on a normed residual stream."""

    def __init__(self, kind: str, config: TrainConfig, mesh: ParallelMesh, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm_mixer, self.norm_mlp = (nn.RMSNorm(config.width, dtype=dtype) for _ in range(2))
        self.mixer = MIXERS[kind](config, mesh, dtype)
        self.mlp = MLP(config, dtype)

    def cut(self, mesh: ParallelMesh) -> None:
        """Heads and hidden units over the tensor-parallel ranks."""
        by_heads = [name for name, _ in self.mixer.named_children() if name != "out"]
        cut_over_tensor_ranks(self.mixer, mesh, columns=by_heads, rows=["out"], inputs=3)
        cut_over_tensor_ranks(self.mlp, mesh, columns=["up"], rows=["down"], inputs=1)

    def forward(self, x: Tensor, place: Place, cache: Cache | None = None) -> Tensor:
        x = x + self.mixer(self.norm_mixer(x), place, cache)
        return x + self.mlp(self.norm_mlp(x))


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary positions: pairs of channels of ``x`` ``[1, T, H, D]`` turned by angles that grow with the position."""
    wide = torch.promote_types(x.dtype, torch.float32)
    half = x.shape[-1] // 2
    rates = 10_000.0 ** (-torch.arange(half, dtype=wide, device=x.device) / half)
    angles = positions.to(device=x.device, dtype=wide)[..., None, None] * rates
    cos, sin = angles.cos(), angles.sin()
    first, second = x.to(wide).split(half, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1).to(x.dtype)


class LanguageModel(nn.Module):
    """Tokens in, logits out; the same weights on any mesh.

    | part                  | on the ranks                                  | stepped by   |
    |-----------------------|-----------------------------------------------|--------------|
    | ``tokens``, ``head``  | whole on every rank                           | AdamW        |
    | norms, other vectors  | whole on every rank                           | AdamW        |
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
            if weight.ndim > 1 and not name.startswith("bigrams"):
                scale = weight.shape[-1] ** -0.5 if not name.startswith("tokens") else 0.5
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
        """Logits of ``tokens`` ``[1, T]`` (of the CPU) that follow those decoded before; caches move on."""
        before = tokens if state.last is None else torch.cat([state.last, tokens], 1)
        rows = self.bigrams.rows_of(before)[:, -tokens.shape[1] :]
        positions = state.tokens + torch.arange(tokens.shape[1])[None]
        place = Place(weft.sequence(tokens.shape[1], group=self.mesh.context), positions)
        logits = self(copy_to_device(tokens, self.tokens.weight.device), rows, place, state)
        state.tokens, state.last = state.tokens + tokens.shape[1], tokens[:, -1:]
        return logits


def sort_parameters(model: LanguageModel) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """By name: matrices of blocks (REKLS), what has weight decay else (AdamW), norms and the like. Not the table."""
    matrices: dict[str, Tensor] = {}
    decayed: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, weight in model.named_parameters():
        if weight is model.bigrams.weight:
            continue
        kind = plain if weight.ndim != 2 else matrices if name.startswith("blocks.") else decayed
        kind[name] = weight
    return matrices, decayed, plain


def make_step(config: TrainConfig, model: LanguageModel, mesh: ParallelMesh) -> weft.optim.OverlappedStep:
    """One step for all parameters of a model, wrapped or not."""
    matrices, decayed, plain = sort_parameters(model)
    rows = weft.optim.RowAdam([("bigrams.weight", model.bigrams.weight)], lr=config.lr_rows)
    decay = config.weight_decay
    options: dict[str, Any] = {"lr": config.lr, "variant": config.variant}
    if config.wrap == "weft":
        parts: list[Any] = [
            weft.optim.REKLS(
                list(matrices.items()), weight_decay=decay, group=mesh.tensor, data_group=mesh.tokens, **options
            ),
            weft.optim.ShardedAdamW(
                [{"params": list(decayed.items()), "weight_decay": decay},
                 {"params": list(plain.items()), "weight_decay": 0.0}],
                lr=config.lr_adamw, group=mesh.tokens, **ADAMW,
            ),
            rows,
        ]  # fmt: skip
        return weft.optim.OverlappedStep(parts, clip=config.clip, overlap_backward=True)
    by_adamw = {"algorithm": "adamw", "lr": config.lr_adamw, **ADAMW}
    groups: list[dict[str, Any]] = [
        {"params": list(matrices.items()), "weight_decay": decay},
        {"params": list(decayed.items()), "weight_decay": decay, **by_adamw},
        {"params": list(plain.items()), "weight_decay": 0.0, **by_adamw},
    ]
    return weft.optim.OverlappedStep([weft.optim.REKLS(groups, group=mesh.tokens, **options), rows], clip=config.clip)


def rate_at(config: TrainConfig, step: int) -> float:
    """What the rates are multiplied with at a step (from 0): a rise, then a cosine.

    >>> rate_at(TrainConfig(warmup=10, steps=100), 4)
    0.5
    """
    if step < config.warmup:
        return (step + 1) / config.warmup
    done = (step - config.warmup) / max(1, config.steps - config.warmup)
    return config.lr_end + (1 - config.lr_end) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def set_rates(config: TrainConfig, step: weft.optim.OverlappedStep, factor: float) -> None:
    """The rates of all parts."""
    for name, part in step.parts.items():
        for group in part.param_groups:
            of_adamw = name == "ShardedAdamW" or group.get("algorithm") == "adamw"
            base = config.lr_rows if name == "RowAdam" else config.lr_adamw if of_adamw else config.lr
            group["lr"] = base * factor
