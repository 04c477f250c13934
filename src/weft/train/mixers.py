"""The blocks of the model: linear or softmax attention over a sharded sequence, then an MLP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import weft
from weft.ops.sequence import Sequence
from weft.parallel.mesh import ParallelMesh, cut_over_tensor_ranks
from weft.train.config import TrainConfig


@dataclass
class Place:
    """Where the tokens of a call stand: on the ranks, and in their documents (``positions`` ``[1, T]``)."""

    sequence: Sequence
    positions: Tensor


@dataclass
class Cache:
    """What a block remembers of the tokens before, when text is sampled: a state, or keys and values."""

    state: Tensor | None = None
    keys: Tensor | None = None
    values: Tensor | None = None


@dataclass
class DecodeState:
    """What a model remembers between calls: how many tokens, the last one, and a cache for each block."""

    caches: list[Cache]
    tokens: int = 0
    last: Tensor | None = field(default=None)


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

    def cut(self, mesh: ParallelMesh) -> None:
        """Over the tensor-parallel ranks."""
        cut_over_tensor_ranks(self, mesh, columns=["q", "k", "v", "gate", "decay"], rows=["out"], inputs=3)

    def forward(self, x: Tensor, place: Place, cache: Cache | None) -> Tensor:
        q, k, v, gate = (part(x).unflatten(-1, (-1, self.head_dim)) for part in (self.q, self.k, self.v, self.gate))
        q, k = F.normalize(F.silu(q), dim=-1), F.normalize(F.silu(k), dim=-1)
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

    def cut(self, mesh: ParallelMesh) -> None:
        """Over the tensor-parallel ranks."""
        cut_over_tensor_ranks(self, mesh, columns=["q", "k", "v"], rows=["out"], inputs=3)

    def forward(self, x: Tensor, place: Place, cache: Cache | None) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.head_dim)) for part in (self.q, self.k, self.v))
        q, k = (rotate(F.rms_norm(part, (self.head_dim,)), place.positions) for part in (q, k))
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

    def cut(self, mesh: ParallelMesh) -> None:
        """Over the tensor-parallel ranks."""
        cut_over_tensor_ranks(self, mesh, columns=["up"], rows=["down"], inputs=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


MIXERS: dict[str, type[LinearMixer] | type[SoftmaxMixer]] = {"l": LinearMixer, "s": SoftmaxMixer}


class Block(nn.Module):
    """Attention of one kind, then an MLP, each on a normed residual stream."""

    def __init__(self, kind: str, config: TrainConfig, mesh: ParallelMesh, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm_mixer, self.norm_mlp = (nn.RMSNorm(config.width, dtype=dtype) for _ in range(2))
        self.mixer = MIXERS[kind](config, mesh, dtype)
        self.mlp = MLP(config, dtype)

    def cut(self, mesh: ParallelMesh) -> None:
        """Over the tensor-parallel ranks."""
        self.mixer.cut(mesh)
        self.mlp.cut(mesh)

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
